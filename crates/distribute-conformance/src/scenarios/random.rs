//! Random numbers.

use distribute::prelude::*;
use distribute::strategy::{RandomState, ReplicaRandom};
use rand_chacha::rand_core::Rng;

use crate::check::{Fault, Stop, check, check_eq};

fn draw(strategy: &Strategy, random: &ReplicaRandom) -> Result<Vec<u64>, Stop> {
    let drawn = strategy.run_with((), |context, ()| Ok::<_, Fault>(random.next(context).next_u64()))?.into_values();
    // The ranks of a tensor group are one replica, and draw the same.
    let of_replicas: Vec<u64> = drawn.iter().step_by(strategy.tensor_parallel()).copied().collect();
    for (replica, ranks) in of_replicas.iter().zip(drawn.chunks(strategy.tensor_parallel())) {
        check!(ranks.iter().all(|rank| rank == replica), "ranks of one replica drew {ranks:?}");
    }
    Ok(of_replicas)
}

pub(crate) fn streams(strategy: &Strategy) -> Result<(), Stop> {
    let drawn = draw(strategy, &strategy.random(7))?;
    let mut apart = drawn.clone();
    apart.sort_unstable();
    apart.dedup();
    check_eq!(apart.len(), drawn.len(), "different streams");
    check_eq!(draw(strategy, &strategy.random(7))?, drawn, "streams of the same seed");
    check!(draw(strategy, &strategy.random(8))? != drawn, "another seed gives the same streams");
    // The replicas of all processes have streams of their own, which equal those of the same ids in one process.
    let first = strategy.topology().first_replica();
    let all: Vec<String> = (0..strategy.num_replicas_in_sync()).map(|index| format!("CPU:{index}")).collect();
    let mirrored = MirroredStrategy::builder().devices(all).build()?;
    let everyone = draw(&mirrored, &mirrored.random(7))?;
    check_eq!(drawn, &everyone[first..first + drawn.len()], "streams by id");
    Ok(())
}

pub(crate) fn restored(strategy: &Strategy) -> Result<(), Stop> {
    let random = strategy.random(7);
    draw(strategy, &random)?;
    let saved: RandomState = random.state();
    let next = draw(strategy, &random)?;
    // On three replicas, of which those that existed before continue their streams.
    let three = MirroredStrategy::builder().devices(["CPU:0", "CPU:1", "CPU:2"]).build()?;
    let elsewhere = draw(&three, &three.restore_random(saved))?;
    let first = strategy.topology().first_replica();
    for (id, value) in elsewhere.iter().enumerate() {
        if let Some(here) = id.checked_sub(first).and_then(|local| next.get(local)) {
            check_eq!(value, here, format!("the stream of replica {id}"));
        }
    }
    check_eq!(draw(strategy, &strategy.restore_random(saved))?, next, "streams that continue");
    Ok(())
}
