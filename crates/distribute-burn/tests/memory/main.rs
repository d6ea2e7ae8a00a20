//! The memory of fully sharded parameters, counted by the allocator. The only test of its process.
#![expect(clippy::unwrap_used, reason = "tests")]

use burn::module::Module;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use distribute_burn::{Adam, BurnContext, BurnStrategy, Error};
use distribute_strategy::{FullyShardedStrategy, MirroredStrategy, Strategy};
use distribute_testkit::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

const WIDTH: usize = 1024;
const LAYERS: usize = 6;
/// The bytes of one layer's weight and bias.
const LAYER: usize = (WIDTH + 1) * WIDTH * 4;

#[derive(Module, Debug)]
struct Deep {
    layers: Vec<Linear>,
}

impl Deep {
    fn new(device: &Device) -> Deep {
        // Random numbers take most of the time without optimization.
        let layer = LinearConfig::new(WIDTH, WIDTH).with_initializer(Initializer::Constant { value: 0.01 });
        Deep { layers: (0..LAYERS).map(|_| layer.init(device)).collect() }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layers.iter().fold(x, |x, layer| relu(layer.forward(x)))
    }
}

/// Returns the most bytes that a model, its optimizer and its steps take, over all replicas of the process.
fn peak(strategy: &Strategy) -> usize {
    let before = ALLOCATOR.reset_peak();
    let model = strategy.scope(Deep::new).unwrap();
    let optimizer = Adam::new(1e-4).build(&model).unwrap();
    for _ in 0..2 {
        let step = strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
            let x = Tensor::<2>::ones([2, WIDTH], &context.burn_device()?);
            optimizer.minimize(context, &context.average_loss(model.forward(x).square(), 4))?;
            Ok::<_, Error>(())
        });
        step.unwrap();
    }
    ALLOCATOR.peak() - before
}

/// The most bytes of gradients that are on their way to other replicas at once.
const ON_THE_WAY: usize = 16 << 20;

/// Parameters, gradients and Adam's two slots: 1/w of them on each of w replicas; a whole weight and a whole gradient;
/// with overlap also the next weight, in place of a gradient, and gradients on their way.
#[test]
fn each_replica_holds_its_share_and_two_layers() {
    let devices = |replicas: usize| (0..replicas).map(|cpu| format!("CPU:{cpu}")).collect::<Vec<String>>();
    let mirrored = peak(&MirroredStrategy::builder().devices(devices(2)).build().unwrap()) / 2;
    assert!(mirrored >= 4 * LAYERS * LAYER, "{mirrored}");
    for (replicas, overlap) in [(2, true), (4, true), (2, false), (4, false)] {
        let strategy = FullyShardedStrategy::builder().devices(devices(replicas)).overlap(overlap).build().unwrap();
        let each = peak(&strategy) / replicas;
        let allowed = mirrored / replicas + 2 * LAYER + if overlap { ON_THE_WAY } else { 0 };
        println!("{replicas} replicas, overlap {overlap}: {each} bytes each, {allowed} allowed, {mirrored} mirrored");
        assert!(each <= allowed, "{replicas} replicas hold {each} bytes each, more than {allowed}");
    }
}
