//! A socket on which a job answers its own user only.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::Deserialize;

use super::server::{self, CONNECTIONS, Routes};
use super::{Board, View};
use crate::{Error, Result};

/// A Unix socket on which a job answers processes of its own user and of the superuser only.
///
/// | path | answer |
/// |---|---|
/// | `/status.json` | the [`View`], for which the tasks are asked for a report at once |
/// | `/stacks?task=worker:1` | the stacks of a task's threads as text; a refusal is a sentence |
///
/// The file is removed when it is dropped.
///
/// # Examples
/// ```
/// use distribute_train::status::{Board, Collector, Job, Place, Private};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("job.sock");
/// let private = Private::bind(&path, |task| Err(format!("{task} has no process")))?;
/// let mut job = Job::new("mnist");
/// job.expect("worker:0");
/// let _collector = Collector::start("127.0.0.1:0", Some(private), &Board::new(job))?;
/// let answer = Place::Socket(path).fetch("/status.json", std::time::Duration::from_secs(5))?;
/// assert!(answer.starts_with(b"{\"job\":{\"name\":\"mnist\""));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Private {
    path: PathBuf,
    listener: UnixListener,
    stacks: Stacks,
}

/// Returns the stacks of a task's threads, or says why not. It may block for seconds.
type Stacks = Arc<dyn Fn(&str) -> std::result::Result<String, String> + Send + Sync>;

impl Private {
    /// Creates the socket, with mode 0600. The folder should be one that only its owner can enter, since a socket is
    /// there for a moment before its mode is set.
    ///
    /// `stacks` returns the stacks of a task, or a sentence that says why there are none. It may block for seconds.
    ///
    /// # Errors
    /// [`Error::Listen`] if the socket cannot be created.
    pub fn bind(
        path: &Path,
        stacks: impl Fn(&str) -> std::result::Result<String, String> + Send + Sync + 'static,
    ) -> Result<Private> {
        let bound = || {
            let listener = UnixListener::bind(path)?;
            fs::set_permissions(path, Permissions::from_mode(0o600))?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        let failed = |source| Error::Listen { address: path.display().to_string(), source };
        Ok(Private { path: path.to_owned(), listener: bound().map_err(failed)?, stacks: Arc::new(stacks) })
    }

    /// Answers until the future is dropped.
    pub(super) async fn serve(self, board: &Board) -> io::Result<()> {
        let listener = tokio::net::UnixListener::from_std(self.listener.try_clone()?)?;
        let state = Answers { board: board.clone(), stacks: Arc::clone(&self.stacks) };
        let routes = Routes::new().route("/status.json", get(status)).route("/stacks", get(stacks)).with_state(state);
        let routes = server::guarded(routes, true);
        let own = rustix::process::geteuid().as_raw();
        let next = async || {
            loop {
                let (stream, _) = listener.accept().await?;
                // The file's mode says the same; this holds even where it was changed.
                if stream.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0) {
                    return Ok(stream);
                }
            }
        };
        server::accept(next, move |stream| server::respond(stream, routes.clone()), CONNECTIONS).await
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // Another process may have removed it, with all else that is old in the folder.
        let _ = fs::remove_file(&self.path);
    }
}

impl std::fmt::Debug for Private {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Private").field("path", &self.path).finish_non_exhaustive()
    }
}

#[derive(Clone)]
struct Answers {
    board: Board,
    stacks: Stacks,
}

/// Asks the tasks, and returns the state once all have answered, or have had time to.
async fn status(State(answers): State<Answers>) -> Json<View> {
    let board = answers.board;
    let asked = board.ask();
    let begun = tokio::time::Instant::now();
    while !board.has_heard_since(asked) && begun.elapsed() < ANSWERS {
        tokio::time::sleep(LOOK).await;
    }
    Json(board.view())
}

#[derive(Deserialize)]
struct Asked {
    task: String,
}

async fn stacks(State(answers): State<Answers>, Query(Asked { task }): Query<Asked>) -> Response {
    match tokio::task::spawn_blocking(move || (answers.stacks)(&task)).await {
        Ok(Ok(text)) => text.into_response(),
        Ok(Err(refusal)) => (StatusCode::CONFLICT, refusal).into_response(),
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, "the stacks could not be read").into_response(),
    }
}

/// How long tasks have to report; one that is stopped or on a slow network does not.
const ANSWERS: Duration = Duration::from_millis(500);

const LOOK: Duration = Duration::from_millis(10);
