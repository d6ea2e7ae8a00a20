//! Hierarchical algorithms: within each host, between hosts, and back.

use super::{Schedule, Step, Transfer, binomial_broadcast, binomial_reduce, ring_all_reduce};

/// Returns the steps of an all-reduce in three phases: a tree within each host collects at its first rank, a ring of
/// these ranks exchanges between hosts, and trees distribute the result. `hosts[r]` is the host of rank r; ranks of one
/// host need not be consecutive.
///
/// It pays if ranks of one host communicate much faster with each other than with those of others, and share one
/// network link.
///
/// # Cost
/// Two trees of log2(ranks of a host) steps, and 2 (hosts - 1) steps between hosts. Between hosts, each host sends the
/// share 2 (h - 1)/h of the elements once; in a flat ring it sends them once for each of its ranks.
pub fn hierarchical_all_reduce(rank: usize, hosts: &[usize], count: usize) -> Schedule {
    let of_host = |host: usize| -> Vec<usize> { (0..hosts.len()).filter(|rank| hosts[*rank] == host).collect() };
    let neighbours = of_host(hosts[rank]);
    let mut seen = Vec::new();
    for host in hosts {
        if !seen.contains(host) {
            seen.push(*host);
        }
    }
    let leaders: Vec<usize> = seen.into_iter().filter_map(|host| of_host(host).first().copied()).collect();
    let place = |members: &[usize]| members.iter().position(|member| *member == rank);
    let mut schedule = Schedule::new();
    if let Some(inside) = place(&neighbours) {
        // Values that are complete here are complete only for the host; a mean divides at the end of the ring.
        let collect = binomial_reduce(inside, neighbours.len(), 0, count);
        schedule.extend(renumbered(collect, &neighbours).map(|step| Step { complete: None, ..step }));
    }
    if let Some(across) = place(&leaders) {
        schedule.extend(renumbered(ring_all_reduce(across, leaders.len(), count), &leaders));
    }
    if let Some(inside) = place(&neighbours) {
        schedule.extend(renumbered(binomial_broadcast(inside, neighbours.len(), 0, count), &neighbours));
    }
    schedule
}

/// Converts a schedule of some members to their ranks among all.
fn renumbered<'a>(schedule: Schedule, members: &'a [usize]) -> impl Iterator<Item = Step> + 'a {
    let rename = |transfers: Vec<Transfer>| {
        transfers.into_iter().map(|transfer| Transfer { peer: members[transfer.peer], ..transfer }).collect()
    };
    schedule.into_iter().map(move |step| Step {
        sends: rename(step.sends),
        receives: rename(step.receives),
        complete: step.complete,
    })
}
