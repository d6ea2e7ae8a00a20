//! The status page of three processes that no launcher starts. The workers are this test program, in another role.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use distribute_collectives::ReduceOp;
use distribute_strategy::{Error, MultiWorkerMirroredStrategy};
use distribute_testkit::{Job, JobBuilder, Ports};
use distribute_train::callbacks::StatusPage;
use distribute_train::progress::{Form, Options, Progress};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(60);

/// The variable by which this program is a worker; its value is the file whose existence ends the training.
const ROLE: &str = "DISTRIBUTE_TEST_STATUS_WORKER";

/// Trains with others until a file exists. Rank 1 computes longer than they do.
#[test]
#[ignore = "a process that other tests start"]
fn worker() {
    let Some(end) = std::env::var_os(ROLE) else { return };
    let strategy = MultiWorkerMirroredStrategy::builder().devices(["CPU:0"]).build().unwrap();
    let rank = strategy.topology().worker();
    let title = format!("toy · {} · <b>no HTML</b>", strategy.describe());
    let options = Options { title, epochs: 2, steps_per_epoch: Some(400), ..Options::of(&strategy) };
    let mut progress = Progress::new(options, Form::Off).unwrap();
    // Under the launcher, which has a page of its own, there is none.
    if std::env::var_os("DISTRIBUTE_STATUS_ADDR").is_none() {
        let page = StatusPage::serve("127.0.0.1:0").unwrap();
        if rank == 0 {
            println!("page at {}", page.address());
        }
        progress = progress.with_status(page, &strategy).unwrap();
    }
    let own = Duration::from_millis([20, 34, 22][rank]);
    let begun = Instant::now();
    for step in 0.. {
        if step % 400 == 0 {
            progress.epoch(1 + step / 400);
        }
        assert!(begun.elapsed() < 2 * DEADLINE, "the file {end:?} does not appear");
        let ends = rank == 0 && Path::new(&end).exists();
        let sums = strategy.run_with((), |context, ()| {
            std::thread::sleep(own);
            let mut gradients = vec![0.5f32; 1 << 17];
            gradients[0] = f32::from(u8::from(ends));
            context.group().all_reduce(&mut gradients, ReduceOp::Sum)?;
            Ok::<_, Error>(gradients[0])
        });
        let loss = 2.5 * f64::from(-0.002 * step as f32).exp();
        progress.step(u64::from(step % 400) + 1, 96, &[("loss", loss), ("accuracy", 1.0 - loss / 2.6)]);
        if sums.unwrap().values()[0] > 0.0 {
            break;
        }
    }
}

fn job(end: &Path) -> JobBuilder {
    let port = Ports::reserve(1).unwrap().release()[0];
    let place = move |rank: u32| {
        let port = ("DISTRIBUTE_PORT", port.to_string());
        [("RANK", rank.to_string()), ("WORLD_SIZE", "3".into()), ("MASTER_ADDR", "127.0.0.1".into()), port]
            .map(|(name, value)| (name.to_owned(), value))
            .to_vec()
    };
    let job = Job::of_test("status::worker").unwrap();
    job.tasks(3).task_env(place).env(ROLE, end.to_str().unwrap()).env("MASTER_PORT", "1")
}

/// Returns the state of the job.
fn view(address: &str) -> Value {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    write!(stream, "GET /status.json HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

#[test]
fn the_chief_shows_all_workers_and_names_the_slow_one() {
    let folder = tempfile::tempdir().unwrap();
    let end = folder.path().join("end");
    let mut job = job(&end).start().unwrap();
    let line = job.wait_for_line(0, "page at ", DEADLINE).unwrap();
    let address = line.split_once("page at ").unwrap().1.trim().to_owned();
    let deadline = Instant::now() + DEADLINE;
    let view = loop {
        let view = view(&address);
        let tasks = view["tasks"].as_array().unwrap();
        if tasks.iter().all(|task| task["steps"].as_u64() > Some(10)) {
            break view;
        }
        assert!(Instant::now() < deadline, "{view:#}");
        std::thread::sleep(Duration::from_millis(100));
    };
    assert_eq!(view["stragglers"], serde_json::json!(["worker:1"]), "{view:#}");
    assert!(view["job"]["title"].as_str().unwrap().starts_with("toy · MultiWorkerMirrored 3 workers"), "{view:#}");
    assert!(view["job"]["step"].as_u64() > Some(0) && view["job"]["metrics"][0]["name"] == "loss", "{view:#}");
    let seconds = |rank: usize, name: &str| view["tasks"][rank][name].as_f64().unwrap();
    for rank in 0..3 {
        // All workers make a step in the same time, whatever each computes.
        let (step_s, own_s) = (view["tasks"][rank]["step_s"]["p50"].as_f64().unwrap(), seconds(rank, "own_s"));
        assert!(step_s >= 0.034 && own_s >= 0.02, "{view:#}");
        assert_eq!(view["tasks"][rank]["state"], "training", "{view:#}");
    }
    assert!(seconds(1, "own_s") >= 0.034 && seconds(0, "own_s") < seconds(1, "own_s"), "{view:#}");
    assert!(seconds(0, "peer_wait_s") > 0.004 && seconds(1, "peer_wait_s") < 0.004, "{view:#}");
    std::fs::write(&end, "").unwrap();
    for outcome in job.wait_all(DEADLINE).unwrap() {
        assert!(outcome.success(), "{outcome:?}");
    }
    assert!(TcpStream::connect(&address).is_err(), "the page ends with the training");
}
