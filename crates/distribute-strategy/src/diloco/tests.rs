use super::*;
use crate::{CentralStorageStrategy, FullyShardedStrategy, MirroredStrategy};

fn mirrored(replicas: usize) -> Strategy {
    MirroredStrategy::builder().num_replicas(replicas).build().unwrap()
}

#[test]
fn what_it_cannot_be_built_over_is_refused() {
    let told = |builder: DilocoBuilder, over: Strategy| builder.over(over).unwrap_err().to_string();
    let builder = DilocoStrategy::builder;
    let apart = builder().over(mirrored(2)).unwrap();
    assert!(told(builder(), apart).contains("train apart already"));
    let sharded = FullyShardedStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap();
    assert!(told(builder(), sharded).contains("parts of variables"));
    let central = CentralStorageStrategy::builder().compute_devices(["CPU:0", "CPU:1"]).build().unwrap();
    assert!(told(builder(), central).contains("share one copy"));
    let ranks = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).tensor_parallel(2).build().unwrap();
    assert!(told(builder(), ranks).contains("tensor ranks"));
    assert!(told(builder().inner_steps(10).fragments(4), mirrored(1)).contains("such as 12"));
    assert!(told(builder().inner_steps(0), mirrored(1)).contains("at least 1"));
    assert!(told(builder().fragments(0), mirrored(1)).contains("at least 1"));
    let overlapped = told(builder().inner_steps(10).overlap(10), mirrored(1));
    assert!(overlapped.contains("overlap with 10 of 10 inner steps"), "{overlapped}");
    assert!(told(builder().inner_steps(1).overlap(1), mirrored(1)).contains("give fewer"));
    assert!(told(builder().mixing(0.5), mirrored(1)).contains("set overlap, or leave mixing out"));
    for share in [-0.1, 1.0, f64::NAN] {
        assert!(told(builder().overlap(5).mixing(share), mirrored(1)).contains("from 0 to below 1"));
    }
    let outer = OuterNesterov { learning_rate: -1.0, momentum: 0.0 };
    assert!(told(builder().outer(outer), mirrored(1)).contains("outer learning rate"));
}

#[test]
fn bytes_are_described() {
    let described = |replicas, wire| {
        DilocoStrategy::builder().inner_steps(8).fragments(2).wire(wire).over(mirrored(replicas)).unwrap().describe()
    };
    let eight = described(4, Wire::Int8);
    assert!(
        eight.starts_with("Diloco every 8 steps in 2 fragments, 1.52 bytes sent per parameter in 8 bits, over Mirr")
    );
    assert!(described(4, Wire::F32).contains(" 6.00 bytes sent per parameter in f32"));
    assert!(described(1, Wire::Int8).contains(" 0.00 bytes"));
    let overlapped = DilocoStrategy::builder().inner_steps(8).overlap(3).over(mirrored(2)).unwrap().describe();
    assert!(overlapped.starts_with("Diloco every 8 steps, reduced during 3 steps, 4.00 bytes"), "{overlapped}");
}
