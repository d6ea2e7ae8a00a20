//! A TrainJob of two processes, whose chief alone reports. The workers are this test program, in another role, and find
//! the stand-in of Kubeflow's status server in their environment.

#[path = "../../src/callbacks/kubeflow/stand_in.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod stand_in;

use std::fs;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use distribute_collectives::ReduceOp;
use distribute_input::{Array, Dataset};
use distribute_strategy::{DistributedDataset, MultiWorkerMirroredStrategy, Strategy};
use distribute_testkit::{Job, Ports};
use distribute_train::callbacks::KubeflowStatus;
use distribute_train::checkpoint::{Checkpointed, Snapshot};
use distribute_train::metrics::Metrics;
use distribute_train::progress::{Form, Options, Progress, Summary};
use distribute_train::trainer::{Batching, Fit, Part, Trainee, TrainingData, fit, sums};
use distribute_train::{BoxError, Error};
use distribute_values::PerReplica;

use self::stand_in::{Answer, PATH, Seen, StandIn};

const DEADLINE: Duration = Duration::from_secs(120);

/// The variable by which this program is a worker; its value is the kind of loop.
const ROLE: &str = "DISTRIBUTE_TEST_KUBEFLOW_WORKER";

const EPOCHS: u32 = 2;

/// Steps of an epoch.
const STEPS: u64 = 8;

/// Longer than the shortest time between two states that are reported.
const STEP: Duration = Duration::from_millis(60);

/// A model without variables, whose steps only wait and meet. Their loss is 0.5.
struct Toy {
    strategy: Strategy,
    nothing: Nothing,
    metrics: Metrics,
    passes: AtomicU64,
}

struct Nothing;

impl Checkpointed for Nothing {
    fn save(&self, _: &Strategy, _: &mut Snapshot) -> Result<(), BoxError> {
        Ok(())
    }

    fn load(&self, _: &Strategy, _: &Snapshot) -> Result<(), BoxError> {
        Ok(())
    }
}

impl Toy {
    fn step(&self) -> Result<PerReplica<Vec<f64>>, Error> {
        self.strategy.run_with((), |context, ()| {
            std::thread::sleep(STEP);
            context.group().all_reduce(&mut [1.0f32], ReduceOp::Sum).map_err(distribute_strategy::Error::from)?;
            let mut sums = sums(&self.metrics);
            (sums[0], sums[1]) = (0.5, 1.0);
            Ok(sums)
        })
    }
}

impl Trainee for Toy {
    type Examples = Array<i64>;
    type Error = Error;

    fn strategy(&self) -> &Strategy {
        &self.strategy
    }

    fn model(&self) -> &dyn Checkpointed {
        &self.nothing
    }

    fn optimizer(&self) -> &dyn Checkpointed {
        &self.nothing
    }

    fn learning_rate(&self) -> f64 {
        0.1
    }

    fn set_learning_rate(&self, _: f64) {}

    fn num_parameters(&self) -> usize {
        0
    }

    fn passes(&self) -> &AtomicU64 {
        &self.passes
    }

    fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    fn train_on(
        &self,
        batches: PerReplica<Vec<Part<Array<i64>>>>,
        _: usize,
        _: &[f32],
    ) -> Result<PerReplica<Vec<f64>>, Error> {
        assert!(batches.values().iter().all(|parts| parts.len() == 1));
        self.step()
    }

    fn evaluate_on(&self, _: PerReplica<Array<i64>>) -> Result<PerReplica<Vec<f64>>, Error> {
        self.step()
    }
}

struct Rows(Dataset<Array<i64>>);

impl TrainingData<Array<i64>, Error> for Rows {
    fn distribute(&self, strategy: &Strategy, _: Batching) -> Result<(DistributedDataset<Array<i64>>, usize), Error> {
        Ok((strategy.distribute_dataset(&self.0)?, self.0.batch_size().unwrap_or(1)))
    }
}

#[test]
#[ignore = "a process that other tests start"]
fn worker() {
    let Some(role) = std::env::var_os(ROLE) else { return };
    let strategy = MultiWorkerMirroredStrategy::builder().devices(["CPU:0"]).build().unwrap();
    let status = KubeflowStatus::from_env().unwrap().map(|status| status.every(Duration::from_millis(1)));
    assert!(status.is_some());
    let toy = Toy { strategy, nothing: Nothing, metrics: Metrics::new(), passes: AtomicU64::new(0) };
    if role == "trainer" {
        let data = Rows(Dataset::<Array<i64>>::range(0..2 * STEPS as i64).batch(2));
        let history = fit(&toy, &data, Fit::epochs(EPOCHS).callback(status)).unwrap();
        assert_eq!(history.epochs.len(), 2);
        return;
    }
    let options = Options { epochs: EPOCHS, steps_per_epoch: Some(STEPS), ..Options::of(&toy.strategy) };
    let mut progress = Progress::new(options, Form::Off).unwrap().with_kubeflow(status).unwrap();
    for epoch in 1..=EPOCHS {
        progress.epoch(epoch);
        for step in 1..=STEPS {
            toy.step().unwrap();
            progress.step(step, 2, &[("loss", 0.5)]);
        }
        progress.end_epoch(&[]);
    }
    progress.finish(&Summary::default());
}

/// Runs a job in a role, whose chief has another token than its worker, and returns the requests.
fn posted(role: &str, answers: Vec<Answer>) -> Vec<Seen> {
    let server = StandIn::with_tls();
    server.answer(answers);
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("ca.crt"), server.authority()).unwrap();
    (0..2).for_each(|rank| fs::write(path(&format!("token-{rank}")), format!("token-of-rank-{rank}")).unwrap());
    let port = Ports::reserve(1).unwrap().release()[0];
    let tokens = [path("token-0"), path("token-1")];
    let variables = move |rank: u32| {
        let fields = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", "2".to_owned()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("DISTRIBUTE_PORT", port.to_string()),
            ("KUBEFLOW_TRAINER_SERVER_TOKEN", tokens[rank as usize].clone()),
        ];
        fields.map(|(name, value)| (name.to_owned(), value)).to_vec()
    };
    let job = Job::of_test("kubeflow::worker").unwrap();
    let job = job.tasks(2).task_env(variables).env(ROLE, role).env("MASTER_PORT", "1");
    let job = job.env("KUBEFLOW_TRAINER_SERVER_URL", server.url());
    let mut job = job.env("KUBEFLOW_TRAINER_SERVER_CA_CERT", path("ca.crt")).start().unwrap();
    for outcome in job.wait_all(DEADLINE).unwrap() {
        assert!(outcome.passed(), "{outcome:?}");
    }
    server.seen()
}

fn check(seen: &[Seen]) {
    for request in seen {
        assert_eq!(request.request, format!("POST {PATH}"));
        assert_eq!(request.header("authorization"), Some("Bearer token-of-rank-0"), "the chief alone posts");
    }
    let percents: Vec<u64> = seen.iter().map(Seen::percent).collect();
    assert!(percents.is_sorted() && percents[0] < 50, "{percents:?}");
    for epoch in [1..50, 51..100] {
        assert!(percents.iter().any(|percent| epoch.contains(percent)), "{percents:?}");
    }
    let last = seen.last().unwrap();
    assert_eq!(last.percent(), 100);
    let metrics = ["currentEpoch", "totalEpochs", "loss"].map(|name| last.metric(name));
    assert_eq!(metrics, [Some("2"), Some("2"), Some("0.5")]);
}

#[test]
fn the_chief_of_a_trainer_posts_its_progress_whatever_the_server_answers() {
    let failures = vec![Answer::Status(500, "Internal error"), Answer::Close, Answer::Status(403, "Forbidden")];
    check(&posted("trainer", failures));
}

#[test]
fn the_chief_of_a_custom_loop_posts_its_progress() {
    check(&posted("loop", Vec::new()));
}
