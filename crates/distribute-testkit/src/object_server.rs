//! A server that speaks S3's protocol, and a relay in front of it that cuts and delays connections.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::{Error, Job, Outcome, Ports, show_skips, skipped};

/// A relay to an S3 server, for as long as the body of [`with_object_server`] runs.
#[derive(Debug)]
pub struct Relay {
    faults: Arc<Mutex<Faults>>,
}

/// A fault that a [`Relay`] adds to connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RelayFault {
    /// It passes them on.
    #[default]
    None,
    /// It cuts a connection when this many bytes have been sent to the server, this many times.
    CutRequests {
        /// The bytes between two cuts, over all connections.
        after_bytes: u64,
        /// The number of cuts.
        times: usize,
    },
    /// It cuts a connection when this many bytes were sent by the server, this many times.
    CutAnswers {
        /// The bytes between two cuts, over all connections.
        after_bytes: u64,
        /// The number of cuts.
        times: usize,
    },
    /// It waits before it passes on each piece of up to 64 KiB.
    Slow(Duration),
}

#[derive(Debug, Default)]
struct Faults {
    fault: RelayFault,
    /// The bytes since the last cut.
    bytes: u64,
    cuts: usize,
    /// All bytes sent to the server so far.
    sent: u64,
}

impl Relay {
    /// Sets what happens from now on.
    pub fn set(&self, fault: RelayFault) {
        let mut faults = self.faults.lock();
        (faults.fault, faults.bytes, faults.cuts) = (fault, 0, 0);
    }

    /// Returns the number of connections cut since the last [`set`](Relay::set).
    #[must_use]
    pub fn cuts(&self) -> usize {
        self.faults.lock().cuts
    }

    /// Returns the number of bytes that were sent to the server.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.faults.lock().sent
    }

    /// Starts to pass on connections from a port to another one; the threads last as long as the process.
    fn start(port: u16, server: u16) -> io::Result<Relay> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        let faults = Arc::new(Mutex::new(Faults::default()));
        let shared = Arc::clone(&faults);
        thread::Builder::new().name("relay".to_owned()).spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(upstream) = TcpStream::connect((Ipv4Addr::LOCALHOST, server)) else { continue };
                for (is_request, from, to) in [(true, &client, &upstream), (false, &upstream, &client)] {
                    let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { continue };
                    let faults = Arc::clone(&shared);
                    thread::spawn(move || pass(&from, &to, is_request, &faults));
                }
            }
        })?;
        Ok(Relay { faults })
    }
}

/// Passes bytes on until the end of one side, or a cut.
fn pass(mut from: &TcpStream, mut to: &TcpStream, is_request: bool, faults: &Mutex<Faults>) {
    let mut piece = [0; 1 << 16];
    while let Ok(got @ 1..) = from.read(&mut piece) {
        let (mut passed, mut pause) = (got, Duration::ZERO);
        {
            let mut faults = faults.lock();
            let cut = match faults.fault {
                RelayFault::CutRequests { after_bytes, times } if is_request => Some((after_bytes, times)),
                RelayFault::CutAnswers { after_bytes, times } if !is_request => Some((after_bytes, times)),
                RelayFault::Slow(each) => {
                    pause = each;
                    None
                }
                _ => None,
            };
            if let Some((after_bytes, times)) = cut.filter(|(_, times)| faults.cuts < *times) {
                let left = after_bytes.saturating_sub(faults.bytes);
                faults.bytes += got as u64;
                if got as u64 >= left {
                    passed = usize::try_from(left).unwrap_or(got);
                    (faults.bytes, faults.cuts) = (0, faults.cuts + 1);
                    debug_assert!(faults.cuts <= times);
                }
            }
            faults.sent += if is_request { passed as u64 } else { 0 };
        }
        thread::sleep(pause);
        let is_passed = to.write_all(&piece[..passed]).is_ok();
        if !is_passed || passed < got {
            drop((from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both)));
            return;
        }
    }
    drop(to.shutdown(Shutdown::Write));
}

/// Runs `body` with the environment of an S3 server of its own, in a process of its own: the test program is started
/// again with only this test, whose variables (`AWS_ENDPOINT_URL`, credentials) lead to the server over a [`Relay`].
/// The server has an empty bucket `bucket`. Call it first in a test; it returns when the body has ended.
///
/// If moto's server is not installed, the test is [skipped], which names how to install it.
///
/// # Panics
/// If the body panics or takes longer than `limit`, and if the thread does not have the full name of a test, as those
/// of Rust's own harness have.
pub fn with_object_server(limit: Duration, body: impl FnOnce(&Relay)) {
    if let Ok(ports) = std::env::var(INSIDE) {
        let numbers = ports.split_once(' ').and_then(|(one, other)| Some((one.parse().ok()?, other.parse().ok()?)));
        let Some((port, server)) = numbers else { panic!("{INSIDE} is {ports:?}") };
        match Relay::start(port, server) {
            Ok(relay) => body(&relay),
            Err(error) => panic!("no relay on port {port}: {error}"),
        }
        return;
    }
    let Some(server) = Server::start() else {
        return skipped("no S3 server is installed (pip install 'moto[server]')");
    };
    let test = thread::current().name().unwrap_or_default().to_owned();
    if let Err(problem) = run_again(&test, server.port, limit) {
        panic!("{test}, with the S3 server: {problem}");
    }
}

/// Starts the test program again with one test, and waits until that has passed.
fn run_again(test: &str, server: u16, limit: Duration) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let port = Ports::reserve(1).map_err(text)?.release()[0];
    let program = std::env::current_exe().map_err(|error| text(Error::OwnPath(error)))?;
    let mut job = Job::builder(program).args(["--exact", test, "--nocapture"]).env(INSIDE, format!("{port} {server}"));
    for (name, value) in variables(port) {
        job = job.env(name, value);
    }
    let outcome = job.start().map_err(text)?.wait(0, limit).map_err(text)?;
    if !outcome.passed() {
        let Outcome { code, signal, stdout, stderr, .. } = outcome;
        return Err(format!("it has not passed, with exit code {code:?} and signal {signal:?}:\n{stdout}{stderr}"));
    }
    show_skips(&outcome.stdout);
    show_skips(&outcome.stderr);
    Ok(())
}

/// The variables by which programs find the server.
fn variables(port: u16) -> [(&'static str, String); 6] {
    [
        ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
        ("AWS_ALLOW_HTTP", "true".to_owned()),
        ("AWS_ACCESS_KEY_ID", "test".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "test-secret".to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
        ("DISTRIBUTE_STORAGE_RETRY", "5".to_owned()),
    ]
}

/// Set in the process in which the body runs: the relay's port and the server's.
const INSIDE: &str = "DISTRIBUTE_TESTKIT_OBJECT_SERVER";

/// A process that is killed when it is dropped.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// moto's server, with a bucket.
struct Server {
    _process: Guard,
    port: u16,
}

impl Server {
    /// Starts the server; `None` if it is not installed.
    fn start() -> Option<Server> {
        let port = Ports::reserve(1).ok()?.release()[0];
        let mut command = Command::new("moto_server");
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        let process = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut process = Guard(process.ok()?);
        let until = Instant::now() + Duration::from_secs(60);
        while Instant::now() < until {
            if process.0.try_wait().is_ok_and(|ended| ended.is_some()) {
                return None;
            }
            if create_bucket(port).unwrap_or(false) {
                return Some(Server { _process: process, port });
            }
            thread::sleep(Duration::from_millis(50));
        }
        panic!("moto_server does not answer within 60 s");
    }
}

/// Creates the bucket; returns whether the server has done so.
fn create_bucket(port: u16) -> io::Result<bool> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let request = "PUT /bucket HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\
                   Authorization: AWS4-HMAC-SHA256 Credential=test/20300101/us-east-1/s3/aws4_request, \
                   SignedHeaders=host, Signature=0\r\n\r\n";
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer.split_whitespace().nth(1) == Some("200"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_the_program_does_not_have_has_not_passed() {
        let problem = run_again("object_server::tests::no_such_test", 1, Duration::from_secs(60)).unwrap_err();
        assert!(problem.contains("0 passed"), "{problem}");
    }
}
