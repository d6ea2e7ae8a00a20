//! The cluster of a step of Slurm.

use crate::{ClusterResolver, ClusterSpec, Error, JobId, Result, TaskType, environment};
use crate::{het_step, hostlist};

/// The tasks of a step that `srun` started.
///
/// Reads SLURM_PROCID, SLURM_STEP_NUM_TASKS (or SLURM_NTASKS), SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE. Tasks
/// are numbered node by node, in the order of the list, and fill the jobs in the order in which those are given. A task
/// has the address of its node, at the base port plus its number on the node.
///
/// In a step of several components of a heterogeneous job, by `srun --het-group`, tasks are numbered component by
/// component: SLURM_JOB_NODELIST_HET_GROUP_0 and the following have the nodes of each. Slurm does not set them if
/// `srun` itself allocates the components; such a step of several nodes is refused.
///
/// # Examples
/// ```
/// use distribute_cluster::{ClusterResolver, SlurmOptions, SlurmResolver, Task, TaskType};
/// let variable = |name: &str| match name {
///     "SLURM_PROCID" => Some("2".to_owned()),
///     "SLURM_STEP_NUM_TASKS" => Some("3".to_owned()),
///     "SLURM_STEP_NODELIST" => Some("n[1-2]".to_owned()),
///     "SLURM_STEP_TASKS_PER_NODE" => Some("2,1".to_owned()),
///     _ => None,
/// };
/// let jobs = vec![(TaskType::Ps, 1), (TaskType::Worker, 2)];
/// let cluster = SlurmResolver::from_vars(variable, SlurmOptions::default().jobs(jobs))?;
/// assert_eq!(cluster.task(), Some(Task::new(TaskType::Worker, 1)));
/// assert_eq!(cluster.cluster_spec()?.task_address(Task::new(TaskType::Worker, 0))?, "n1:8889");
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.cluster_resolver.SlurmClusterResolver`, which sorts the nodes by name instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlurmResolver {
    spec: ClusterSpec,
    task: (TaskType, u32),
    gpus: Vec<u32>,
    job: Option<JobId>,
}

/// Settings of a [`SlurmResolver`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SlurmOptions {
    /// The jobs of the cluster with their numbers of tasks, in the order in which tasks fill them; together as many as
    /// the step has. Default: all tasks are workers.
    pub jobs: Vec<(TaskType, u32)>,
    /// The port of the first task of each node. Default: 8888.
    pub port_base: u16,
    /// The number of GPUs of each node. Default: 0.
    pub gpus_per_node: u32,
    /// The number of GPUs of each task. Default: those of the node, divided by the most tasks of a node.
    pub gpus_per_task: Option<u32>,
    /// The number of tasks of each node, in the order of SLURM_STEP_NODELIST. Default: SLURM_STEP_TASKS_PER_NODE.
    pub tasks_per_node: Option<Vec<u32>>,
}

impl Default for SlurmOptions {
    fn default() -> SlurmOptions {
        SlurmOptions { jobs: Vec::new(), port_base: 8888, gpus_per_node: 0, gpus_per_task: None, tasks_per_node: None }
    }
}

distribute_types::setters! {
    SlurmOptions {
        jobs: Vec<(TaskType, u32)>,
        port_base: u16,
        gpus_per_node: u32,
        gpus_per_task: Option<u32>,
        tasks_per_node: Option<Vec<u32>>,
    }
}

impl SlurmResolver {
    /// Reads the step from the environment. DISTRIBUTE_JOB_ID sets the job's identity.
    ///
    /// # Errors
    /// [`Error::Config`] if a variable is missing or malformed, if the jobs do not have as many tasks as the step, if a
    /// node has fewer GPUs than its tasks need, or if SLURM_LOCALID or SLURMD_NODENAME shows that the tasks are not
    /// numbered node by node, as with `srun --distribution=cyclic`.
    pub fn from_env(options: SlurmOptions) -> Result<SlurmResolver> {
        environment::read(|variable| SlurmResolver::from_vars(variable, options))
    }

    /// Reads the step like [`from_env`](SlurmResolver::from_env), with a function that looks up variables.
    ///
    /// # Errors
    /// [`Error::Config`] if a variable is missing or malformed, or if an option does not fit the step.
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>, options: SlurmOptions) -> Result<SlurmResolver> {
        let number = |name: &'static str| {
            let given = variable(name);
            let wrong = || wrong(name, "it is not a whole number", given.as_deref().unwrap_or("nothing"), "0, 1, 2, …");
            given.as_ref().and_then(|given| given.trim().parse::<u32>().ok()).ok_or_else(wrong)
        };
        let rank = number("SLURM_PROCID")?;
        let step = "SLURM_STEP_NUM_TASKS";
        let size = number(if variable(step).is_some() { step } else { "SLURM_NTASKS" })?;
        if size as usize > ClusterSpec::MAX_TASKS {
            return Err(wrong(step, "it is too large", &size.to_string(), "at most 100000 tasks"));
        }
        let list = variable("SLURM_STEP_NODELIST").unwrap_or_default();
        let example = "a list such as node1 or node[1-4,7]";
        let hosts = hostlist::expand(&list);
        let hosts = hosts.ok_or_else(|| wrong("SLURM_STEP_NODELIST", "it is not a list of hosts", &list, example))?;
        let tasks = match options.tasks_per_node {
            Some(tasks) => tasks,
            None => tasks_per_node(&variable("SLURM_STEP_TASKS_PER_NODE").unwrap_or_default())?,
        };
        let sum: u64 = tasks.iter().map(|count| u64::from(*count)).sum();
        if tasks.len() != hosts.len() || sum != u64::from(size) {
            let given = format!("{} tasks on {} nodes", sum, tasks.len());
            // The nodes may be many, and differ from the variable's in nothing but their form.
            let nodes = hostlist::compress(&hosts);
            let expected = format!("the {size} tasks of the step on its {} nodes, {nodes}", hosts.len());
            return Err(wrong("SLURM_STEP_TASKS_PER_NODE", "it does not fit the step", &given, &expected));
        }
        let mut places = Vec::new();
        for node in het_step::order(&variable, &hosts)? {
            let (host, count) = (&hosts[node], &tasks[node]);
            for index in 0..*count {
                let port = u16::try_from(index).ok().and_then(|index| options.port_base.checked_add(index));
                let given = format!("{} and {count} tasks on {host}", options.port_base);
                let beyond = || wrong("port_base", "it leaves too few ports", &given, "a port below 65535 - tasks");
                places.push((format!("{host}:{}", port.ok_or_else(beyond)?), index));
            }
        }
        let jobs = if options.jobs.is_empty() { vec![(TaskType::Worker, size)] } else { options.jobs };
        let wanted: u64 = jobs.iter().map(|(_, count)| u64::from(*count)).sum();
        if wanted != u64::from(size) || rank >= size {
            let given = format!("jobs with {wanted} tasks, and this is task {rank}");
            return Err(wrong("jobs", "they do not fit the step", &given, &format!("the {size} tasks of the step")));
        }
        let (mut spec, mut first, mut task) = (ClusterSpec::new(), 0, None);
        for (kind, count) in jobs {
            let addresses = places[first as usize..(first + count) as usize].iter().map(|(address, _)| address.clone());
            spec = spec.with_job(kind, addresses).map_err(|error| error.about("Slurm"))?;
            if (first..first + count).contains(&rank) {
                task = Some((kind, rank - first));
            }
            first += count;
        }
        let most = tasks.iter().copied().max().unwrap_or(1).max(1);
        let each = options.gpus_per_task.unwrap_or(options.gpus_per_node / most);
        if u64::from(each) * u64::from(most) > u64::from(options.gpus_per_node) {
            let given = format!("{each} for each of {most} tasks");
            let expected = format!("at most the {} of a node", options.gpus_per_node);
            return Err(wrong("gpus_per_task", "a node has too few GPUs", &given, &expected));
        }
        agrees(&variable, rank, &places[rank as usize], &hosts)?;
        let begin = places[rank as usize].1 * each;
        let task =
            task.ok_or_else(|| wrong("jobs", "no job has this task", &rank.to_string(), "a task of the step"))?;
        Ok(SlurmResolver { spec, task, gpus: (begin..begin + each).collect(), job: JobId::from_vars(&variable)? })
    }

    /// Returns the indices of this task's GPUs on its node.
    pub fn gpus(&self) -> &[u32] {
        &self.gpus
    }

    /// Returns the value of CUDA_VISIBLE_DEVICES for this task, such as `2,3`.
    pub fn cuda_visible_devices(&self) -> String {
        self.gpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
    }
}

impl ClusterResolver for SlurmResolver {
    fn cluster_spec(&self) -> Result<ClusterSpec> {
        Ok(self.spec.clone())
    }

    fn task_type(&self) -> Option<TaskType> {
        Some(self.task.0)
    }

    fn task_id(&self) -> Option<u32> {
        Some(self.task.1)
    }

    fn job_id(&self) -> Result<JobId> {
        Ok(self.job.clone().unwrap_or_else(|| JobId::of_cluster(&self.spec)))
    }

    fn num_accelerators(&self) -> std::collections::BTreeMap<String, usize> {
        (!self.gpus.is_empty()).then(|| ("GPU".to_owned(), self.gpus.len())).into_iter().collect()
    }
}

/// Checks the address of a task, and its number on its node, against those of this process.
fn agrees(
    variable: &dyn Fn(&str) -> Option<String>,
    rank: u32,
    (address, index): &(String, u32),
    hosts: &[String],
) -> Result<()> {
    let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
    // A node may have another name than its host.
    let node = variable("SLURMD_NODENAME").map(|node| node.trim().to_owned()).filter(|node| hosts.contains(node));
    let is_there = node.as_ref().is_none_or(|node| node == host);
    // The components of a heterogeneous step may count their tasks on a node that they share each by itself.
    let local = variable("SLURM_LOCALID").filter(|_| hosts.len() > 1 || !het_step::is_heterogeneous(variable));
    let is_counted = local.as_ref().is_none_or(|local| local.trim().parse() == Ok(*index));
    if is_there && is_counted {
        return Ok(());
    }
    let told = [local.map(|local| format!("SLURM_LOCALID={}", local.trim())), node.map(|node| format!("on {node}"))];
    let problem = format!("the tasks are not numbered node by node, by which task {rank} is number {index} on {host}");
    let given = told.into_iter().flatten().collect::<Vec<_>>().join(" ");
    let remedy = "Start the step with `srun --distribution=block`.";
    Err(Error::config("SLURM_PROCID", problem, given, format!("SLURM_LOCALID={index} on {host}"), remedy))
}

/// Returns the number of the step's tasks on this node, if the step's variables say it.
pub(crate) fn tasks_of_node(variable: &dyn Fn(&str) -> Option<String>) -> Option<usize> {
    let tasks = tasks_per_node(&variable("SLURM_STEP_TASKS_PER_NODE")?).ok()?;
    let hosts = variable("SLURM_STEP_NODELIST").and_then(|list| hostlist::expand(&list));
    let named = hosts.as_ref().and_then(|hosts| {
        let node = variable("SLURMD_NODENAME")?;
        hosts.iter().position(|host| host == node.trim())
    });
    // The list is sorted by host, and nodes are numbered component by component.
    let numbered = || {
        let node = variable("SLURM_NODEID")?.trim().parse::<usize>().ok()?;
        match &hosts {
            Some(hosts) => het_step::order(variable, hosts).ok()?.get(node).copied(),
            None => (!het_step::is_heterogeneous(variable)).then_some(node),
        }
    };
    tasks.get(named.or_else(numbered)?).map(|count| *count as usize)
}

/// Returns the number of GPUs that `--gpus-per-task` of Slurm gives to each task, if it is set.
///
/// # Source
/// SLURM_GPUS_PER_TASK, `[type:]number` with commas between, and since Slurm 23.11 SLURM_TRES_PER_TASK, such as
/// `cpu=4,gres/gpu:h100=2`; see srun(1).
pub(crate) fn gpus_per_task(variable: &dyn Fn(&str) -> Option<String>) -> Option<usize> {
    let sum = |given: String, is_gpu: fn(&str) -> bool| {
        let mut parts = given.split(',').map(str::trim).filter(|part| is_gpu(part));
        let count = |part: &str| part.rsplit([':', '=']).next()?.trim().parse::<usize>().ok();
        parts.try_fold(0usize, |sum, part| sum.checked_add(count(part)?)).filter(|sum| *sum > 0)
    };
    let of_resources = || sum(variable("SLURM_TRES_PER_TASK")?, |part| part.starts_with("gres/gpu"));
    variable("SLURM_GPUS_PER_TASK").and_then(|given| sum(given, |_| true)).or_else(of_resources)
}

/// Returns whether a place is that of this process among the tasks of a step of Slurm.
pub(crate) fn is_task(variable: &dyn Fn(&str) -> Option<String>, rank: u32, size: u32) -> bool {
    let number = |name: &str| variable(name)?.trim().parse::<u32>().ok();
    let tasks = number("SLURM_STEP_NUM_TASKS").or_else(|| number("SLURM_NTASKS"));
    variable("SLURM_STEP_NODELIST").is_some() && number("SLURM_PROCID") == Some(rank) && tasks == Some(size)
}

/// Returns the numbers of tasks of the nodes, from a list such as `2(x3),1`.
pub(crate) fn tasks_per_node(given: &str) -> Result<Vec<u32>> {
    let wrong = || wrong("SLURM_STEP_TASKS_PER_NODE", "it is not a list of numbers", given, "a list such as 2(x3),1");
    let mut tasks = Vec::new();
    for part in given.trim().split(',') {
        let (count, times) = match part.split_once("(x") {
            None => (part, 1),
            Some((count, times)) => {
                let times = times.strip_suffix(')').and_then(|times| times.parse::<usize>().ok());
                (count, times.filter(|times| (1..=ClusterSpec::MAX_TASKS).contains(times)).ok_or_else(wrong)?)
            }
        };
        let count = count.trim().parse::<u32>().map_err(|_| wrong())?;
        if tasks.len() + times > ClusterSpec::MAX_TASKS {
            return Err(wrong());
        }
        tasks.extend(std::iter::repeat_n(count, times));
    }
    Ok(tasks)
}

fn wrong(subject: &'static str, problem: &str, given: &str, expected: &str) -> Error {
    Error::config(subject, problem, given, expected, "Start the program by srun, and correct the option if one is set.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Task;

    fn step(rank: u32, size: u32, nodes: &str, tasks: &str, options: SlurmOptions) -> Result<SlurmResolver> {
        step_with(rank, size, (nodes, tasks), &[], options)
    }

    fn step_with(
        rank: u32,
        size: u32,
        (nodes, tasks): (&str, &str),
        more: &[(&str, &str)],
        options: SlurmOptions,
    ) -> Result<SlurmResolver> {
        let (rank, size) = (rank.to_string(), size.to_string());
        let variable = |name: &str| match name {
            "SLURM_PROCID" => Some(rank.clone()),
            "SLURM_STEP_NUM_TASKS" => Some(size.clone()),
            "SLURM_STEP_NODELIST" => Some(nodes.to_owned()),
            "SLURM_STEP_TASKS_PER_NODE" => Some(tasks.to_owned()),
            _ => more.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()),
        };
        SlurmResolver::from_vars(variable, options)
    }

    fn addresses(resolver: &SlurmResolver, kind: TaskType) -> Vec<String> {
        let spec = resolver.cluster_spec().unwrap();
        spec.job_tasks(kind).into_iter().map(|address| address.unwrap().to_owned()).collect()
    }

    #[test]
    fn tasks_per_node_are_expanded() {
        let expanded = |given: &str| tasks_per_node(given).ok();
        assert_eq!(expanded("3(x2),2,1"), Some(vec![3, 3, 2, 1]));
        assert_eq!(expanded("2"), Some(vec![2]));
        assert_eq!(expanded("1(x4)"), Some(vec![1; 4]));
        for wrong in ["", "x", "2(x0)", "2(x", "2(x3),", "1(x4000000000)"] {
            assert_eq!(expanded(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn one_task_of_each_node() {
        let options = SlurmOptions::default().gpus_per_node(1).gpus_per_task(Some(1));
        let resolver = step(3, 4, "t02n13,t02n41,t02n43,t02n44", "1(x4)", options).unwrap();
        assert_eq!(
            addresses(&resolver, TaskType::Worker),
            ["t02n13:8888", "t02n41:8888", "t02n43:8888", "t02n44:8888"]
        );
        assert_eq!(
            (resolver.task(), resolver.cuda_visible_devices().as_str()),
            (Some(Task::new(TaskType::Worker, 3)), "0")
        );
        assert_eq!(resolver.master(None, None, Some("grpc")).unwrap(), "grpc://t02n44:8888");
        assert_eq!(resolver.master(Some(TaskType::Worker), Some(1), Some("test")).unwrap(), "test://t02n41:8888");
        assert_eq!(resolver.num_accelerators()["GPU"], 1);
    }

    #[test]
    fn steps_of_more_tasks_than_a_cluster_has_are_refused() {
        // Otherwise four billion addresses would be made.
        let error = step(0, 4_000_000_000, "n[0-99999]", "40000(x100000)", SlurmOptions::default()).unwrap_err();
        assert!(error.to_string().contains("at most 100000 tasks"), "{error}");
    }

    #[test]
    fn several_jobs_fill_the_nodes_one_after_another() {
        let jobs = vec![(TaskType::Ps, 1), (TaskType::Worker, 4)];
        let options = SlurmOptions::default().jobs(jobs).port_base(9000).gpus_per_node(4).gpus_per_task(Some(2));
        let at = |rank| step(rank, 5, "t02n[13,41,43]", "2(x2),1", options.clone()).unwrap();
        let resolver = at(3);
        assert_eq!(addresses(&resolver, TaskType::Ps), ["t02n13:9000"]);
        assert_eq!(
            addresses(&resolver, TaskType::Worker),
            ["t02n13:9001", "t02n41:9000", "t02n41:9001", "t02n43:9000"]
        );
        assert_eq!(
            (resolver.task(), resolver.cuda_visible_devices().as_str()),
            (Some(Task::new(TaskType::Worker, 2)), "2,3")
        );
        assert_eq!((at(0).task(), at(4).gpus()), (Some(Task::new(TaskType::Ps, 0)), &[0, 1][..]));
        // The same cluster on every task.
        assert_eq!(at(0).job_id().unwrap(), at(4).job_id().unwrap());
    }

    #[test]
    fn gpus_are_divided_among_the_tasks_of_a_node() {
        let options = SlurmOptions::default().gpus_per_node(8);
        let resolver = step(2, 6, "n[1-2]", "4,2", options).unwrap();
        assert_eq!(resolver.cuda_visible_devices(), "4,5");
        let none = step(0, 1, "n1", "1", SlurmOptions::default()).unwrap();
        assert_eq!((none.cuda_visible_devices().as_str(), none.num_accelerators().len()), ("", 0));
    }

    #[test]
    fn tasks_that_are_not_numbered_node_by_node_are_refused() {
        let at = |rank, more: &[(&str, &str)]| {
            step_with(rank, 4, ("n[1-2]", "2(x2)"), more, SlurmOptions::default().gpus_per_node(2))
        };
        let [local, name] = ["SLURM_LOCALID", "SLURMD_NODENAME"];
        // By blocks, and with nodes whose names are not those of hosts.
        assert_eq!(at(1, &[(local, "1"), (name, "n1")]).unwrap().gpus(), [1]);
        assert_eq!(at(2, &[(local, "0"), (name, "node-2")]).unwrap().gpus(), [0]);
        // `srun -N2 -n4 --distribution=cyclic`, with one or both of the variables.
        for more in [&[(local, "0"), (name, "n2")][..], &[(local, "0")], &[(local, "1"), (name, "n2")], &[(name, "n2")]]
        {
            let text = at(1, more).unwrap_err().to_string();
            assert!(
                text.contains("by which task 1 is number 1 on n1") && text.contains("--distribution=block"),
                "{text}"
            );
        }
        let text = at(2, &[(local, "1"), (name, "n1")]).unwrap_err().to_string();
        assert!(text.contains("Given: SLURM_LOCALID=1 on n1. Expected: SLURM_LOCALID=0 on n2"), "{text}");
    }

    #[test]
    fn the_tasks_of_a_node_are_counted_by_its_name_or_number() {
        let of = |variables: &[(&str, &str)]| {
            let listed = [
                ("SLURM_STEP_NODELIST", "n[1-3]"),
                ("SLURM_STEP_TASKS_PER_NODE", "1,2(x2)"),
                ("SLURM_HET_SIZE", "2"),
                ("SLURM_JOB_NODELIST_HET_GROUP_0", "n[2-3]"),
                ("SLURM_JOB_NODELIST_HET_GROUP_1", "n1"),
            ];
            let all = [variables, &listed].concat();
            tasks_of_node(&|name| all.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
        };
        assert_eq!([0, 1, 2].map(|node| of(&[("SLURM_NODEID", &node.to_string())])), [Some(2), Some(2), Some(1)]);
        assert_eq!(of(&[("SLURM_NODEID", "2"), ("SLURMD_NODENAME", "n1")]), Some(1));
        assert_eq!(of(&[("SLURM_NODEID", "3")]), None);
        // The lists of the components may be missing.
        let missing = ("SLURM_JOB_NODELIST_HET_GROUP_0", "n9");
        assert_eq!(of(&[missing, ("SLURM_NODEID", "0")]), None);
        assert_eq!(of(&[missing, ("SLURM_NODEID", "0"), ("SLURMD_NODENAME", "n2")]), Some(2));
    }

    #[test]
    fn gpus_of_a_task_have_several_forms() {
        let of = |name: &str, given: &str| gpus_per_task(&|asked| (asked == name).then(|| given.to_owned()));
        for (given, gpus) in [
            ("2", Some(2)),
            ("h100:2", Some(2)),
            ("h100:2,a100:1", Some(3)),
            (" 4 ", Some(4)),
            ("0", None),
            ("h100", None),
            ("", None),
        ] {
            assert_eq!(of("SLURM_GPUS_PER_TASK", given), gpus, "{given}");
        }
        assert_eq!(of("SLURM_TRES_PER_TASK", "cpu=4,gres/gpu:h100=2"), Some(2));
        assert_eq!(of("SLURM_TRES_PER_TASK", "cpu:4,gres/gpu:3"), Some(3));
        assert_eq!(of("SLURM_GPUS_PER_TASK", "18446744073709551615,1"), None);
        assert_eq!(of("SLURM_TRES_PER_TASK", "cpu=4"), None);
    }

    /// A task of a step of two components, n[2-3] with two tasks each and n1 with one.
    fn of_components(rank: u32, listed: bool) -> Result<SlurmResolver> {
        let variable = |name: &str| {
            let value = match name {
                "SLURM_PROCID" => return Some(rank.to_string()),
                "SLURM_STEP_NUM_TASKS" => "5",
                "SLURM_STEP_NODELIST" => "n[1-3]",
                "SLURM_STEP_TASKS_PER_NODE" => "1,2(x2)",
                "SLURM_HET_SIZE" => "2",
                "SLURM_JOB_NODELIST_HET_GROUP_0" if listed => "n[2-3]",
                "SLURM_JOB_NODELIST_HET_GROUP_1" if listed => "n1",
                _ => return None,
            };
            Some(value.to_owned())
        };
        SlurmResolver::from_vars(variable, SlurmOptions::default().gpus_per_node(2))
    }

    #[test]
    fn components_of_a_heterogeneous_job_follow_each_other() {
        let resolver = of_components(3, true).unwrap();
        let expected = ["n2:8888", "n2:8889", "n3:8888", "n3:8889", "n1:8888"];
        assert_eq!(addresses(&resolver, TaskType::Worker), expected);
        assert_eq!((resolver.task(), resolver.gpus()), (Some(Task::new(TaskType::Worker, 3)), &[1][..]));
        assert_eq!(of_components(4, true).unwrap().gpus(), [0]);
        let text = of_components(0, false).unwrap_err().to_string();
        assert!(text.contains("SLURM_JOB_NODELIST_HET_GROUP_0 is not"), "{text}");
    }

    #[test]
    fn every_mistake_is_a_sentence() {
        let jobs = |tasks| SlurmOptions::default().jobs(vec![(TaskType::Worker, tasks)]);
        for (outcome, words) in [
            (step(0, 2, "n[1", "2", SlurmOptions::default()), "SLURM_STEP_NODELIST: it is not a list of hosts"),
            (step(0, 2, "n1", "x", SlurmOptions::default()), "SLURM_STEP_TASKS_PER_NODE: it is not a list"),
            (step(0, 2, "n1", "1", SlurmOptions::default()), "it does not fit the step"),
            (
                step(0, 2, "n1,n2,n3", "1(x2)", SlurmOptions::default()),
                "the 2 tasks of the step on its 3 nodes, n[1-3]",
            ),
            (step(0, 2, "n1", "2", jobs(3)), "jobs with 3 tasks"),
            (step(2, 2, "n1", "2", SlurmOptions::default()), "this is task 2"),
            (step(0, 2, "n1", "2", SlurmOptions::default().port_base(65_535)), "it leaves too few ports"),
            (step(0, 2, "n1", "2", SlurmOptions::default().gpus_per_node(1).gpus_per_task(Some(1))), "too few GPUs"),
            (SlurmResolver::from_vars(|_| None, SlurmOptions::default()), "SLURM_PROCID: it is not a whole number"),
        ] {
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
    }
}
