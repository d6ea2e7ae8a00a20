//! Whole models of burn's layers: results, and gradients of parameters and inputs.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2dConfig, AvgPool2dConfig, MaxPool2dConfig};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{
    DropoutConfig, Embedding, EmbeddingConfig, Gelu, GruConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
    LstmConfig, PaddingConfig2d,
};
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::module::batch_norm_train;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_backend::AutodiffBackend;
use burn_capture::CaptureBackend;

use crate::harness::{Inputs, Outputs, check, floats, results};
use crate::module::data;

type Diff = Autodiff<CaptureBackend>;

/// Lists the sizes of a module's parameters.
#[derive(Default)]
struct Sizes(Vec<Vec<usize>>);

impl ModuleVisitor for Sizes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.val().dims().to_vec());
    }
}

/// Replaces a module's parameters by inputs, in order.
struct Replace<'a> {
    inputs: &'a Inputs,
    next: usize,
}

impl ModuleMapper for Replace<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let place = self.next;
        self.next += 1;
        Param::initialized(param.id, self.inputs.float::<D>(place))
    }
}

/// Compares a model whose parameters are inputs after `given`.
fn check_model<M: Module>(
    name: &str,
    given: &[TensorData],
    init: impl Fn(&Device) -> M,
    forward: impl Fn(&M, &Inputs) -> Outputs,
) {
    let mut sizes = Sizes::default();
    init(&Device::flex()).visit(&mut sizes);
    assert!(!sizes.0.is_empty(), "{name}: a model has parameters");
    let mut all = given.to_vec();
    all.extend(sizes.0.iter().zip(11..).map(|(dims, seed)| {
        let values: Vec<f32> = data(seed, dims).iter::<f32>().map(|x| x / 8.0).collect();
        TensorData::new(values, dims.clone())
    }));
    check(name, 2e-4, &all, |t| {
        let model = init(t.device()).map(&mut Replace { inputs: t, next: given.len() });
        forward(&model, t)
    });
}

/// The mean of −log of the probability of each row's class.
fn cross_entropy(logits: Tensor<2>, classes: Tensor<1, Int>) -> Tensor<1> {
    let chosen = log_softmax(logits, 1).gather(1, classes.unsqueeze_dim(1));
    chosen.mean().neg()
}

#[derive(Module, Debug)]
struct Mlp {
    first: Linear,
    norm: LayerNorm,
    gelu: Gelu,
    second: Linear,
}

#[test]
fn a_multilayer_perceptron() {
    let init = |device: &Device| Mlp {
        first: LinearConfig::new(5, 6).init(device),
        norm: LayerNormConfig::new(6).init(device),
        gelu: Gelu::new(),
        second: LinearConfig::new(6, 3).init(device),
    };
    let given = [data(1, &[4, 5]), TensorData::from([0i64, 2, 1, 2])];
    check_model("perceptron", &given, init, |model: &Mlp, t| {
        let hidden = model.norm.forward(model.first.forward(t.float::<2>(0)));
        let logits = model.second.forward(model.gelu.forward(hidden));
        Outputs::new().float(cross_entropy(logits.clone(), t.int(1))).constant(logits)
    });
}

#[derive(Module, Debug)]
struct Images {
    first: Conv2d,
    gamma: Param<Tensor<1>>,
    beta: Param<Tensor<1>>,
    second: Conv2d,
    head: Linear,
}

#[test]
fn images_with_batch_norm_and_pooling() {
    let init = |device: &Device| Images {
        first: Conv2dConfig::new([2, 4], [3, 3]).with_padding(PaddingConfig2d::Same).init(device),
        gamma: Param::from_tensor(Tensor::ones([4], device)),
        beta: Param::from_tensor(Tensor::zeros([4], device)),
        second: Conv2dConfig::new([4, 6], [2, 2]).with_stride([2, 1]).with_groups(2).with_bias(false).init(device),
        head: LinearConfig::new(6, 3).init(device),
    };
    let given = [data(1, &[2, 2, 6, 7]), TensorData::from([2i64, 0])];
    check_model("images", &given, init, |model: &Images, t| {
        let x = model.first.forward(t.float::<4>(0));
        let normed = batch_norm_train(x, model.gamma.val(), model.beta.val(), 1e-2);
        let x = MaxPool2dConfig::new([2, 2]).with_strides([1, 1]).init().forward(relu(normed.output));
        let x = model.second.forward(x);
        let x = AvgPool2dConfig::new([2, 2]).with_strides([1, 2]).init().forward(x);
        let x = AdaptiveAvgPool2dConfig::new([1, 1]).init().forward(x);
        let logits = model.head.forward(x.flatten::<2>(1, 3));
        let loss = cross_entropy(logits, t.int(1));
        Outputs::new().float(loss).constant(normed.mean).constant(normed.variance)
    });
}

#[derive(Module, Debug)]
struct Language {
    embedding: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

#[test]
fn a_transformer_with_a_causal_mask() {
    for norm_first in [false, true] {
        let init = |device: &Device| Language {
            embedding: EmbeddingConfig::new(7, 4).init(device),
            encoder: TransformerEncoderConfig::new(4, 8, 2, 1)
                .with_dropout(0.0)
                .with_norm_first(norm_first)
                .init(device),
            head: LinearConfig::new(4, 7).init(device),
        };
        let tokens = TensorData::from([[1i64, 3, 3], [6, 0, 2]]);
        let next = TensorData::from([3i64, 3, 5, 0, 2, 4]);
        check_model("transformer", &[tokens, next], init, |model: &Language, t| {
            let x = model.embedding.forward(t.int::<2>(0));
            let mask = generate_autoregressive_mask(2, 3, t.device());
            let x = model.encoder.forward(TransformerEncoderInput::new(x).mask_attn(mask));
            let logits = model.head.forward(x).reshape([6, 7]);
            Outputs::new().float(cross_entropy(logits, t.int(1)))
        });
    }
}

#[test]
fn recurrent_models() {
    let given = [data(1, &[2, 3, 4])];
    check_model(
        "lstm",
        &given,
        |device| LstmConfig::new(4, 3, true).init(device),
        |model, t| {
            let (all, state) = model.forward(t.float::<3>(0), None);
            Outputs::new().float(all).float(state.cell)
        },
    );
    for reset_after in [false, true] {
        let config = GruConfig::new(4, 3, true).with_reset_after(reset_after);
        check_model(
            "gru",
            &given,
            |device| config.init(device),
            |model, t| Outputs::new().float(model.forward(t.float::<3>(0), None)),
        );
    }
}

/// Dropout keeps a part of the elements, and scales them so that their mean stays.
#[test]
fn dropout_has_its_statistics() {
    // It drops only on devices that record gradients.
    let found = results(&[], |t| {
        let x = Tensor::<2>::ones([80, 100], &t.device().clone().autodiff());
        let dropped = DropoutConfig::new(0.25).init().forward(x).try_into_primitive::<Diff>().unwrap();
        Outputs::new().constant(Tensor::<2>::from_primitive::<CaptureBackend>(Diff::inner(dropped)))
    });
    let found = floats(&found[0]).unwrap();
    let kept = found.iter().filter(|x| **x != 0.0).count();
    assert!((5800..6200).contains(&kept), "{kept} of 8000 are kept; expected about 6000");
    assert!(found.iter().all(|x| *x == 0.0 || (*x - 4.0 / 3.0).abs() < 1e-6));
}
