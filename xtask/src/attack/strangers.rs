//! Connections of those who belong to no job.

use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use super::stage::{Stage, start};
use super::verdict::{Held, Verdict, all_done, as_accurate, text};

/// Connections that stay open until this is dropped.
pub(super) struct Strangers(Vec<TcpStream>);

impl Strangers {
    /// Connects `count` times and sends the bytes each time, as far as they are taken.
    pub(super) fn send(address: &str, count: usize, bytes: &[u8]) -> Result<Strangers, String> {
        let mut open = Vec::new();
        let to = address.parse().map_err(text)?;
        for _ in 0..count {
            let stream = TcpStream::connect_timeout(&to, Duration::from_secs(3));
            let mut stream = match stream {
                // The system has no room for more of them.
                Err(error) if error.kind() == ErrorKind::TimedOut && !open.is_empty() => break,
                stream => stream.map_err(|error| format!("no stranger reaches {address}: {error}"))?,
            };
            stream.set_write_timeout(Some(Duration::from_millis(200))).map_err(text)?;
            // A peer that is sent garbage may close.
            let _ = stream.write_all(bytes);
            open.push(stream);
        }
        Ok(Strangers(open))
    }

    /// All kinds at one address; every fifth half-closes.
    pub(super) fn all_kinds(address: &str, silent: usize) -> Result<Strangers, String> {
        let mut all = Strangers::send(address, silent, b"")?;
        let zeros = vec![0; 1 << 20];
        let kinds: [(usize, &[u8]); 6] = [
            (20, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
            (5, &zeros),
            (20, HALF_HELLO),
            (20, &HTTP2[..5]),
            (20, HTTP2),
            (20, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
        ];
        for (count, bytes) in kinds {
            all.0.extend(Strangers::send(address, count, bytes)?.0);
        }
        for stream in all.0.iter().step_by(5) {
            // One that was closed already cannot be.
            let _ = stream.shutdown(Shutdown::Write);
        }
        Ok(all)
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }
}

/// The beginning of a TLS handshake of 512 bytes.
const HALF_HELLO: &[u8] = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";

/// The preface of HTTP/2 and empty settings, and nothing more.
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";

pub(super) fn training(stage: &Stage) -> Verdict {
    const ARGS: [&str; 2] = ["--epochs", "12"];
    let expected = stage.undisturbed(&ARGS)?;
    let (tasks, leader) = stage.workers(&[&ARGS[..]; 2])?;
    let mut job = start(tasks)?;
    job.wait_for_line(0, "epoch=1/", stage.left()).map_err(text)?;
    let strangers = Strangers::all_kinds(&leader, 200)?;
    let outcomes = job.wait_all(stage.left()).map_err(text)?;
    all_done(&outcomes)?;
    let accuracy = as_accurate(&outcomes[0].stdout, expected)?;
    Held::yes(format!("{} strangers, accuracy {accuracy:.2} % (undisturbed {expected:.2} %)", strangers.count()))
}

pub(super) fn descriptors(stage: &Stage) -> Verdict {
    const ARGS: [&str; 2] = ["--epochs", "1"];
    let expected = stage.undisturbed(&ARGS)?;
    let (mut tasks, leader) = stage.workers(&[&ARGS[..]; 2])?;
    let second = tasks.split_off(1);
    let mut first = start(tasks.into_iter().map(|task| task.after("ulimit -n 64")).collect())?;
    first.wait_for_line(0, "waiting for", stage.left()).map_err(text)?;
    // As many again as it can have wait for its deadline.
    let strangers = Strangers::send(&leader, 80, b"")?;
    let pid = first.pid(0).map_err(text)?;
    let open = || std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    // Until it has taken what it can.
    let began = Instant::now();
    while open() < 60 {
        if began.elapsed() > Duration::from_secs(3) {
            return Err(format!("the leader has {} files open, where 64 were to be exhausted", open()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let (before, began) = (cpu_time(pid)?, Instant::now());
    std::thread::sleep(Duration::from_secs(2));
    let share = (cpu_time(pid)? - before) / began.elapsed().as_secs_f64();
    if share > MAX_SHARE {
        return Err(format!("without descriptors, the leader works {:.0} % of a core's time", 100.0 * share));
    }
    let mut second = start(second)?;
    let outcomes = [second.wait(0, stage.left()), first.wait(0, stage.left())];
    let [other, chief] = outcomes.map(|outcome| outcome.map_err(text));
    let outcomes = [chief?, other?];
    all_done(&outcomes)?;
    let accuracy = as_accurate(&outcomes[0].stdout, expected)?;
    let count = strangers.count();
    Held::yes(format!(
        "{count} strangers, {:.1} % of a core while none was free, accuracy {accuracy:.2} %",
        100.0 * share
    ))
}

/// A process that tries again 10 times a second takes far less of a core.
const MAX_SHARE: f64 = 0.25;

/// Seconds that a process has worked.
fn cpu_time(pid: u32) -> Result<f64, String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).map_err(text)?;
    // Behind the name, which may hold anything: state is field 3, user and system time are 14 and 15.
    let fields = stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect::<Vec<_>>()).unwrap_or_default();
    let ticks = |field: usize| fields.get(field - 3).and_then(|ticks| ticks.parse::<f64>().ok());
    let ticks = ticks(14).zip(ticks(15)).ok_or_else(|| format!("/proc/{pid}/stat is {stat:?}"))?;
    // Linux counts in hundredths of a second there, whatever it does inside.
    Ok((ticks.0 + ticks.1) / 100.0)
}
