//! Which host gets which number.

use std::cmp::Ordering;

/// A host that has joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Present<'a> {
    pub(super) host: &'a str,
    /// The number that it asked for.
    pub(super) wanted: Option<usize>,
    /// Whether its launcher leads.
    pub(super) leads: bool,
}

/// Numbers the hosts from 0. A host that asked for a number has it; the leader's is the first of the others, which
/// follow in the order of their names (`n2` before `n10`), then of their arrival.
pub(super) fn numbers(hosts: &[Present<'_>]) -> Vec<usize> {
    let mut free = (0..hosts.len()).filter(|number| hosts.iter().all(|host| host.wanted != Some(*number)));
    let mut order: Vec<usize> = (0..hosts.len()).filter(|at| hosts[*at].wanted.is_none()).collect();
    order.sort_by(|one, other| {
        let (one, other) = (&hosts[*one], &hosts[*other]);
        other.leads.cmp(&one.leads).then_with(|| natural(one.host, other.host))
    });
    let mut numbers: Vec<_> = hosts.iter().map(|host| host.wanted).collect();
    for at in order {
        numbers[at] = free.next();
    }
    numbers.into_iter().flatten().collect()
}

/// Compares names so that numbers in them count as such.
fn natural(one: &str, other: &str) -> Ordering {
    let (mut one_rest, mut other_rest) = (one, other);
    while let (Some(a), Some(b)) = (part(&mut one_rest), part(&mut other_rest)) {
        let order = match (a.parse::<u64>(), b.parse::<u64>()) {
            (Ok(a), Ok(b)) => a.cmp(&b),
            _ => a.cmp(b),
        };
        if order != Ordering::Equal {
            return order;
        }
    }
    one.len().cmp(&other.len()).then_with(|| one.cmp(other))
}

/// Takes the digits, or the other characters, that a text begins with.
fn part<'a>(text: &mut &'a str) -> Option<&'a str> {
    let digits = text.chars().next()?.is_ascii_digit();
    let end = text.find(|c: char| c.is_ascii_digit() != digits).unwrap_or(text.len());
    let (part, rest) = text.split_at(end);
    *text = rest;
    Some(part)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn present(host: &str, wanted: Option<usize>) -> Present<'_> {
        Present { host, wanted, leads: false }
    }

    #[test]
    fn wishes_come_first_then_the_leader_then_names() {
        let hosts = [present("n10", None), Present { leads: true, ..present("n9", None) }, present("n2", None)];
        assert_eq!(numbers(&hosts), [2, 0, 1]);
        let hosts = [present("a", None), present("b", Some(0)), present("a", None)];
        assert_eq!(numbers(&hosts), [1, 0, 2]);
        assert_eq!(numbers(&[]), [0; 0]);
    }

    #[test]
    fn numbers_in_names_count_as_such() {
        for (one, other) in [("n2", "n10"), ("n2-a", "n2-b"), ("n02", "n3"), ("n", "n1"), ("a9", "b1"), ("n2", "n02")] {
            assert_eq!(
                (natural(one, other), natural(other, one)),
                (Ordering::Less, Ordering::Greater),
                "{one} {other}"
            );
        }
    }

    proptest! {
        #[test]
        fn every_number_is_given_once(names in prop::collection::vec("[a-c][0-9]{0,2}", 1..8), wish in 0_usize..8) {
            let wants = |at: usize| (at == 0 && wish < names.len()).then_some(wish);
            let hosts: Vec<_> = names.iter().enumerate().map(|(at, name)| present(name, wants(at))).collect();
            let mut given = numbers(&hosts);
            prop_assert!(wants(0).is_none_or(|wish| given[0] == wish));
            given.sort_unstable();
            prop_assert!(given.into_iter().eq(0..names.len()));
        }
    }
}
