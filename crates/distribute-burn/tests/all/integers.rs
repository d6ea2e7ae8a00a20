//! Parameters of integers and of truth values, drawn anew whenever a model is built.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Bool, Device, Int, Tensor};
use distribute_burn::{BurnStrategy, Model, Sgd};
use distribute_cluster::Membership;
use distribute_strategy::{CommunicationOptions, MultiWorkerMirroredStrategy, Strategy};
use distribute_testkit::Ports;
use distribute_train::checkpoint::{Checkpointed, MODEL, Snapshot};

use crate::common::*;

/// A layer on some inputs, in another order.
#[derive(Module, Debug)]
struct Permuted {
    order: Param<Tensor<1, Int>>,
    kept: Param<Tensor<1, Bool>>,
    head: Linear,
}

/// The number of models that were built.
static BUILT: AtomicUsize = AtomicUsize::new(0);

impl Permuted {
    fn of_size(size: usize, device: &Device) -> Permuted {
        let first = 1 + BUILT.fetch_add(1, Ordering::Relaxed);
        let order: Vec<i32> = (0..size).map(|at| ((at + first) % size) as i32).collect();
        let kept = Tensor::<1, Int>::from_ints(&order[..], device).lower_elem(5);
        let param = |order| Param::initialized(ParamId::new(), order);
        let (order, kept) = (Tensor::from_ints(&order[..], device), Param::initialized(ParamId::new(), kept));
        let head = seeded(device, |device| LinearConfig::new(INPUTS, CLASSES).init(device));
        Permuted { order: param(order), kept, head }
    }

    fn values(&self) -> (Vec<i64>, Vec<bool>) {
        let order = self.order.val().into_data().iter::<i64>().collect();
        (order, self.kept.val().into_data().iter::<bool>().collect())
    }
}

impl Classifier for Permuted {
    fn new(device: &Device) -> Permuted {
        Permuted::of_size(INPUTS, device)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let rows = x.dims()[0];
        let dropped = self.kept.val().bool_not().reshape([1, INPUTS]).expand([rows, INPUTS]);
        self.head.forward(x.select(1, self.order.val()).mask_fill(dropped, 0.0))
    }
}

/// Returns the values of all local replicas, which are equal.
fn of_all(model: &Model<Permuted>) -> (Vec<i64>, Vec<bool>) {
    let first = model.first().values();
    assert_eq!(first.1.iter().filter(|kept| **kept).count(), 5);
    for local in 0.. {
        let Some(replica) = model.replica(local) else { break };
        assert_eq!(replica.values(), first, "replica {local}");
    }
    first
}

fn steps(strategy: &Strategy, model: &Model<Permuted>) -> Vec<f32> {
    train(strategy, model, &Sgd::new(0.1).build(model).unwrap(), 3)
}

#[test]
fn replicas_have_those_of_the_first() {
    for strategy in [one(), mirrored(2), sharded(2)] {
        let model = scope::<Permuted>(&strategy);
        let values = of_all(&model);
        let mut names: Vec<&str> = model.variables().iter().map(distribute_burn::Variable::name).collect();
        names.sort_unstable();
        assert_eq!(names, ["head.bias", "head.weight", "kept", "order"]);
        assert_eq!(model.num_parameters(), INPUTS * CLASSES + CLASSES);
        steps(&strategy, &model);
        model.audit(&strategy).unwrap();
        assert_eq!(of_all(&model), values);
        assert_eq!(model.to_module(&strategy).unwrap().values(), values);
    }
}

#[test]
fn workers_have_those_of_the_chief() {
    let address = format!("127.0.0.1:{}", Ports::reserve(1).unwrap().release()[0]);
    let built = Barrier::new(2);
    let worker = |rank: u32| {
        let builder = MultiWorkerMirroredStrategy::builder().membership(Membership::new(rank, 2, &address).unwrap());
        let options = CommunicationOptions::default().timeout(Duration::from_secs(30));
        let strategy = builder.devices(["CPU:0", "CPU:1"]).communication(options).build().unwrap();
        built.wait();
        let values = of_all(&scope::<Permuted>(&strategy));
        built.wait();
        values
    };
    let [first, second] = std::thread::scope(|scope| {
        let worker = &worker;
        [0, 1].map(|rank| scope.spawn(move || worker(rank))).map(|worker| worker.join().unwrap())
    });
    assert_eq!(first, second);
}

#[test]
fn a_checkpoint_and_a_module_restore_them() {
    for strategy in [one(), mirrored(2), sharded(2)] {
        let model = scope::<Permuted>(&strategy);
        let mut snapshot = Snapshot::new(1);
        model.save(&strategy, &mut snapshot).unwrap();
        let (values, module) = (of_all(&model), model.to_module(&strategy).unwrap());
        let losses = steps(&strategy, &model);
        for is_module in [false, true] {
            let again = scope::<Permuted>(&strategy);
            let before = again.first();
            assert_ne!(of_all(&again), values);
            match is_module {
                true => again.load_module(&module).unwrap(),
                false => again.load(&strategy, &snapshot).unwrap(),
            }
            assert_eq!(of_all(&again), values);
            assert_ne!(before.values(), values);
            // The replicas compute with them.
            assert_eq!(steps(&strategy, &again), losses);
        }
    }
}

#[test]
fn a_checkpoint_without_them_leaves_those_of_the_model() {
    let strategy = mirrored(2);
    let model = scope::<Permuted>(&strategy);
    let (mut snapshot, mut old) = (Snapshot::new(1), Snapshot::new(1));
    model.save(&strategy, &mut snapshot).unwrap();
    for name in ["head.weight", "head.bias"] {
        let (dtype, shape, bytes) = snapshot.tensor(MODEL, name).unwrap();
        old.put_bytes(MODEL, name, dtype, shape, bytes.to_vec());
    }
    let again = scope::<Permuted>(&strategy);
    let values = of_all(&again);
    again.load(&strategy, &old).unwrap();
    assert_eq!(of_all(&again), values);
}

#[test]
fn others_on_another_replica_are_refused() {
    let mut size = INPUTS;
    let built = mirrored(2).scope(|device| {
        size -= 1;
        Permuted::of_size(size, device)
    });
    let told = built.map(drop).unwrap_err().to_string();
    assert!(told.contains("order [15], integers on the first replica and order [14], integers on replica 1"), "{told}");
    let model = scope::<Permuted>(&one());
    let told = model.load_module(&Permuted::of_size(9, &Device::flex().autodiff())).unwrap_err().to_string();
    assert!(told.contains("order [9], integers"), "{told}");
}
