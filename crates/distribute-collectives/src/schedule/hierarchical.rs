//! In levels: inside each host, between hosts, and back.

use super::{Schedule, Step, Transfer, binomial_broadcast, binomial_reduce, ring_all_reduce};

/// All-reduce in three phases: a tree inside each host collects at its first rank, a ring of those ranks goes across,
/// and trees bring the result back. `hosts[r]` tells the host of rank r; ranks of one host need not be neighbours.
///
/// It pays where ranks of one host reach each other much faster than those of others, and share one way out.
///
/// # Cost
/// Two trees of log2(ranks of a host) steps and 2 (hosts - 1) steps across; across, each host sends 2 (h - 1)/h of the
/// elements once, where a flat ring sends them once for each of its ranks.
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
        // What is complete here is complete for the host only: it is divided at the end of the ring.
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

/// A schedule of a few members, with their ranks among all.
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
