//! The number of replicas of a program's text.

/// Returns the number of replicas that a program's module names.
pub(super) fn replicas(text: &str) -> Result<usize, String> {
    number(text, REPLICAS)
        .ok_or_else(|| format!("it names no number of replicas; give its module the attribute {REPLICAS}N : i32"))
}

/// Returns the program for another number of replicas. Groups of all replicas become groups of all; what names certain
/// replicas is refused, as is a program of several partitions.
pub(super) fn with_replicas(text: &str, replicas: usize) -> Result<String, String> {
    let found = self::replicas(text)?;
    if let Some(partitions) = number(text, PARTITIONS).filter(|partitions| *partitions != 1) {
        return Err(format!("it has {partitions} partitions; programs of one partition can be compiled here"));
    }
    if found == replicas {
        return Ok(text.to_owned());
    }
    let refused = |what: &str| {
        Err(format!(
            "it is for {found} replicas, and {what}, so it cannot be changed to {replicas}; give a program for \
             {replicas} replicas"
        ))
    };
    if text.contains("source_target_pairs") {
        return refused("its permutations name replicas");
    }
    let mut changed = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(GROUPS) {
        let (before, groups) = rest.split_at(at + GROUPS.len());
        let end = groups.find('>').and_then(|dense| Some(dense + 1 + groups[dense + 1..].find('>')? + 1));
        let Some((groups, after)) = end.and_then(|end| groups.split_at_checked(end)) else {
            return refused("its groups cannot be read");
        };
        let compact: String = groups.chars().filter(|c| !c.is_whitespace()).collect();
        // A single number may stand without brackets.
        let is_all = compact == all(found) || found == 1 && compact == "=dense<0>:tensor<1x1xi64>";
        if !is_all {
            return refused("its groups are not of all replicas in their order");
        }
        changed.push_str(before);
        changed.push_str(&all(replicas));
        rest = after;
    }
    changed.push_str(rest);
    Ok(changed.replacen(&format!("{REPLICAS}{found}"), &format!("{REPLICAS}{replicas}"), 1))
}

/// The group of all replicas, without spaces.
fn all(replicas: usize) -> String {
    let numbers: Vec<String> = (0..replicas).map(|replica| replica.to_string()).collect();
    format!("=dense<[[{}]]>:tensor<1x{replicas}xi64>", numbers.join(","))
}

/// Returns the number that follows a text.
fn number(text: &str, before: &str) -> Option<usize> {
    let (_, after) = text.split_once(before)?;
    let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
    after[..digits].parse().ok()
}

const REPLICAS: &str = "mhlo.num_replicas = ";
const PARTITIONS: &str = "mhlo.num_partitions = ";
const GROUPS: &str = "replica_groups";

#[cfg(test)]
mod tests {
    use distribute_hlo::{Builder, CollectiveGroups, ElementType, Reducer, TensorType};

    use super::*;

    /// Sums over groups, twice.
    fn program(replicas: usize, groups: &CollectiveGroups) -> String {
        let mut b = Builder::new("sums").replicas(replicas);
        let x = b.parameter(TensorType::new(ElementType::F32, [4]));
        let once = b.all_reduce(x, Reducer::Sum, groups).unwrap();
        let twice = b.all_reduce(once, Reducer::Max, groups).unwrap();
        b.finish(&[twice]).unwrap().text().to_owned()
    }

    fn compact(text: &str) -> String {
        text.chars().filter(|c| !c.is_whitespace()).collect()
    }

    #[test]
    fn a_changed_program_is_the_one_built_for_that_number() {
        for (from, to) in [(1, 8), (8, 16), (16, 1), (4, 4)] {
            let changed = with_replicas(&program(from, &CollectiveGroups::All), to).unwrap();
            assert_eq!(compact(&changed), compact(&program(to, &CollectiveGroups::All)), "{from} to {to}");
        }
        let splat = "module attributes {mhlo.num_replicas = 1 : i32} { replica_groups = dense<0> : tensor<1x1xi64> }";
        let changed = with_replicas(splat, 2).unwrap();
        assert!(changed.contains("num_replicas = 2 : i32") && changed.contains("=dense<[[0,1]]>:tensor<1x2xi64>"));
    }

    #[test]
    fn what_names_certain_replicas_is_refused() {
        let pairs = program(4, &CollectiveGroups::Groups(vec![vec![0, 1], vec![2, 3]]));
        assert_eq!(with_replicas(&pairs, 4).unwrap(), pairs);
        let problem = with_replicas(&pairs, 8).unwrap_err();
        assert!(problem.contains("it is for 4 replicas, and its groups are not of all replicas"), "{problem}");
        let swapped = program(2, &CollectiveGroups::Groups(vec![vec![1, 0]]));
        assert!(with_replicas(&swapped, 8).unwrap_err().contains("give a program for 8 replicas"));
        let mut b = Builder::new("ring").replicas(2);
        let x = b.parameter(TensorType::new(ElementType::F32, [4]));
        let sent = b.collective_permute(x, &[(0, 1), (1, 0)]).unwrap();
        let ring = b.finish(&[sent]).unwrap();
        assert!(with_replicas(ring.text(), 8).unwrap_err().contains("its permutations name replicas"));
        assert!(with_replicas("module {}", 8).unwrap_err().contains("give its module the attribute mhlo.num_replicas"));
        let parts = "module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 8 : i32} {}";
        assert!(with_replicas(parts, 8).unwrap_err().contains("it has 2 partitions"));
    }
}
