//! The cluster of a training job of SageMaker.

use std::collections::BTreeMap;
use std::io::ErrorKind;

use serde_json::Value;

use crate::{ClusterResolver, ClusterSpec, Error, JobId, Result, TaskType, environment};

/// The hosts of a training job of SageMaker, which are workers in the order of their names.
///
/// Reads SM_HOSTS and SM_CURRENT_HOST, else the file `/opt/ml/input/config/resourceconfig.json`, which SageMaker places
/// in every container.
///
/// # Examples
/// ```
/// use distribute_cluster::{ClusterResolver, SageMakerResolver, Task, TaskType};
/// let cluster = SageMakerResolver::new(["algo-2", "algo-1"], "algo-2", SageMakerResolver::PORT)?;
/// assert_eq!(cluster.task(), Some(Task::new(TaskType::Worker, 1)));
/// assert_eq!(cluster.master(None, None, Some("grpc"))?, "grpc://algo-2:2223");
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.cluster_resolver.SageMakerClusterResolver`; "Using the SageMaker training toolkits", resource
/// configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SageMakerResolver {
    spec: ClusterSpec,
    index: u32,
    job: Option<JobId>,
}

impl SageMakerResolver {
    /// The port of every host, as in TensorFlow.
    pub const PORT: u16 = 2223;

    /// Creates a resolver of these hosts.
    ///
    /// # Errors
    /// [`Error::Config`] if this host is not among them, or if one is named twice or is not a host's name.
    pub fn new<H: Into<String>>(hosts: impl IntoIterator<Item = H>, own: &str, port: u16) -> Result<SageMakerResolver> {
        let mut hosts: Vec<String> = hosts.into_iter().map(Into::into).collect();
        hosts.sort();
        let index = hosts.iter().position(|host| host == own);
        let missing = || wrong("SM_CURRENT_HOST is not in SM_HOSTS", own, &hosts.join(", "));
        let index = index.ok_or_else(missing)? as u32;
        let addresses = hosts.iter().map(|host| format!("{host}:{port}"));
        let spec = ClusterSpec::new().with_job(TaskType::Worker, addresses);
        Ok(SageMakerResolver { spec: spec.map_err(|error| error.about(SUBJECT))?, index, job: None })
    }

    /// Reads the variables of this process, else the file that SageMaker places in every container. DISTRIBUTE_PORT
    /// sets the port, DISTRIBUTE_JOB_ID the job's identity.
    ///
    /// # Errors
    /// [`Error::Config`] if neither is there, or if they are malformed.
    pub fn from_env() -> Result<SageMakerResolver> {
        environment::read(|variable| match variable("SM_HOSTS") {
            Some(_) => SageMakerResolver::from_vars(variable),
            None => {
                let text = read_container().map_err(|error| {
                    wrong(&format!("SM_HOSTS is not set, and {FILE} cannot be read"), &error.to_string(), EXAMPLE)
                })?;
                SageMakerResolver::from_resource_config(&text, variable)
            }
        })
    }

    /// Reads SM_HOSTS and SM_CURRENT_HOST with a function that looks up variables.
    ///
    /// # Errors
    /// [`Error::Config`] if they are missing or malformed.
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<SageMakerResolver> {
        let value = |name: &str| variable(name).unwrap_or_default();
        let hosts = value("SM_HOSTS");
        let list: Vec<String> =
            serde_json::from_str(&hosts).map_err(|_| wrong("SM_HOSTS is not a list of hosts", &hosts, EXAMPLE))?;
        SageMakerResolver::with_variables(list, value("SM_CURRENT_HOST").trim(), variable)
    }

    /// Reads the text of `resourceconfig.json`, with a function that looks up variables.
    ///
    /// # Errors
    /// [`Error::Config`] if it is malformed.
    pub fn from_resource_config(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<SageMakerResolver> {
        let (hosts, own) = parts_of_config(text)?;
        SageMakerResolver::with_variables(hosts, &own, variable)
    }

    fn with_variables(
        hosts: Vec<String>,
        own: &str,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<SageMakerResolver> {
        let given = environment::set(&variable)("DISTRIBUTE_PORT");
        let port = given.as_ref().map_or(Some(SageMakerResolver::PORT), |port| port.trim().parse().ok());
        let port = port.filter(|port| *port > 0).ok_or_else(|| {
            wrong("DISTRIBUTE_PORT is not a port", given.as_deref().unwrap_or_default(), "a number from 1 to 65535")
        })?;
        Ok(SageMakerResolver { job: JobId::from_vars(&variable)?, ..SageMakerResolver::new(hosts, own, port)? })
    }
}

impl ClusterResolver for SageMakerResolver {
    fn cluster_spec(&self) -> Result<ClusterSpec> {
        Ok(self.spec.clone())
    }

    fn task_type(&self) -> Option<TaskType> {
        Some(TaskType::Worker)
    }

    fn task_id(&self) -> Option<u32> {
        Some(self.index)
    }

    fn job_id(&self) -> Result<JobId> {
        Ok(self.job.clone().unwrap_or_else(|| JobId::of_cluster(&self.spec)))
    }
}

/// Returns SM_HOSTS and SM_CURRENT_HOST as the container's file has them: only images with SageMaker's training toolkit
/// set the variables. Returns none if they are set, or if there is no such file.
///
/// # Errors
/// [`Error::Config`] if the file is malformed or cannot be read.
pub(crate) fn variables_of_container(
    variable: impl Fn(&str) -> Option<String>,
    read: impl FnOnce() -> std::io::Result<String>,
) -> Result<BTreeMap<&'static str, String>> {
    let set = environment::set(&variable);
    if set("SM_HOSTS").is_some() || set("SM_CURRENT_HOST").is_some() {
        return Ok(BTreeMap::new());
    }
    let text = match read() {
        Ok(text) => text,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(BTreeMap::new());
        }
        Err(error) => return Err(wrong(&format!("{FILE} cannot be read"), &error.to_string(), CONFIG_EXAMPLE)),
    };
    let (hosts, own) = parts_of_config(&text)?;
    Ok([("SM_HOSTS", Value::from(hosts).to_string()), ("SM_CURRENT_HOST", own)].into())
}

/// Reads the file of the container.
pub(crate) fn read_container() -> std::io::Result<String> {
    std::fs::read_to_string(FILE)
}

/// Returns the hosts in `resourceconfig.json`, and the one that it was read on.
fn parts_of_config(text: &str) -> Result<(Vec<String>, String)> {
    let malformed = || wrong("resourceconfig.json does not name the hosts", text, CONFIG_EXAMPLE);
    let config: Value = serde_json::from_str(text).map_err(|_| malformed())?;
    let hosts = config["hosts"].as_array().ok_or_else(malformed)?;
    let hosts = hosts.iter().map(|host| host.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>();
    let own = config["current_host"].as_str().ok_or_else(malformed)?;
    Ok((hosts.ok_or_else(malformed)?, own.to_owned()))
}

fn wrong(problem: &str, given: &str, expected: &str) -> Error {
    let remedy = "Start the program as a training job of SageMaker, or describe the cluster by TF_CONFIG.";
    Error::config(SUBJECT, problem, given, expected, remedy)
}

const SUBJECT: &str = "SageMaker";
const FILE: &str = "/opt/ml/input/config/resourceconfig.json";
const EXAMPLE: &str = r#"["algo-1", "algo-2"]"#;
const CONFIG_EXAMPLE: &str = r#"{"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}"#;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Task;

    fn from(vars: &[(&str, &str)]) -> Result<SageMakerResolver> {
        let find = |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        SageMakerResolver::from_vars(find)
    }

    const HOSTS: (&str, &str) = ("SM_HOSTS", r#"["algo-2", "algo-1"]"#);

    #[test]
    fn hosts_are_workers_in_the_order_of_their_names() {
        let resolver = from(&[HOSTS, ("SM_CURRENT_HOST", "algo-2")]).unwrap();
        let spec = resolver.cluster_spec().unwrap();
        assert_eq!(spec.job_tasks(TaskType::Worker), [Some("algo-1:2223"), Some("algo-2:2223")]);
        assert_eq!(resolver.task(), Some(Task::new(TaskType::Worker, 1)));
        assert_eq!((resolver.rpc_layer(), resolver.environment()), (None, ""));
        let port = from(&[HOSTS, ("SM_CURRENT_HOST", "algo-1"), ("DISTRIBUTE_PORT", "7000")]).unwrap();
        assert_eq!(port.master(None, None, None).unwrap(), "algo-1:7000");
        assert_eq!(
            from(&[HOSTS, ("SM_CURRENT_HOST", "algo-1"), ("DISTRIBUTE_JOB_ID", "j")]).unwrap().job_id().unwrap().name(),
            "j"
        );
    }

    #[test]
    fn the_master_is_the_own_address_or_the_one_asked_for() {
        let resolver = from(&[HOSTS, ("SM_CURRENT_HOST", "algo-1")]).unwrap();
        assert_eq!(resolver.master(None, None, Some("grpc")).unwrap(), "grpc://algo-1:2223");
        assert_eq!(resolver.master(Some(TaskType::Worker), Some(1), None).unwrap(), "algo-2:2223");
        assert!(resolver.master(Some(TaskType::Ps), Some(0), None).is_err());
        let alone = SageMakerResolver::new(["algo-1"], "algo-1", 2223).unwrap();
        assert_eq!(alone.master(None, None, None).unwrap(), "");
    }

    #[test]
    fn the_file_of_the_container_says_the_same() {
        let text = r#"{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0"}"#;
        let file = SageMakerResolver::from_resource_config(text, |_| None).unwrap();
        assert_eq!(file, from(&[HOSTS, ("SM_CURRENT_HOST", "algo-2")]).unwrap());
    }

    #[test]
    fn a_container_without_the_toolkit_describes_its_hosts_too() {
        let text = r#"{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}"#;
        let of = |vars: &[(&str, &str)], file: std::io::Result<&str>| {
            let vars: BTreeMap<String, String> = vars.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            variables_of_container(|name| vars.get(name).cloned(), || file.map(str::to_owned))
        };
        let found = of(&[], Ok(text)).unwrap();
        let membership = crate::Membership::from_vars(|name| found.get(name).cloned()).unwrap().unwrap();
        assert_eq!((membership.rank, membership.world_size()), (1, 2));
        assert!(of(&[HOSTS], Ok("{")).unwrap().is_empty(), "the variables count before the file");
        assert!(of(&[], Err(ErrorKind::NotFound.into())).unwrap().is_empty());
        assert!(of(&[], Err(ErrorKind::PermissionDenied.into())).unwrap_err().to_string().contains("cannot be read"));
        assert!(of(&[], Ok("{")).is_err());
    }

    #[test]
    fn every_mistake_is_a_sentence() {
        let file = |text: &str| SageMakerResolver::from_resource_config(text, |_| None);
        for (outcome, words) in [
            (from(&[]), "SM_HOSTS is not a list of hosts"),
            (from(&[("SM_HOSTS", "algo-1")]), "SM_HOSTS is not a list of hosts"),
            (from(&[HOSTS]), "SM_CURRENT_HOST is not in SM_HOSTS"),
            (from(&[HOSTS, ("SM_CURRENT_HOST", "algo-3")]), "Given: algo-3"),
            (from(&[HOSTS, ("SM_CURRENT_HOST", "algo-1"), ("DISTRIBUTE_PORT", "0")]), "DISTRIBUTE_PORT is not a port"),
            (SageMakerResolver::new(["a", "a"], "a", 1), "SageMaker"),
            (file("{"), "resourceconfig.json does not name the hosts"),
            (file(r#"{"hosts": ["a"]}"#), "resourceconfig.json does not name the hosts"),
        ] {
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
    }
}
