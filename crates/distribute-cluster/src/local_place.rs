//! The place of a process among those of its job on the same machine.

use crate::{Membership, Result, environment, slurm};

/// The place of a process among the processes of its job on the same machine.
///
/// # Examples
/// ```
/// use distribute_cluster::{ClusterSpec, LocalPlace, Membership, Task, TaskType};
/// let spec = ClusterSpec::new().with_job(TaskType::Worker, ["a:2222", "a:2223", "b:2222"])?;
/// let second = Membership::from_cluster(&spec, Task::new(TaskType::Worker, 1))?;
/// assert_eq!(LocalPlace::from_vars(&second, |_| None), Some(LocalPlace { rank: 1, size: 2 }));
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalPlace {
    /// The rank among them, counted from 0.
    pub rank: usize,
    /// The number of them.
    pub size: usize,
}

impl LocalPlace {
    /// Returns this process's place. If the addresses of all members are known, it is the place among those with the
    /// same host; otherwise that of a launcher's variables: LOCAL_RANK and LOCAL_WORLD_SIZE (torchrun and `distribute
    /// run`), or those of Open MPI, MPICH, Horovod or Slurm. `None` if the place is unknown.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if a variable is not UTF-8.
    pub fn from_env(membership: &Membership) -> Result<Option<LocalPlace>> {
        environment::read(|variable| Ok(LocalPlace::from_vars(membership, variable)))
    }

    /// Returns the place like [`from_env`](LocalPlace::from_env), with a function that looks up variables.
    pub fn from_vars(membership: &Membership, variable: impl Fn(&str) -> Option<String>) -> Option<LocalPlace> {
        if membership.world_size() == 1 {
            return Some(LocalPlace { rank: 0, size: 1 });
        }
        LocalPlace::of_addresses(membership).or_else(|| LocalPlace::of_variables(&variable))
    }

    fn of_addresses(membership: &Membership) -> Option<LocalPlace> {
        let hosts = membership.addresses.iter().map(|address| Some(address.as_deref()?.rsplit_once(':')?.0));
        let hosts = hosts.collect::<Option<Vec<&str>>>()?;
        let own = membership.rank as usize;
        let here = *hosts.get(own)?;
        let count = |hosts: &[&str]| hosts.iter().filter(|host| **host == here).count();
        Some(LocalPlace { rank: count(&hosts[..own]), size: count(&hosts) })
    }

    fn of_variables(variable: &dyn Fn(&str) -> Option<String>) -> Option<LocalPlace> {
        let number = |name: &str| variable(name)?.trim().parse::<usize>().ok();
        let named = [
            ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
            ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
            ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        ];
        let place = named.into_iter().find_map(|(rank, size)| Some((number(rank)?, number(size)?)));
        let (rank, size) = place.or_else(|| Some((number("SLURM_LOCALID")?, slurm::tasks_of_node(variable)?)))?;
        (rank < size).then_some(LocalPlace { rank, size })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &[(&str, &str)]) -> Option<(usize, usize)> {
        let variable =
            |wanted: &str| variables.iter().find(|(name, _)| *name == wanted).map(|(_, value)| (*value).to_owned());
        let member = Membership::new(3, 4, "a:1").unwrap();
        LocalPlace::from_vars(&member, variable).map(|place| (place.rank, place.size))
    }

    #[test]
    fn launchers_tell_the_place_on_the_machine() {
        assert_eq!(place(&[("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")]), Some((1, 2)));
        assert_eq!(place(&[("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "4")]), Some((0, 4)));
        let slurm = [("SLURM_LOCALID", "1"), ("SLURM_NODEID", "2"), ("SLURM_STEP_TASKS_PER_NODE", "3(x2),2")];
        assert_eq!(place(&slurm), Some((1, 2)));
        // Without the number of tasks, or with a rank outside of it, nothing is known.
        assert_eq!(place(&[("LOCAL_RANK", "1")]), None);
        assert_eq!(place(&[("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")]), None);
        assert_eq!(place(&slurm[..2]), None);
        // The nodes of a heterogeneous step are numbered component by component, and listed by name.
        let heterogeneous = [
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", "0"),
            ("SLURM_STEP_NODELIST", "n[1-3]"),
            ("SLURM_STEP_TASKS_PER_NODE", "1,2(x2)"),
            ("SLURM_HET_SIZE", "2"),
            ("SLURM_JOB_NODELIST_HET_GROUP_0", "n[2-3]"),
            ("SLURM_JOB_NODELIST_HET_GROUP_1", "n1"),
        ];
        assert_eq!(place(&heterogeneous), Some((1, 2)));
        assert_eq!(place(&[]), None);
    }

    #[test]
    fn addresses_precede_variables() {
        let member = |rank, addresses: &[&str]| {
            let addresses: Vec<Option<String>> = addresses.iter().map(|address| Some((*address).to_owned())).collect();
            Membership { addresses, ..Membership::new(rank, 3, "a:1").unwrap() }
        };
        let local = |name: &str| (name.starts_with("LOCAL_")).then(|| "7".to_owned());
        let place = LocalPlace::from_vars(&member(2, &["[::1]:1", "b:1", "[::1]:2"]), local);
        assert_eq!(place, Some(LocalPlace { rank: 1, size: 2 }));
        let alone = LocalPlace::from_vars(&Membership::new(0, 1, "").unwrap(), local);
        assert_eq!(alone, Some(LocalPlace { rank: 0, size: 1 }));
    }
}
