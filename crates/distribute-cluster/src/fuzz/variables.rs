//! The variables of launchers and schedulers.

use std::collections::HashMap;

use crate::{
    ClusterResolver, ClusterSpec, InterfaceChoice, JobId, LocalPlace, Membership, SageMakerResolver, SlurmOptions,
    SlurmResolver,
};

/// The environment, as lines of `NAME=value`.
pub fn launcher_variables(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let variables: HashMap<&str, &str> = text.lines().filter_map(|line| line.split_once('=')).collect();
    let variable = |name: &str| variables.get(name).map(|value| (*value).to_owned());
    let found = Membership::from_vars(variable);
    if let Ok(Some(membership)) = &found {
        assert!(membership.rank < membership.world_size());
        assert!(membership.world_size() as usize <= ClusterSpec::MAX_TASKS);
        assert!(membership.world_size() == 1 || crate::host::split(&membership.leader_address).is_ok());
        assert!(membership.addresses.is_empty() || membership.addresses.len() == membership.tasks.len());
        if let Some(place) = LocalPlace::from_vars(membership, variable) {
            assert!(place.rank < place.size);
        }
    }
    let options = SlurmOptions::default().gpus_per_node(8);
    let slurm = SlurmResolver::from_vars(variable, options).inspect(|resolver| check(resolver));
    assert!(slurm.as_ref().is_ok_and(|resolver| resolver.gpus().len() <= 8) || slurm.is_err());
    let sage_maker = SageMakerResolver::from_vars(variable).inspect(|resolver| check(resolver));
    let config = SageMakerResolver::from_resource_config(variables.get("CONFIG").unwrap_or(&""), variable);
    let config = config.inspect(|resolver| check(resolver));
    let job = JobId::from_vars(variable);
    if let Ok(Some(job)) = &job {
        assert!(!job.header_text().is_empty());
    }
    let _ = InterfaceChoice::from_vars(variable);
    let member = found.is_ok_and(|found| found.is_some());
    member || slurm.is_ok() || sage_maker.is_ok() || config.is_ok() || job.is_ok_and(|job| job.is_some())
}

fn check(resolver: &dyn ClusterResolver) {
    let spec = resolver.cluster_spec().expect("it was parsed");
    assert!((1..=ClusterSpec::MAX_TASKS).contains(&spec.tasks().count()));
    let task = resolver.task().expect("it has a task");
    assert!(spec.task_address(task).is_ok(), "{task} is outside of its cluster");
}
