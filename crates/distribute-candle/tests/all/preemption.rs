//! An event of one worker's machine stops all workers. The workers are this test program, in another role.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use candle_core::{Device, Tensor};
use candle_nn::linear;
use distribute_candle::{Fit, MeanSquaredError, Sgd, Trainer};
use distribute_cluster::{GceMaintenance, RequestOptions};
use distribute_input::Dataset;
use distribute_strategy::MultiWorkerMirroredStrategy;
use distribute_testkit::{Job, Outcome, Ports};
use distribute_train::callbacks::{BackupAndRestore, Callback, Profile, Training};
use distribute_train::checkpoint::CheckpointManager;
use distribute_train::metrics::Metrics;
use distribute_train::preemption::TerminationConfig;
use distribute_types::ErrorClass;

const DEADLINE: Duration = Duration::from_secs(60);

/// The variable by which this program is a worker; its value is the folder for its files.
const ROLE: &str = "DISTRIBUTE_TEST_PREEMPTION_WORKER";

/// Says when training is under way, and slows it down.
struct Says;

impl Callback for Says {
    #[expect(clippy::print_stdout, reason = "the test waits for this line")]
    fn step_end(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        if training.step == 3 {
            println!("training");
        }
        std::thread::sleep(Duration::from_millis(5));
        Ok(())
    }
}

/// Trains until it is told to stop.
#[test]
#[ignore = "a process that other tests start"]
fn preemption_worker() {
    let folder = std::env::var_os(ROLE).unwrap();
    let strategy = MultiWorkerMirroredStrategy::builder().devices(["CPU:0"]).build().unwrap();
    let x = Tensor::arange(0f32, 64.0, &Device::Cpu).unwrap().reshape((16, 4)).unwrap();
    let data = Dataset::from_tensor_slices((x, Tensor::ones((16, 1), candle_core::DType::F32, &Device::Cpu).unwrap()));
    let build = |vb: candle_nn::VarBuilder<'_>| linear(4, 1, vb.pp("fc"));
    let sgd = |model: &_| Sgd::new(1e-6).build(model);
    let mut trainer = Trainer::new(&strategy, build, sgd, MeanSquaredError, Metrics::new()).unwrap();
    let mut config = TerminationConfig::default().on_exit(|step| println!("saved after step {step}"));
    // One worker's machine is on Compute Engine.
    if std::env::var_os("GCE_METADATA_HOST").is_some() {
        let machine = GceMaintenance::from_env(RequestOptions::default().timeout(Duration::from_secs(10))).unwrap();
        config = config.watch(move || machine.is_announced()).watch_every(Duration::from_millis(20));
    }
    let (folder, logs) = (Path::new(&folder).join("checkpoints"), Path::new(&folder).join("logs"));
    let fit = Fit::epochs(1_000_000).callback(BackupAndRestore::new(folder)).callback(Profile::new(logs, 1..=2));
    let fit = fit.callback(Says).stop_on(config);
    let error = trainer.fit(&data.batch(8), fit).unwrap_err();
    println!("{error}");
    std::process::exit(error.class().exit_code().into());
}

/// A metadata server on a free port of this machine.
struct MetadataServer {
    address: SocketAddr,
    announced: Arc<AtomicBool>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MetadataServer {
    fn start() -> MetadataServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (announced, is_over) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (event, end) = (Arc::clone(&announced), Arc::clone(&is_over));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if end.load(Ordering::Relaxed) {
                    return;
                }
                // A worker that ends breaks its connection.
                let _ = answer(&stream.unwrap(), event.load(Ordering::Relaxed));
            }
        });
        MetadataServer { address, announced, is_over, thread: Some(thread) }
    }
}

impl Drop for MetadataServer {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if TcpStream::connect(self.address).is_ok() {
            self.thread.take().map(JoinHandle::join);
        }
    }
}

fn answer(mut stream: &TcpStream, announced: bool) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let mut is_asked_as_google_does = false;
    for line in lines {
        let line = line?.to_lowercase();
        is_asked_as_google_does |= line == "metadata-flavor: google";
        if line.is_empty() {
            break;
        }
    }
    let value = match first.split(' ').nth(1) {
        Some("/computeMetadata/v1/instance/maintenance-event") if announced => "TERMINATE_ON_HOST_MAINTENANCE",
        Some("/computeMetadata/v1/instance/maintenance-event") => "NONE",
        _ => "FALSE",
    };
    let status = if is_asked_as_google_does { "200 OK" } else { "403 Forbidden" };
    let length = value.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nmetadata-flavor: Google\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{value}"
    )
}

/// Trains on two workers until the machine of the second one is to be maintained.
fn trained(folder: &Path) -> Vec<Outcome> {
    let metadata = MetadataServer::start();
    let port = Ports::reserve(1).unwrap().release()[0].to_string();
    let host = metadata.address.to_string();
    let task = move |rank: u32| {
        let mut variables = vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", "2".to_owned()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("DISTRIBUTE_PORT", port.clone()),
        ];
        if rank == 1 {
            variables.push(("GCE_METADATA_HOST", host.clone()));
        }
        variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    };
    let worker = Job::builder(std::env::current_exe().unwrap())
        .args(["preemption::preemption_worker", "--exact", "--ignored", "--nocapture"])
        .tasks(2)
        .task_env(task)
        .env("MASTER_PORT", "1")
        .env(ROLE, folder.to_str().unwrap());
    let mut job = worker.start().unwrap();
    for rank in 0..2 {
        job.wait_for_line(rank, "training", DEADLINE).unwrap();
    }
    metadata.announced.store(true, Ordering::Relaxed);
    job.wait_all(DEADLINE).unwrap()
}

#[test]
fn a_maintenance_event_of_one_machine_stops_all_workers_after_the_same_step() {
    let folder = tempfile::tempdir().unwrap();
    let outcomes = trained(folder.path());
    let step = CheckpointManager::new(folder.path().join("checkpoints")).list().unwrap()[0].0;
    for outcome in outcomes {
        assert_eq!(outcome.code, Some(143), "{outcome:?}");
        assert!(outcome.stdout.contains(&format!("saved after step {step}\n")), "{outcome:?}");
        assert!(outcome.stdout.contains(&format!("stopped after step {step}, which is saved")), "{outcome:?}");
    }
    // Unlike other callbacks, this one writes on every worker.
    for worker in 0..2 {
        let path = format!("logs/plugins/profile/steps_1_to_2/worker_{worker}.xplane.pb");
        assert!(std::fs::metadata(folder.path().join(&path)).unwrap().len() > 100, "{path}");
    }
}
