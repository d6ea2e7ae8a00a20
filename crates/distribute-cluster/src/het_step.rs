//! Steps of Slurm's heterogeneous jobs.

use std::collections::BTreeMap;

use crate::{Error, Result, hostlist};

/// Looks up a variable of the environment.
type Variable<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// Returns the places, in a step's list of hosts, of the hosts in the order in which their tasks are numbered.
///
/// Slurm sorts the hosts of a step by name. The tasks of a step of several components of a heterogeneous job are
/// numbered component by component instead, in the order of the components.
///
/// # Errors
/// [`Error::Config`] if the variables do not say which component each host belongs to, or if they contradict each
/// other.
///
/// # Source
/// The variables of steps by `srun --het-group` of Slurm 22.05, as observed: SLURM_PROCID, SLURM_NODEID,
/// SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE.
pub(crate) fn order(variable: &Variable<'_>, hosts: &[String]) -> Result<Vec<usize>> {
    let Some((size_name, group)) = NAMES.into_iter().find(|(size, _)| variable(size).is_some()) else {
        return Ok((0..hosts.len()).collect());
    };
    // One host has all tasks, whatever component they are of.
    if hosts.len() == 1 {
        return Ok(vec![0]);
    }
    let size = variable(size_name).unwrap_or_default();
    let places: BTreeMap<&str, usize> = hosts.iter().map(String::as_str).zip(0..).collect();
    let components = size.trim().parse::<u32>().ok().filter(|count| (1..=MAX_COMPONENTS).contains(count));
    let components = components.ok_or_else(|| wrong(size_name, "it is not a number of components", &size))?;
    let mut order = Vec::new();
    for component in 0..components {
        let name = format!("SLURM_JOB_NODELIST_{group}_GROUP_{component}");
        let problem = |problem: &str| format!("it is set, but {name} {problem}");
        let list = variable(&name).ok_or_else(|| wrong(size_name, &problem("is not"), &size))?;
        let members = hostlist::expand(&list);
        let members = members.ok_or_else(|| wrong(size_name, &problem("is not a list of hosts"), &list))?;
        order.extend(members.iter().filter_map(|host| places.get(host.as_str()).copied()));
        // Lists that repeat themselves must not add up.
        if order.len() > hosts.len() {
            break;
        }
    }
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if sorted != (0..hosts.len()).collect::<Vec<_>>() {
        let problem = "not every host of SLURM_STEP_NODELIST is in the list of one component";
        return Err(wrong(size_name, problem, &hostlist::compress(hosts)));
    }
    agrees(variable, &order, hosts, size_name)?;
    Ok(order)
}

/// Returns whether the job has several components.
pub(crate) fn is_heterogeneous(variable: &Variable<'_>) -> bool {
    NAMES.into_iter().any(|(size, _)| variable(size).is_some())
}

/// Returns the number of the job, the same in all components.
pub(crate) fn job_number(variable: &Variable<'_>) -> &'static str {
    const LEADERS: [&str; 2] = ["SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID_PACK_GROUP_0"];
    LEADERS.into_iter().find(|name| variable(name).is_some()).unwrap_or("SLURM_JOB_ID")
}

/// Checks the order against the number that Slurm gives to this process's own node.
fn agrees(variable: &Variable<'_>, order: &[usize], hosts: &[String], size_name: &'static str) -> Result<()> {
    let (Some(number), Some(name)) = (variable("SLURM_NODEID"), variable("SLURMD_NODENAME")) else { return Ok(()) };
    let found = number.trim().parse::<usize>().ok().and_then(|number| hosts.get(*order.get(number)?));
    if found.is_some_and(|host| *host == name.trim()) {
        return Ok(());
    }
    let ordered: Vec<String> = order.iter().map(|place| hosts[*place].clone()).collect();
    let problem = format!("SLURM_NODEID={} is not the place of {name} in {}", number.trim(), ordered.join(","));
    Err(wrong(size_name, &problem, &number))
}

fn wrong(subject: &'static str, problem: &str, given: &str) -> Error {
    let expected = "a step that `srun --het-group` starts in a job of `sbatch` or `salloc`";
    Error::config(subject, problem, given, expected, "Start it that way, or without components.")
}

/// The variable with the number of components and the word in the names of the others; the latter ones are Slurm's
/// before 20.11.
const NAMES: [(&str, &str); 2] = [("SLURM_HET_SIZE", "HET"), ("SLURM_PACK_SIZE", "PACK")];

/// Slurm has at most 128.
const MAX_COMPONENTS: u32 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(list: &str) -> Vec<String> {
        hostlist::expand(list).unwrap()
    }

    fn ordered(step: &str, variables: &[(&str, &str)]) -> Result<Vec<String>> {
        let find = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        let hosts = hosts(step);
        Ok(order(&find, &hosts)?.into_iter().map(|place| hosts[place].clone()).collect())
    }

    const SIZE: (&str, &str) = ("SLURM_HET_SIZE", "2");
    const FIRST: (&str, &str) = ("SLURM_JOB_NODELIST_HET_GROUP_0", "n[2-3]");
    const SECOND: (&str, &str) = ("SLURM_JOB_NODELIST_HET_GROUP_1", "n1");

    #[test]
    fn hosts_are_in_the_order_of_the_components() {
        assert_eq!(ordered("n[1-3]", &[SIZE, FIRST, SECOND]).unwrap(), ["n2", "n3", "n1"]);
        // A step of one component, or of a part of one.
        assert_eq!(ordered("n[2-3]", &[SIZE, FIRST, SECOND]).unwrap(), ["n2", "n3"]);
        assert_eq!(ordered("n[1-2]", &[SIZE, FIRST, SECOND]).unwrap(), ["n2", "n1"]);
        let before = [
            ("SLURM_PACK_SIZE", "2"),
            ("SLURM_JOB_NODELIST_PACK_GROUP_0", "n3"),
            ("SLURM_JOB_NODELIST_PACK_GROUP_1", "n1"),
        ];
        assert_eq!(ordered("n[1,3]", &before).unwrap(), ["n3", "n1"]);
        assert_eq!(ordered("n[1-3]", &[]).unwrap(), ["n1", "n2", "n3"]);
        assert_eq!(ordered("n1", &[SIZE]).unwrap(), ["n1"]);
        let own = |id, name| [SIZE, FIRST, SECOND, ("SLURM_NODEID", id), ("SLURMD_NODENAME", name)];
        assert_eq!(ordered("n[1-3]", &own("2", "n1")).unwrap(), ["n2", "n3", "n1"]);
        let text = ordered("n[1-3]", &own("0", "n1")).unwrap_err().to_string();
        assert!(text.contains("SLURM_NODEID=0 is not the place of n1 in n2,n3,n1"), "{text}");
    }

    #[test]
    fn what_does_not_say_the_order_is_refused() {
        for (variables, words) in [
            // As `srun a : b` sets them without an allocation.
            (vec![SIZE], "SLURM_HET_SIZE: it is set, but SLURM_JOB_NODELIST_HET_GROUP_0 is not. Given: 2"),
            (vec![SIZE, FIRST], "SLURM_JOB_NODELIST_HET_GROUP_1 is not"),
            (vec![SIZE, FIRST, (SECOND.0, "n[")], "SLURM_JOB_NODELIST_HET_GROUP_1 is not a list of hosts"),
            (vec![SIZE, FIRST, (SECOND.0, "n4")], "not every host of SLURM_STEP_NODELIST is in the list of one"),
            (vec![SIZE, FIRST, (SECOND.0, "n[1-2]")], "not every host of SLURM_STEP_NODELIST is in the list of one"),
            (vec![("SLURM_HET_SIZE", "x")], "SLURM_HET_SIZE: it is not a number of components"),
            (vec![("SLURM_HET_SIZE", "4000000000")], "SLURM_HET_SIZE: it is not a number of components"),
        ] {
            let text = ordered("n[1-3]", &variables).unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
            assert!(text.contains("`srun --het-group` starts in a job of `sbatch`"), "{text}");
        }
    }
}
