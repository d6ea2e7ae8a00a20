//! Refusals in words, and the failure of a rank, which ends the others.

use std::time::Instant;

use burn::nn::{Dropout, DropoutConfig};
use burn::optim::{LambConfig, ModuleOptimizer};
use distribute_burn::{BurnContext, BurnStrategy, Lamb};
use distribute_collectives::Compression;
use distribute_values::PerReplica;

use super::*;

fn refused<M: Module + Sync + 'static>(strategy: &Strategy, mut build: impl FnMut(&Device) -> M) -> String {
    strategy.scope(|device| seeded(device, &mut build)).map(drop).unwrap_err().to_string()
}

/// The weight of the first layer is the second's, too.
#[derive(Module, Debug)]
struct TiedOtherwise {
    column: ColumnParallelLinear,
    plain: Linear,
}

/// Puts a layer's weight into the linear layer that follows it.
#[derive(Default)]
struct Tie(Option<Box<dyn std::any::Any>>);

impl burn::module::ModuleMapper for Tie {
    fn map_float<const D: usize>(&mut self, param: burn::module::Param<Tensor<D>>) -> burn::module::Param<Tensor<D>> {
        match self.0.take().and_then(|first| first.downcast::<burn::module::Param<Tensor<D>>>().ok()) {
            Some(first) => *first,
            None => {
                self.0 = Some(Box::new(param.clone()));
                param
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_by_scope() {
    let strategy = mesh(1, 2);
    let column = ColumnParallelOptions::default();
    let told = refused(&strategy, |device| column_parallel_linear(8, 7, column, device));
    assert!(told.contains("\"weight\"") && told.contains("[8, 7]") && told.contains("multiple of 2"), "{told}");
    let told = refused(&strategy, |device| column_parallel_linear(8, 8, column.blocks(3), device));
    assert!(told.contains("multiple of 6"), "{told}");
    let told = refused(&strategy, |device| row_parallel_linear(7, 8, RowParallelOptions::default(), device));
    assert!(told.contains("[7, 8]") && told.contains("axis 0"), "{told}");
    let told = refused(&strategy, |device| vocab_parallel_embedding(97, 8, device));
    assert!(told.contains("[97, 8]"), "{told}");
    let bare = column.bias(false);
    let tied = |device: &Device| {
        let model = TiedOtherwise {
            column: column_parallel_linear(8, 8, bare, device),
            plain: LinearConfig::new(8, 8).with_bias(false).init(device),
        };
        model.map(&mut Tie::default())
    };
    let told = refused(&strategy, tied);
    assert!(told.contains("plain.weight") && told.contains("split among tensor ranks in one layer"), "{told}");
    // Without tensor groups nothing is split.
    assert_eq!(one().scope(|device| seeded(device, tied)).unwrap().variables().len(), 1);
}

#[derive(Module, Debug)]
struct Dropping {
    up: ColumnParallelLinear,
    dropout: Dropout,
}

#[test]
fn layers_that_draw_other_numbers_on_each_rank_are_refused() {
    let build = |is_frozen: bool| {
        move |device: &Device| {
            let dropout = DropoutConfig::new(0.1).init();
            let dropout = if is_frozen { dropout.freeze() } else { dropout };
            Dropping { up: column_parallel_linear(8, 8, split_columns(), device), dropout }
        }
    };
    let told = refused(&mesh(1, 2), build(false));
    assert!(told.contains("layer \"dropout\" draws random numbers") && told.contains("2 here"), "{told}");
    assert!(mesh(1, 2).scope(|device| seeded(device, build(true))).is_ok());
    assert!(one().scope(|device| seeded(device, build(false))).is_ok());
}

#[test]
fn what_does_not_fit_is_refused_by_optimizers() {
    let strategy = mesh(1, 2);
    let model = scope::<SplitMlp>(&strategy);
    let lamb: ModuleOptimizer = LambConfig::new().init();
    let told = model.optimizer(lamb, 0.01, "LAMB").map(drop).unwrap_err().to_string();
    assert!(told.starts_with("LAMB computes with whole parameters"), "{told}");
    let told = Lamb::new(0.01).build(&model).map(drop).unwrap_err().to_string();
    assert!(told.contains("split among tensor ranks") && told.contains("AdamW"), "{told}");
    let told = Adam::new(0.01).build(&model).unwrap().compress(Compression::TopK(0.1)).map(drop).unwrap_err();
    assert!(told.to_string().contains("compression of whole buckets"), "{told}");
}

#[test]
fn split_models_run_in_their_strategy_only() {
    let model = scope::<Block>(&mesh(1, 2));
    let x = noise(&Device::flex());
    let outside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.first().forward(x.clone())));
    let told = *outside.unwrap_err().downcast::<String>().unwrap();
    assert!(told.contains("vocab_parallel_embedding") && told.contains("call the model in run"), "{told}");
    let other = mesh(1, 4);
    let told = other.run_with(PerReplica::new(vec![(); 4]), |_, ()| Ok::<_, Error>(model.first().forward(x.clone())));
    let told = told.map(drop).unwrap_err().to_string();
    assert!(told.contains("groups of 4"), "{told}");
    let told = mirrored(2).run_with((), |_, ()| Ok::<_, Error>(model.first().forward(x.clone()))).map(drop);
    assert!(told.unwrap_err().to_string().contains("call the model in run"));
    let words = scope::<Block>(&one());
    let far = Tensor::<2, Int>::from_ints([[3, VOCABULARY as i32]], &Device::flex());
    let failed = one().run_with((), |_, ()| Ok::<_, Error>(words.first().words.forward(far.clone()))).map(drop);
    assert!(failed.unwrap_err().to_string().contains("index 1 is 24, but the vocabulary has 24 words"));
}

#[test]
fn a_rank_that_fails_is_named_and_nothing_changes() {
    let strategy = mesh(2, 2);
    let build = || {
        let model = scope::<Block>(&strategy);
        let optimizer = Adam::new(0.003).build(&model).unwrap().clip(Clip::GlobalNorm(0.05)).unwrap();
        (model, optimizer)
    };
    let (model, optimizer) = build();
    train(&strategy, &model, &optimizer, 2);
    let before = wholes(&strategy, &model);
    let device = Device::flex().autodiff();
    let began = Instant::now();
    for failing in 0..4 {
        for fails_in_forward in [true, false] {
            let parts = cut(&batch(1, 24), 2, &device).into_iter().flat_map(|part| vec![part; 2]).collect();
            let arguments = (&model, &optimizer, PerReplica::new(parts));
            let failed = strategy.run_with(arguments, |context, (model, optimizer, (x, y))| {
                let fails = context.local_replica_id() == failing;
                let failure = || Err(Error::NoExamples { what: "test a failure" });
                if fails && fails_in_forward {
                    let _ = model.words.forward(tokens(x));
                    return failure();
                }
                let loss = context.average_loss(model.losses(x, y), 24);
                // The others wait for it in backward.
                if fails { failure() } else { optimizer.minimize(context, &loss) }
            });
            let error = failed.unwrap_err();
            assert!(matches!(error, Error::NoExamples { .. }), "{error}");
            assert_eq!(wholes(&strategy, &model), before);
        }
    }
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    let losses = train(&strategy, &model, &optimizer, 4);
    let (other, its_optimizer) = build();
    train(&strategy, &other, &its_optimizer, 2);
    assert_eq!(losses, train(&strategy, &other, &its_optimizer, 4));
    assert_eq!(wholes(&strategy, &model), wholes(&strategy, &other));
}

#[test]
fn a_rank_that_leaves_a_layer_out_is_an_error_of_the_collective() {
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(1));
    let builder = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).tensor_parallel(2);
    let strategy = builder.communication(communication).build().unwrap();
    let model = scope::<SplitMlp>(&strategy);
    let began = Instant::now();
    let failed = strategy.run_with(&model, |context, model| {
        if context.tensor_rank() == 0 {
            let _ = model.forward(noise(&context.burn_device()?));
        }
        Ok::<_, Error>(())
    });
    let error = failed.map(drop).unwrap_err();
    assert!(matches!(error, Error::Strategy(distribute_strategy::Error::Collective(_))), "{error}");
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
}
