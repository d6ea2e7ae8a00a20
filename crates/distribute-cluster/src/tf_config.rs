//! TF_CONFIG: the description that TFJob, Vertex AI and TensorFlow's documents use.

use serde_json::Value;

use crate::resolver::with_layer;
use crate::spec::{shown, wrong};
use crate::{ClusterResolver, ClusterSpec, Error, Result, Task, TaskType, env};

/// A cluster described by TF_CONFIG.
///
/// Reads `cluster` (or TFJob's `sparseCluster`), `task`, `environment`, `rpc_layer` and `session_master`. Other fields
/// are ignored, other jobs are refused. An evaluator may be left out of `cluster`, as TFJob does. Without a cluster the
/// program is local.
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
}

/// What counts before the fields of TF_CONFIG.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TfConfigOverrides {
    /// Instead of `task.type`.
    pub task_type: Option<TaskType>,
    /// Instead of `task.index`.
    pub task_id: Option<u32>,
    /// Instead of `rpc_layer`; empty for none.
    pub rpc_layer: Option<String>,
    /// Instead of `environment`.
    pub environment: Option<String>,
}

impl TfConfigResolver {
    /// The description in the variable TF_CONFIG; that of a local program where it is unset or empty.
    ///
    /// # Errors
    /// [`Error::Config`] with what was given, what was expected and how to mend it.
    pub fn from_env() -> Result<TfConfigResolver> {
        TfConfigResolver::from_vars(env::process)
    }

    /// As [`from_env`](TfConfigResolver::from_env), with the variables looked up by a function.
    ///
    /// # Errors
    /// As [`from_env`](TfConfigResolver::from_env).
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<TfConfigResolver> {
        TfConfigResolver::from_json(&variable("TF_CONFIG").unwrap_or_default())
    }

    /// The description in a TF_CONFIG text; that of a local program where it is empty.
    ///
    /// # Errors
    /// [`Error::Config`] with what was given, what was expected and how to mend it.
    pub fn from_json(json: &str) -> Result<TfConfigResolver> {
        TfConfigResolver::with_overrides(json, TfConfigOverrides::default())
    }

    /// As [`from_json`](TfConfigResolver::from_json), with values that count before those of the text.
    ///
    /// # Errors
    /// [`Error::Config`] with what was given, what was expected and how to mend it.
    pub fn with_overrides(json: &str, overrides: TfConfigOverrides) -> Result<TfConfigResolver> {
        let json = if json.trim().is_empty() { "{}" } else { json };
        let config: Value = serde_json::from_str(json).map_err(|error| not_json(json, &error))?;
        if !config.is_object() {
            return Err(wrong(SUBJECT, "it is not an object", &config, EXAMPLE));
        }
        let field = |name: &str| config.get(name).filter(|value| !value.is_null());
        let text = |name: &'static str| match field(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(other) => Err(wrong(SUBJECT, &format!("{name} is not a string"), other, "a string")),
        };
        let cluster = match (field("cluster"), field("sparseCluster")) {
            (Some(Value::Object(dense)), Some(sparse)) if dense.is_empty() => Some(sparse),
            (dense, sparse) => dense.or(sparse),
        };
        let spec = cluster.map_or_else(|| Ok(ClusterSpec::new()), ClusterSpec::from_json);
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
        };
        resolver.check(&config)?;
        Ok(resolver)
    }

    /// Whether there is no cluster: a program of one process.
    pub fn is_local(&self) -> bool {
        self.spec.is_empty() && self.task_type != Some(TaskType::Evaluator)
    }

    /// Whether the task belongs to the cluster.
    fn check(&self, config: &Value) -> Result<()> {
        let Some(task) = self.task() else {
            // With one task there is no doubt about which it is.
            if self.spec.tasks().count() <= 1 && self.task_type.is_none() && self.task_id.is_none() {
                return Ok(());
            }
            let mend = "Add \"task\": {\"type\": …, \"index\": …} for this process.";
            return Err(Error::config(SUBJECT, "it has a cluster but no task", shown(config), EXAMPLE, mend));
        };
        match task.kind {
            // A group of its own; TFJob leaves it out of the cluster.
            TaskType::Evaluator if self.spec.num_tasks(TaskType::Evaluator) == 0 => match task.index {
                0 => Ok(()),
                index => {
                    let problem = format!("evaluator {index} is outside the cluster, which has at most one evaluator");
                    Err(Error::config(SUBJECT, problem, format!("task {task}"), "evaluator 0", "Correct task.index."))
                }
            },
            TaskType::Chief | TaskType::Worker if self.spec.is_empty() && task.index == 0 => Ok(()),
            _ if self.spec.is_empty() => {
                let mend = "Add \"cluster\" with the addresses of all tasks.";
                let problem = format!("it has task {task} but no cluster");
                Err(Error::config(SUBJECT, problem, shown(config), EXAMPLE, mend))
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

    fn rpc_layer(&self) -> Option<&str> {
        self.rpc_layer.as_deref()
    }

    fn environment(&self) -> &str {
        &self.environment
    }

    /// `session_master` where it is set, whatever is asked for; else the address of the task, empty for a single one.
    fn master(&self, task_type: Option<TaskType>, task_id: Option<u32>, rpc_layer: Option<&str>) -> Result<String> {
        if let Some(master) = &self.session_master {
            return Ok(master.clone());
        }
        if self.spec.tasks().count() <= 1 {
            return Ok(String::new());
        }
        // `check` has found a task: with several there is always one.
        let (Some(kind), Some(index)) = (task_type.or(self.task_type), task_id.or(self.task_id)) else {
            return Ok(String::new());
        };
        Ok(with_layer(self.spec.task_address(Task::new(kind, index))?, rpc_layer.or(self.rpc_layer())))
    }
}

const SUBJECT: &str = "TF_CONFIG";
const EXAMPLE: &str = r#"{"cluster": {"worker": ["host:port", …]}, "task": {"type": "worker", "index": 0}}"#;

/// Reads the `task` object; the index may be a number or, as some launchers write it, a string.
fn read_task(task: &Value, overrides: &TfConfigOverrides) -> Result<(Option<TaskType>, Option<u32>)> {
    let expected = r#"{"type": "worker", "index": 0}"#;
    if !task.is_object() {
        return Err(wrong(SUBJECT, "task is not an object", task, expected));
    }
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

fn not_json(json: &str, error: &serde_json::Error) -> Error {
    let line = json.lines().nth(error.line().saturating_sub(1)).unwrap_or_default();
    let start = error.column().saturating_sub(40);
    let mut given: String = line.chars().skip(start).take(80).collect();
    if start > 0 {
        given.insert(0, '…');
    }
    Error::config(
        SUBJECT,
        format!("it is not JSON: {error}"),
        given,
        EXAMPLE,
        "Check quotes, commas and brackets at that place; a shell needs single quotes around the whole text.",
    )
}

#[cfg(test)]
mod tests;
