//! The command line of `distribute manifest`.

use std::path::PathBuf;

use clap::{Subcommand, value_parser};

use super::checks::{Cpus, Existing, Image, MountPath, Name, Size, SlurmName, TimeLimit, Variable};

/// Print a job file of a cluster, in which each task finds its place
///
/// The file is small, commented, and valid as printed. Nothing is sent to a cluster.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Manifest {
    #[command(subcommand)]
    pub(crate) platform: Platform,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Platform {
    /// Kubernetes alone: an indexed Job and a headless Service
    ///
    /// Workers only, which read RANK, WORLD_SIZE, MASTER_ADDR and DISTRIBUTE_PORT. Kubernetes 1.29 or newer.
    #[command(name = "job", after_help = JOB_AFTER_HELP)]
    Job(Box<Job>),
    /// Kubernetes with JobSet: chief, workers, parameter servers and evaluator
    ///
    /// Tasks read TF_CONFIG. jobset.x-k8s.io/v1alpha2.
    #[command(name = "jobset", after_help = JOB_SET_AFTER_HELP)]
    JobSet(Box<JobSet>),
    /// Kubeflow's training operator: a TFJob
    ///
    /// The operator sets TF_CONFIG. kubeflow.org/v1. It restarts tasks that end with an exit code from 128 on, as often
    /// as they do.
    #[command(name = "tfjob", after_help = TF_JOB_AFTER_HELP)]
    TfJob(Box<TfJob>),
    /// Kubeflow Trainer: a TrainJob
    ///
    /// Workers only; the runtime sets PET_NODE_RANK, PET_NNODES, PET_MASTER_ADDR and PET_MASTER_PORT, and decides about
    /// restarts. trainer.kubeflow.org/v1alpha1, of Kubeflow Trainer 2.3 or newer.
    #[command(name = "trainjob", after_help = TRAIN_JOB_AFTER_HELP)]
    TrainJob(Box<TrainJob>),
    /// Slurm: a script for sbatch
    ///
    /// Workers only, which srun starts; they read Slurm's variables. A program with other jobs names them itself:
    /// SlurmOptions::jobs.
    #[command(name = "slurm", after_help = SLURM_AFTER_HELP)]
    Slurm(Box<Slurm>),
    /// Docker Compose: a service for each task, on one machine
    ///
    /// Tasks read TF_CONFIG.
    #[command(name = "compose", after_help = COMPOSE_AFTER_HELP)]
    Compose(Box<Compose>),
}

/// The program, which every platform needs.
#[derive(Debug, clap::Args)]
pub(crate) struct Program {
    /// Name of the job
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Name,

    /// Number of workers
    #[arg(short = 'n', long, value_name = "N")]
    #[arg(value_parser = value_parser!(u32).range(1..=10_000))]
    pub(crate) workers: u32,

    /// Variable of every task, with its value as it is; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<Variable>,

    /// File to write instead of printing; it must not exist yet
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// The program and its arguments, as they are: no shell reads them
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<String>,
}

impl Program {
    /// Returns whether a register decides who trains, or a store is where processes meet: their records belong to one
    /// start of a job, which needs an identity that no other start has.
    pub(super) fn has_records(&self) -> bool {
        let names = ["DISTRIBUTE_GENERATIONS", "DISTRIBUTE_STORE"];
        self.env.iter().any(|given| names.contains(&given.name.as_str()) && !given.value.trim().is_empty())
    }
}

/// Tasks in addition to the workers.
#[derive(Debug, clap::Args)]
pub(crate) struct Roles {
    /// Tasks of the job `chief` [default: 1 with parameter servers, else 0]
    #[arg(long, value_name = "0|1")]
    #[arg(value_parser = value_parser!(u32).range(0..=1))]
    pub(crate) chief: Option<u32>,

    /// Parameter servers
    #[arg(long, value_name = "N", default_value_t = 0)]
    #[arg(value_parser = value_parser!(u32).range(0..=10_000))]
    pub(crate) ps: u32,

    /// Tasks of the job `evaluator`
    #[arg(long, value_name = "0|1", default_value_t = 0)]
    #[arg(value_parser = value_parser!(u32).range(0..=1))]
    pub(crate) evaluator: u32,
}

/// CPUs, memory and GPUs of a task.
#[derive(Debug, clap::Args)]
pub(crate) struct Resources {
    /// CPUs of each task, such as 4 or 500m
    #[arg(long, value_name = "N")]
    pub(crate) cpus: Option<Cpus>,

    /// Memory of each task, such as 16Gi
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Size>,

    /// GPUs of each task that trains or evaluates
    #[arg(long, value_name = "N", default_value_t = 0)]
    #[arg(value_parser = value_parser!(u32).range(0..=64))]
    pub(crate) gpus: u32,
}

/// The container of each task.
#[derive(Debug, clap::Args)]
pub(crate) struct Container {
    /// Image with the program
    #[arg(long, value_name = "IMAGE")]
    pub(crate) image: Image,

    #[command(flatten)]
    pub(crate) resources: Resources,

    /// Volume for checkpoints, which all tasks mount: the name of a claim (Compose: of a volume)
    #[arg(long, value_name = "NAME")]
    pub(crate) checkpoints: Option<Existing>,

    /// Where that volume is mounted
    #[arg(long, value_name = "PATH", default_value = "/checkpoints", requires = "checkpoints")]
    pub(crate) checkpoints_at: MountPath,

    /// Size of /dev/shm, in place of 64 MiB
    #[arg(long, value_name = "SIZE")]
    pub(crate) shared_memory: Option<Size>,
}

/// Where and how long.
#[derive(Debug, clap::Args)]
pub(crate) struct Limits {
    /// Namespace [default: that of kubectl's context]
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<Existing>,

    /// Time after which the job is stopped, such as 12h
    #[arg(long, value_name = "TIME")]
    pub(crate) time_limit: Option<TimeLimit>,
}

/// Time to save a checkpoint.
#[derive(Debug, clap::Args)]
pub(crate) struct Grace {
    /// Time that tasks get to save and stop before they are killed
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    #[arg(value_parser = value_parser!(u32).range(1..=86_400))]
    pub(crate) grace: u32,
}

/// Restarts that a platform counts.
#[derive(Debug, clap::Args)]
pub(crate) struct Restarts {
    /// Restarts after failures that a restart may fix
    #[arg(long, value_name = "N", default_value_t = 3)]
    #[arg(value_parser = value_parser!(u32).range(0..=1000))]
    pub(crate) restarts: u32,
}

/// The port at which tasks meet.
#[derive(Debug, clap::Args)]
pub(crate) struct Port {
    /// Port of the tasks
    #[arg(long, value_name = "PORT", default_value_t = 2222)]
    #[arg(value_parser = value_parser!(u16).range(1..))]
    pub(crate) port: u16,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Job {
    #[command(flatten)]
    pub(crate) program: Program,
    #[command(flatten)]
    pub(crate) container: Container,
    #[command(flatten)]
    pub(crate) limits: Limits,
    #[command(flatten)]
    pub(crate) grace: Grace,
    #[command(flatten)]
    pub(crate) restarts: Restarts,
    #[command(flatten)]
    pub(crate) port: Port,
}

#[derive(Debug, clap::Args)]
pub(crate) struct JobSet {
    #[command(flatten)]
    pub(crate) program: Program,
    #[command(flatten)]
    pub(crate) roles: Roles,
    #[command(flatten)]
    pub(crate) container: Container,
    #[command(flatten)]
    pub(crate) limits: Limits,
    #[command(flatten)]
    pub(crate) grace: Grace,
    #[command(flatten)]
    pub(crate) restarts: Restarts,
    #[command(flatten)]
    pub(crate) port: Port,
}

#[derive(Debug, clap::Args)]
pub(crate) struct TfJob {
    #[command(flatten)]
    pub(crate) program: Program,
    #[command(flatten)]
    pub(crate) roles: Roles,
    #[command(flatten)]
    pub(crate) container: Container,
    #[command(flatten)]
    pub(crate) limits: Limits,
    #[command(flatten)]
    pub(crate) grace: Grace,
    #[command(flatten)]
    pub(crate) port: Port,
}

#[derive(Debug, clap::Args)]
pub(crate) struct TrainJob {
    #[command(flatten)]
    pub(crate) program: Program,
    #[command(flatten)]
    pub(crate) container: Container,
    #[command(flatten)]
    pub(crate) limits: Limits,

    /// Time that tasks get to save and stop before they are killed [default: the runtime's]
    #[arg(long, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u32).range(1..=86_400))]
    pub(crate) grace: Option<u32>,

    /// ClusterTrainingRuntime with a policy for torch
    #[arg(long, value_name = "NAME", default_value = "torch-distributed")]
    pub(crate) runtime: Existing,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Slurm {
    #[command(flatten)]
    pub(crate) program: Program,
    #[command(flatten)]
    pub(crate) resources: Resources,
    #[command(flatten)]
    pub(crate) restarts: Restarts,

    /// Workers on each node
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = value_parser!(u32).range(1..=1024))]
    pub(crate) tasks_per_node: u32,

    /// Partition [default: the cluster's]
    #[arg(long, value_name = "NAME")]
    pub(crate) partition: Option<SlurmName>,

    /// Account [default: the user's]
    #[arg(long, value_name = "NAME")]
    pub(crate) account: Option<SlurmName>,

    /// Time after which the job is stopped, such as 12h [default: the partition's]
    #[arg(long, value_name = "TIME")]
    pub(crate) time_limit: Option<TimeLimit>,

    /// Time before the time limit at which tasks are told to save and stop
    #[arg(long, value_name = "SECONDS", default_value_t = 90)]
    #[arg(value_parser = value_parser!(u32).range(1..=65_535))]
    pub(crate) grace: u32,

    /// Port of rank 0 [default: derived from the number of the Slurm job]
    #[arg(long, value_name = "PORT")]
    #[arg(value_parser = value_parser!(u16).range(1..))]
    pub(crate) port: Option<u16>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Compose {
    #[command(flatten)]
    pub(crate) program: Program,
    #[command(flatten)]
    pub(crate) roles: Roles,
    #[command(flatten)]
    pub(crate) container: Container,
    #[command(flatten)]
    pub(crate) grace: Grace,
    #[command(flatten)]
    pub(crate) port: Port,

    /// Restarts of a task after any failure: Docker cannot restart by exit code
    #[arg(long, value_name = "N", default_value_t = 0)]
    #[arg(value_parser = value_parser!(u32).range(0..=1000))]
    pub(crate) restarts: u32,
}

const AFTER_HELP: &str = "\
Exit code: 0 when it is printed or written, 1 when the disk refuses, 2 when options are wrong.

Example:
  distribute manifest job --name mnist --image registry.example/mnist:1 -n 4 -- mnist --epochs 5 | kubectl create -f -";

const JOB_AFTER_HELP: &str = "\
Example:
  distribute manifest job --name mnist --image registry.example/mnist:1 -n 4 --gpus 1 --checkpoints training-data \
-- mnist --checkpoints /checkpoints";

const JOB_SET_AFTER_HELP: &str = "\
Example:
  distribute manifest jobset --name ranking --image registry.example/ranking:1 -n 8 --ps 2 --evaluator 1 -- ranking";

const TF_JOB_AFTER_HELP: &str = "\
Example:
  distribute manifest tfjob --name mnist --image registry.example/mnist:1 -n 4 --chief 1 --time-limit 12h -- mnist";

const TRAIN_JOB_AFTER_HELP: &str = "\
Example:
  distribute manifest trainjob --name mnist --image registry.example/mnist:1 -n 4 --gpus 1 -- mnist --epochs 5";

const SLURM_AFTER_HELP: &str = "\
Example:
  distribute manifest slurm --name mnist -n 8 --tasks-per-node 4 --cpus 8 --gpus 1 --time-limit 12h -o mnist.sh \
-- ./mnist --epochs 5
  sbatch mnist.sh";

const COMPOSE_AFTER_HELP: &str = "\
Example:
  distribute manifest compose --name mnist --image mnist:1 -n 2 -o compose.yaml -- mnist --epochs 5
  docker compose up";
