//! Strategies that shard over the replicas of a mesh: models train as they do where the replicas mirror each other.

use burn::optim::AdamConfig;
use distribute_burn::{BurnContext, BurnStrategy, Ema};
use distribute_cluster::Membership;
use distribute_strategy::FullyShardedStrategy;
use distribute_testkit::{Ports, short_or_long};
use distribute_values::{PerReplica, TensorStorage};

use super::*;

/// A mesh whose replicas share large variables among each `over` of them. Only norms and the small biases are mirrored.
fn sharded_mesh(replicas: usize, over: usize, ranks: usize) -> Strategy {
    let devices: Vec<String> = (0..replicas * ranks).map(|index| format!("CPU:{index}")).collect();
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(20)).bytes_per_pack(512);
    let builder = FullyShardedStrategy::builder().devices(devices).communication(communication);
    builder.tensor_parallel(ranks).shard_over(over).mirror_below(17).build().unwrap()
}

fn trains_as_mirrored<M: Classifier>(builds: &[(&str, bool, Build<M>)]) {
    for (index, (what, is_elementwise, build)) in builds.iter().enumerate() {
        let meshes = [(2, 2, 2), (3, 3, 2), (4, 2, 2), (2, 2, 4)];
        for (replicas, over, ranks) in meshes.into_iter().take(if index == 0 { 4 } else { short_or_long(1, 2) }) {
            let mirrored = mesh(replicas, ranks);
            let model = scope::<M>(&mirrored);
            let optimizer = build(&model).unwrap();
            let losses = train(&mirrored, &model, &optimizer, 5);
            let (expected, norm) = (wholes(&mirrored, &model), optimizer.gradient_norm());

            let strategy = sharded_mesh(replicas, over, ranks);
            let model = scope::<M>(&strategy);
            let its_optimizer = build(&model).unwrap().audit_every(2);
            let got = train(&strategy, &model, &its_optimizer, 5);
            let what = format!("{what}, {replicas} in {over} parts × {ranks} ranks");
            // The sum of two has no order; a norm is a sum in another one.
            let tolerance = if *is_elementwise && replicas == 2 { 0.0 } else { TOLERANCE };
            assert_close(&got, &losses, tolerance, &what);
            close(&wholes(&strategy, &model), &expected, tolerance, &what);
            model.audit(&strategy).unwrap();
            match (its_optimizer.gradient_norm(), norm) {
                (Some(got), Some(norm)) => assert!((got - norm).abs() < 1e-5 * norm, "{what}: {got} {norm}"),
                (got, norm) => assert_eq!(got, norm, "{what}"),
            }
        }
    }
}

#[test]
fn a_split_block_trains_as_under_mirrored_replicas() {
    trains_as_mirrored::<Block>(&[
        ("adam", true, |model| Adam::new(0.003).build(model)),
        ("sgd", true, |model| Sgd::new(0.1).momentum(0.9).build(model)),
        ("values clipped", true, |model| Adam::new(0.003).build(model)?.clip(Clip::Value(0.002))),
        ("burn's", true, |model| model.optimizer(AdamConfig::new().init(), 0.003, "Adam")),
        ("clipped", false, |model| Sgd::new(0.1).build(model)?.clip(Clip::GlobalNorm(0.05))),
        ("clipped and scaled", false, |model| {
            let optimizer = Adam::new(0.003).build(model)?.scale_losses(LossScale::dynamic().interval(3))?;
            optimizer.clip(Clip::GlobalNorm(0.05))
        }),
    ]);
}

/// An embedding whose weight is used twice, also for logits.
#[derive(Module, Debug)]
struct Words {
    words: VocabParallelEmbedding,
    norm: LayerNorm,
}

impl Classifier for Words {
    fn new(device: &Device) -> Words {
        seeded(device, |device| Words {
            words: vocab_parallel_embedding(VOCABULARY, WIDTH, device),
            norm: LayerNormConfig::new(WIDTH).init(device),
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.words.logits(mean(self.norm.forward(self.words.forward(tokens(x)))))
    }

    fn losses(&self, x: Tensor<2>, y: Tensor<1, Int>) -> Tensor<1> {
        vocab_parallel_cross_entropy_per_example(self.forward(x), y).unwrap()
    }
}

#[test]
fn a_weight_that_is_used_twice_trains_as_under_mirrored_replicas() {
    trains_as_mirrored::<Words>(&[("adam", true, |model| Adam::new(0.01).build(model))]);
}

#[test]
fn a_rank_has_its_part_of_a_slice() {
    let strategy = sharded_mesh(2, 2, 2);
    let column = ColumnParallelOptions::default().bias(false);
    let build = |device: &Device| seeded(device, |device| column_parallel_linear(7, 10, column, device));
    let model = strategy.scope(build).unwrap();
    let weight = &model.variables()[0];
    assert_eq!((weight.shape(), weight.layout().unwrap().shape()), (vec![7, 10], &[7, 5][..]));
    let whole: Vec<f32> = weight.whole(&strategy).unwrap().to_elements().unwrap();
    // The second half of the columns, row by row; its last part has a zero to fill it up.
    let slice: Vec<f32> = whole.chunks(10).flat_map(|row| row[5..].to_vec()).collect();
    let part = |local: usize| weight.components()[local].to_elements::<f32>().unwrap();
    assert_eq!((part(1), &part(3)[..17], part(3)[17]), (slice[..18].to_vec(), &slice[18..], 0.0));
    // Outside run, too, a rank's layer has its slice.
    for local in [1, 3] {
        let held = model.replica(local).unwrap().weight().into_data().try_into_vec::<f32>().unwrap();
        assert_eq!(held, slice);
    }
}

#[test]
fn checkpoints_go_to_other_arrangements_and_back() {
    checkpoints_move(&[
        (sharded_mesh(2, 2, 2), one()),
        (one(), sharded_mesh(2, 2, 2)),
        (sharded_mesh(2, 2, 2), mirrored(2)),
        (mesh(2, 2), sharded_mesh(4, 2, 2)),
        (sharded_mesh(2, 2, 4), sharded_mesh(3, 3, 1)),
        (sharded(2), sharded_mesh(2, 2, 2)),
    ]);
}

#[test]
fn modules_and_averages_are_those_of_mirrored_replicas() {
    let run = |strategy: &Strategy| {
        let model = scope::<SplitMlp>(strategy);
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        let mut ema = Ema::new(&model, 0.9).unwrap();
        for _ in 0..3 {
            train(strategy, &model, &optimizer, 1);
            ema.update(&model).unwrap();
        }
        // In a replica the newest weights are used, and in the module that is made of them.
        let module = model.to_module(strategy).unwrap().valid();
        assert_eq!(module.num_params(), model.num_parameters());
        let x = cut(&batch(7, 8), 1, &Device::flex()).remove(0).0;
        let outputs = strategy.run_with(&model, |_, model| {
            Ok::<_, Error>(model.valid().forward(x.clone()).into_data().try_into_vec::<f32>().unwrap_or_default())
        });
        let whole = module.forward(x.clone()).into_data().try_into_vec::<f32>().unwrap();
        outputs.unwrap().values().iter().for_each(|output| assert_close(output, &whole, 1e-5, "outputs"));
        let other = scope::<SplitMlp>(&sharded_mesh(3, 3, 2));
        other.load_module(&model.to_module(strategy).unwrap()).unwrap();
        assert_eq!(wholes(&sharded_mesh(3, 3, 2), &other), wholes(strategy, &model));
        ema.swap(&model).unwrap();
        model.audit(strategy).unwrap();
        (whole, wholes(strategy, &model))
    };
    assert_eq!(run(&sharded_mesh(2, 2, 2)), run(&mesh(2, 2)));
    // Outside run a rank has no group.
    let model = scope::<Block>(&sharded_mesh(2, 2, 2));
    let x = noise(&Device::flex());
    let outside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.first().forward(x)));
    let told = *outside.unwrap_err().downcast::<String>().unwrap();
    assert!(told.contains("call the model in run"), "{told}");
}

#[test]
fn a_rank_that_fails_leaves_the_others_as_they_were() {
    let strategy = sharded_mesh(2, 2, 2);
    let build = || {
        let model = scope::<SplitMlp>(&strategy);
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        train(&strategy, &model, &optimizer, 2);
        (model, optimizer)
    };
    let (model, optimizer) = build();
    let before = wholes(&strategy, &model);
    let device = Device::flex().autodiff();
    let began = std::time::Instant::now();
    for failing in 0..4 {
        let parts = cut(&batch(1, 24), 2, &device).into_iter().flat_map(|part| vec![part; 2]).collect();
        let arguments = (&model, &optimizer, PerReplica::new(parts));
        let failed = strategy.run_with(arguments, |context, (model, optimizer, (x, y))| {
            let loss = context.average_loss(model.losses(x, y), 24);
            // The others wait for its weights and its sums in backward.
            match context.local_replica_id() == failing {
                true => Err(Error::NoExamples { what: "test a failure" }),
                false => optimizer.minimize(context, &loss),
            }
        });
        let error = failed.unwrap_err();
        assert!(matches!(error, Error::NoExamples { .. }), "{error}");
        assert_eq!(wholes(&strategy, &model), before);
    }
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    let losses = train(&strategy, &model, &optimizer, 4);
    let (other, its_optimizer) = build();
    assert_eq!(losses, train(&strategy, &other, &its_optimizer, 4));
    assert_eq!(wholes(&strategy, &model), wholes(&strategy, &other));
}

#[test]
fn workers_of_a_mesh_share_its_parameters() {
    let strategy = mesh(2, 2);
    let expected = scope::<Block>(&strategy);
    train(&strategy, &expected, &Adam::new(0.003).build(&expected).unwrap(), 6);
    let address = Ports::reserve(1).unwrap().addresses().remove(0);
    let worker = &|rank: u32| {
        let strategy = FullyShardedStrategy::builder()
            .devices(["CPU:0", "CPU:1"])
            .tensor_parallel(2)
            .mirror_below(17)
            .membership(Membership::new(rank, 2, &address).unwrap())
            .communication(CommunicationOptions::default().timeout(Duration::from_secs(30)))
            .build()
            .unwrap();
        // Other initial values on the second worker: the chief's are sent to it, each place its own parts.
        let halved = |device: &Device| Block::new(device).map(&mut super::states::Halved);
        let model = strategy.scope(|device| if rank == 0 { Block::new(device) } else { halved(device) }).unwrap();
        let optimizer = Adam::new(0.003).build(&model).unwrap();
        let device = Device::flex().autodiff();
        for step in 0..6 {
            let rows = if step == 5 { 9 } else { 24 };
            let part = cut(&batch(step, rows), 2, &device).swap_remove(rank as usize);
            let parts = PerReplica::new(vec![part; 2]);
            let stepped = strategy.run_with((&model, &optimizer, parts), |context, (model, optimizer, (x, y))| {
                optimizer.minimize(context, &context.average_loss(model.losses(x, y), rows))
            });
            stepped.unwrap();
        }
        model.audit(&strategy).unwrap();
        // This process has one replica's parts only.
        let outside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.first().out.weight()));
        let told = *outside.unwrap_err().downcast::<String>().unwrap();
        assert!(told.contains("sharded over several processes"), "{told}");
        let module = model.to_module(&strategy).unwrap();
        assert_eq!(module.out.weight().dims(), [WIDTH, WIDTH]);
        wholes(&strategy, &model)
    };
    let values = std::thread::scope(|scope| {
        let workers = [0, 1].map(|rank| scope.spawn(move || worker(rank)));
        workers.map(|worker| worker.join().unwrap())
    });
    assert_eq!(values[0], values[1]);
    assert_eq!(values[0], wholes(&strategy, &expected));
}
