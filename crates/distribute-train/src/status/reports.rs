//! Reception of the tasks' reports: one JSON message per line over TCP.

use std::io;
use std::net::TcpListener;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::{Board, server};
use crate::progress::Message;

/// Takes the reports of all tasks.
pub(super) async fn collect(listener: TcpListener, board: Board) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let next = async || listener.accept().await.map(|(stream, _)| stream);
    server::accept(next, move |stream| read(stream, board.clone()), CONNECTIONS).await
}

/// Passes on the board's questions to a task, which answers each with a report.
async fn ask(mut task: OwnedWriteHalf, mut asked: watch::Receiver<u64>) {
    while asked.changed().await.is_ok() {
        match timeout(QUESTION, task.write_all(b"?\n")).await {
            Ok(Ok(())) => {}
            _ => return,
        }
    }
}

/// Reads a task's reports until it ends, falls silent, or sends something else.
async fn read(stream: TcpStream, board: Board) {
    let (stream, task) = stream.into_split();
    // Ends with this function.
    let mut asking = JoinSet::new();
    asking.spawn(ask(task, board.asked()));
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut limited = (&mut stream).take(LONGEST);
        match timeout(SILENCE, limited.read_until(b'\n', &mut line)).await {
            Ok(Ok(_)) if line.ends_with(b"\n") => {}
            // The end, a line that is too long, a lost connection, or silence; the task connects again if it lives.
            _ => return,
        }
        match serde_json::from_slice::<Message>(&line) {
            Ok(message) => board.update(|job, now| job.receive(&message, now)),
            Err(error) => {
                tracing::debug!("a report of a task is not understood, and its connection is closed: {error}");
                return;
            }
        }
    }
}

/// Tasks report every second.
const SILENCE: Duration = Duration::from_secs(30);

/// Time limit of a question; a task that does not read any is asked no more.
const QUESTION: Duration = Duration::from_secs(1);

/// Length limit of a report, in bytes.
const LONGEST: u64 = 256 * 1024;

/// Maximum number of connections; each task has one.
const CONNECTIONS: usize = 8192;
