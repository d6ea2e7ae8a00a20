//! Services of Docker Compose, one for each task.

use super::args::Compose;
use super::kubernetes::check;
use super::tasks::{Role, Tasks};
use super::yaml::{Map, Node, documents, texts};
use crate::error::Error;

/// Returns the Compose file.
///
/// # Errors
/// [`Error::Manifest`] if options contradict each other, or there are more tasks than a machine
/// runs.
///
/// # Source
/// The Compose specification, "Services top-level elements".
pub(super) fn file(job: &Compose) -> Result<String, Error> {
    check(&job.container)?;
    let tasks = Tasks::new(&job.program, &job.roles)?;
    if tasks.total() > MOST {
        return Err(Error::Manifest {
            problem: "Compose starts all tasks on one machine".into(),
            given: format!("{} tasks", tasks.total()),
            expected: format!("at most {MOST}"),
            remedy: "start fewer, or print a job file of a cluster".into(),
        });
    }
    let (mut services, mut gpus) = (Map::new(), 0);
    for role in tasks.roles() {
        for index in 0..role.count {
            services = services.with(&host(role, index), service(job, tasks, role, index, &mut gpus));
        }
    }
    let volume = job.container.checkpoints.as_ref().map(|volume| {
        let volumes = Map::new().with("checkpoints", Map::new().with("name", &volume.0));
        ("volumes", volumes)
    });
    let mut file = Map::new().with("name", &job.program.name.0).with("services", services);
    if let Some((key, volumes)) = volume {
        file = file.noted("Kept when the job is removed.", key, volumes);
    }
    let heading = "Tasks of a distributed job on one machine, on a network of their own. Docker cannot restart by exit \
                   code, so tasks are restarted after each failure or after none.\nStart: docker compose -f FILE up";
    Ok(documents(heading, &[file]))
}

fn service(job: &Compose, tasks: Tasks, role: Role, index: u32, gpus: &mut u32) -> Map {
    let port = job.port.port;
    let address = |role: Role, index| format!("{}:{port}", host(role, index));
    let config = tasks.tf_config(address, role, &index.to_string());
    let mut environment = Map::new().with("TF_CONFIG", config);
    if job.program.has_records() {
        let comment = "From the shell, because the register's records are those of one start.";
        environment = environment.noted(comment, "DISTRIBUTE_JOB_ID", IDENTITY);
    }
    for variable in &job.program.env {
        environment = environment.with(&variable.name, literal(&variable.value));
    }
    let program = texts(job.program.program.iter().map(|part| literal(part)));
    let map = Map::new().with("image", literal(&job.container.image.0));
    let restart = match job.restarts {
        0 => "no".to_owned(),
        restarts => format!("on-failure:{restarts}"),
    };
    let resources = &job.container.resources;
    let map = map.with("entrypoint", program).with("environment", environment).with("restart", restart);
    let map = map
        .with("stop_grace_period", format!("{}s", job.grace.grace))
        .maybe("cpus", resources.cpus.map(|cpus| cpus.to_string()))
        .maybe("mem_limit", resources.memory.map(|memory| memory.compose()))
        .maybe("shm_size", job.container.shared_memory.map(|size| size.compose()));
    let mount = job.container.checkpoints.as_ref().map(|_| {
        let target = literal(&job.container.checkpoints_at.0);
        let mount = Map::new().with("type", "volume").with("source", "checkpoints").with("target", target);
        vec![mount.into()]
    });
    let map = map.maybe("volumes", mount);
    if !role.computes || resources.gpus == 0 {
        return map;
    }
    let own = *gpus..*gpus + resources.gpus;
    *gpus = own.end;
    let device = Map::new()
        .with("driver", "nvidia")
        .with("device_ids", texts(own.map(|gpu| gpu.to_string())))
        .with("capabilities", texts(["gpu"]));
    let devices: Vec<Node> = vec![device.into()];
    let reservations = Map::new().with("reservations", Map::new().with("devices", devices));
    map.with("deploy", Map::new().with("resources", reservations))
}

/// Returns the name of a task's service, which is its host name for the others.
fn host(role: Role, index: u32) -> String {
    format!("{}-{index}", role.name)
}

/// Returns a text that Compose leaves as it is, where it would replace `$NAME`.
fn literal(text: &str) -> String {
    text.replace('$', "$$")
}

/// A reference to a variable of the shell, without which Compose starts nothing.
const IDENTITY: &str = "${DISTRIBUTE_JOB_ID:?set it to a name of this start}";

/// The most tasks of a file, whose size grows with the square of their number.
const MOST: u32 = 256;
