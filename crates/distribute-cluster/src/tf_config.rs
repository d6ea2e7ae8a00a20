//! TF_CONFIG: the cluster description of TFJob, Vertex AI and TensorFlow's documentation.

use serde_json::Value;

use crate::resolver::with_layer;
use crate::spec::{shown, wrong};
use crate::{ClusterResolver, ClusterSpec, Error, JobId, Result, Task, TaskType, environment, json};

/// A cluster described by TF_CONFIG.
///
/// Reads `cluster` (or TFJob's `sparseCluster`), `task`, `environment`, `rpc_layer` and `session_master`. Other fields
/// are ignored; unknown job names are rejected. `cluster` may omit the evaluator, as TFJob does. Without a cluster the
/// program is local. A `sparseCluster`, in which each task knows itself and the parameter servers only, is for programs
/// with parameter servers: a [`Membership`](crate::Membership) of it is refused.
///
/// # Examples
/// ```
/// use distribute_cluster::{ClusterResolver, TaskType, TfConfigResolver};
/// let json = r#"{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}"#;
/// let resolver = TfConfigResolver::from_json(json)?;
/// assert_eq!((resolver.task_type(), resolver.task_id()), (Some(TaskType::Worker), Some(1)));
/// assert_eq!(resolver.master(None, None, Some("grpc"))?, "grpc://b:2222");
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.cluster_resolver.TFConfigClusterResolver`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TfConfigResolver {
    spec: ClusterSpec,
    task_type: Option<TaskType>,
    task_id: Option<u32>,
    environment: String,
    rpc_layer: Option<String>,
    session_master: Option<String>,
    /// Whether each task knows only a part of the cluster.
    sparse: bool,
    job: Option<JobId>,
}

/// Values that override the fields of TF_CONFIG.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TfConfigOverrides {
    /// Overrides `task.type`.
    pub task_type: Option<TaskType>,
    /// Overrides `task.index`.
    pub task_id: Option<u32>,
    /// Overrides `rpc_layer`; empty for none.
    pub rpc_layer: Option<String>,
    /// Overrides `environment`.
    pub environment: Option<String>,
}

impl TfConfigResolver {
    /// Reads the description from the variable TF_CONFIG; a local program if it is unset. DISTRIBUTE_JOB_ID sets the
    /// job's identity.
    ///
    /// # Errors
    /// [`Error::Config`] if the description is malformed, or if the variable is set but empty or is not UTF-8.
    pub fn from_env() -> Result<TfConfigResolver> {
        environment::read(|variable| TfConfigResolver::from_vars(variable))
    }

    /// Reads the description like [`from_env`](TfConfigResolver::from_env), with a function that looks up variables.
    ///
    /// # Errors
    /// [`Error::Config`] if the description is malformed, or if the variable is set but empty.
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<TfConfigResolver> {
        let json = variable(SUBJECT);
        if json.as_ref().is_some_and(|json| json.trim().is_empty()) {
            let remedy = "Unset it for a program of one process, else correct what sets it.";
            return Err(Error::config(SUBJECT, "it is set, but empty", "nothing", EXAMPLE, remedy));
        }
        let resolver = TfConfigResolver::from_json(&json.unwrap_or_default())?;
        Ok(TfConfigResolver { job: JobId::from_vars(&variable)?, ..resolver })
    }

    /// Reads the description from a TF_CONFIG text; a local program if it is empty.
    ///
    /// # Errors
    /// [`Error::Config`] if the text is malformed or its task is not in its cluster.
    pub fn from_json(json: &str) -> Result<TfConfigResolver> {
        TfConfigResolver::with_overrides(json, TfConfigOverrides::default())
    }

    /// Reads the description like [`from_json`](TfConfigResolver::from_json), with values that override those of the
    /// text.
    ///
    /// # Errors
    /// [`Error::Config`] if the text is malformed or the task is not in the cluster.
    pub fn with_overrides(json: &str, overrides: TfConfigOverrides) -> Result<TfConfigResolver> {
        let json = if json.trim().is_empty() { "{}" } else { json };
        let config = json::parse(json).map_err(|error| not_json(json, &error))?;
        if !config.is_object() {
            return Err(wrong(SUBJECT, "it is not an object", &config, EXAMPLE));
        }
        check_keys("", &config, &["cluster", "sparseCluster", "task"])?;
        let field = |name: &str| config.get(name).filter(|value| !value.is_null());
        let text = |name: &'static str| match field(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(other) => Err(wrong(SUBJECT, &format!("{name} is not a string"), other, "a string")),
        };
        let (cluster, sparse) = match (field("cluster"), field("sparseCluster")) {
            (Some(Value::Object(dense)), Some(sparse)) if dense.is_empty() => (Some(sparse), true),
            (Some(dense), _) => (Some(dense), false),
            (None, sparse) => (sparse, sparse.is_some()),
        };
        let spec = cluster.map_or_else(|| Ok(ClusterSpec::new()), read_cluster);
        let (task_type, task_id) = match field("task") {
            None => (None, None),
            Some(task) => read_task(task, &overrides)?,
        };
        let resolver = TfConfigResolver {
            spec: spec.map_err(|error| error.about(SUBJECT))?,
            task_type: overrides.task_type.or(task_type),
            task_id: overrides.task_id.or(task_id),
            environment: overrides
                .environment
                .map_or_else(|| text("environment"), |given| Ok(Some(given)))?
                .unwrap_or_default(),
            rpc_layer: overrides.rpc_layer.map_or_else(|| text("rpc_layer"), |given| Ok(Some(given)))?,
            session_master: text("session_master")?,
            sparse,
            job: None,
        };
        resolver.check(&config)?;
        Ok(resolver)
    }

    /// Returns whether the description has no cluster: a program of one process.
    pub fn is_local(&self) -> bool {
        self.spec.is_empty() && self.task_type != Some(TaskType::Evaluator)
    }

    /// Checks that the task belongs to the cluster.
    fn check(&self, config: &Value) -> Result<()> {
        let Some(task) = self.task() else {
            // With a single task, this process must be that one.
            if self.spec.tasks().count() <= 1 && self.task_type.is_none() && self.task_id.is_none() {
                return Ok(());
            }
            let remedy = "Add \"task\": {\"type\": …, \"index\": …} for this process.";
            return Err(Error::config(SUBJECT, "it has a cluster but no task", shown(config), EXAMPLE, remedy));
        };
        match task.kind {
            // An evaluator is a group of its own, and TFJob omits it from the cluster.
            TaskType::Evaluator if self.spec.num_tasks(TaskType::Evaluator) == 0 => match task.index {
                0 => Ok(()),
                index => {
                    let problem = format!("evaluator {index} is outside the cluster, which has at most one evaluator");
                    Err(Error::config(SUBJECT, problem, format!("task {task}"), "evaluator 0", "Correct task.index."))
                }
            },
            TaskType::Chief | TaskType::Worker if self.spec.is_empty() && task.index == 0 => Ok(()),
            _ if self.spec.is_empty() => {
                let remedy = "Add \"cluster\" with the addresses of all tasks.";
                let problem = format!("it has task {task} but no cluster");
                Err(Error::config(SUBJECT, problem, shown(config), EXAMPLE, remedy))
            }
            _ => self.spec.task_address(task).map(drop).map_err(|error| error.about(SUBJECT)),
        }
    }
}

impl ClusterResolver for TfConfigResolver {
    fn cluster_spec(&self) -> Result<ClusterSpec> {
        Ok(self.spec.clone())
    }

    fn task_type(&self) -> Option<TaskType> {
        self.task_type
    }

    fn task_id(&self) -> Option<u32> {
        self.task_id
    }

    fn job_id(&self) -> Result<JobId> {
        Ok(match &self.job {
            Some(job) => job.clone(),
            None if self.sparse => JobId::unknown(),
            None => JobId::of_cluster(&self.spec),
        })
    }

    fn is_partial(&self) -> bool {
        self.sparse
    }

    fn rpc_layer(&self) -> Option<&str> {
        self.rpc_layer.as_deref()
    }

    fn environment(&self) -> &str {
        &self.environment
    }

    /// Returns `session_master` if it is set, for any task; else the address of the task, or an empty string in a
    /// cluster of at most one task.
    fn master(&self, task_type: Option<TaskType>, task_id: Option<u32>, rpc_layer: Option<&str>) -> Result<String> {
        if let Some(master) = &self.session_master {
            return Ok(master.clone());
        }
        if self.spec.tasks().count() <= 1 {
            return Ok(String::new());
        }
        // `check` guarantees a task if there are several.
        let (Some(kind), Some(index)) = (task_type.or(self.task_type), task_id.or(self.task_id)) else {
            return Ok(String::new());
        };
        Ok(with_layer(self.spec.task_address(Task::new(kind, index))?, rpc_layer.or(self.rpc_layer())))
    }
}

const SUBJECT: &str = "TF_CONFIG";
const EXAMPLE: &str = r#"{"cluster": {"worker": ["host:port", …]}, "task": {"type": "worker", "index": 0}}"#;

/// Reads the `cluster` object. An empty list of workers, for example from an unfilled template, is rejected because
/// each task would train alone; other jobs may be empty, since some launchers write them so.
fn read_cluster(cluster: &Value) -> Result<ClusterSpec> {
    let expected = r#"an object such as {"worker": ["host:2222"]}, without jobs that have no tasks"#;
    let spec = ClusterSpec::from_json(cluster)?;
    if cluster.get("worker").is_some() && spec.num_tasks(TaskType::Worker) == 0 {
        return Err(wrong(SUBJECT, "job \"worker\" has no tasks", cluster, expected));
    }
    if spec.is_empty() && cluster.as_object().is_some_and(|jobs| !jobs.is_empty()) {
        return Err(wrong(SUBJECT, "none of its jobs has tasks", cluster, expected));
    }
    Ok(spec)
}

/// Reads the `task` object; the index may be a number or, as some launchers write it, a string.
fn read_task(task: &Value, overrides: &TfConfigOverrides) -> Result<(Option<TaskType>, Option<u32>)> {
    let expected = r#"{"type": "worker", "index": 0}"#;
    if !task.is_object() {
        return Err(wrong(SUBJECT, "task is not an object", task, expected));
    }
    check_keys("task.", task, &["type", "index"])?;
    let kind = match task.get("type") {
        Some(Value::String(kind)) => Some(kind.parse().map_err(|error: Error| error.about(SUBJECT))?),
        Some(_) => return Err(wrong(SUBJECT, "task.type is not a string", task, expected)),
        None if overrides.task_type.is_some() => None,
        None => return Err(wrong(SUBJECT, "task has no type", task, expected)),
    };
    let index = match task.get("index") {
        Some(Value::Number(index)) => index.as_u64().and_then(|index| u32::try_from(index).ok()),
        Some(Value::String(index)) => index.trim().parse().ok(),
        Some(_) => None,
        None if overrides.task_id.is_some() => return Ok((kind, None)),
        None => return Err(wrong(SUBJECT, "task has no index", task, expected)),
    };
    match index {
        Some(index) => Ok((kind, Some(index))),
        None => Err(wrong(SUBJECT, "task.index is not a whole number from 0", task, "0, 1, 2, …")),
    }
}

/// Rejects a misspelt key if the correct key is missing: without its cluster every task would train alone.
fn check_keys(path: &str, object: &Value, known: &[&str]) -> Result<()> {
    let given = object.as_object().into_iter().flatten().map(|(key, _)| key.as_str());
    let misspelt = |key: &&str| {
        known.iter().find(|known| {
            **known != *key
                && object.get(**known).is_none()
                && strsim::osa_distance(&known.to_lowercase(), &key.to_lowercase()) <= known.len() / 4
        })
    };
    let found = given.filter(|key| !known.contains(key)).find_map(|key| Some((key, misspelt(&key)?)));
    found.map_or(Ok(()), |(key, near)| {
        let problem = format!("{:?} is not a key that is read", format!("{path}{key}"));
        let remedy = format!("Did you mean {path}{near}?");
        Err(Error::config(SUBJECT, problem, key, format!("{path}{near}"), remedy))
    })
}

fn not_json(json: &str, error: &serde_json::Error) -> Error {
    let line = json.lines().nth(error.line().saturating_sub(1)).unwrap_or_default();
    // The column counts bytes.
    let before = line.char_indices().take_while(|(at, _)| at + 1 < error.column()).count();
    let start = before.saturating_sub(40);
    let mut given: String = line.chars().skip(start).take(80).collect();
    if start > 0 {
        given.insert(0, '…');
    }
    let (problem, remedy) = if error.is_data() {
        (error.to_string(), "Keep one of the two.")
    } else {
        (format!("it is not JSON: {error}"), SYNTAX)
    };
    Error::config(SUBJECT, problem, given, EXAMPLE, remedy)
}

const SYNTAX: &str =
    "Check quotes, commas and brackets at that place; a shell needs single quotes around the whole text.";

#[cfg(test)]
mod tests;
