//! Questions to the status server of a running job.

use std::fmt;
use std::io;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::Request;
use axum::http::header::HOST;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use crate::{Error, Result};

/// The place at which a running job answers; displayed as `127.0.0.1:8080`, or as the path of a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// The address of a status page, as `host:port`.
    Address(String),
    /// The path of a job's private socket.
    Socket(PathBuf),
}

impl Place {
    /// Fetches a path, such as `/status.json`, within a time. An answer has at most 64 MiB.
    ///
    /// # Errors
    /// [`Error::NoAnswer`] if nothing answers, or not within the time; [`Error::Refusal`] if the answer is a refusal.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use distribute_train::status::{Board, Job, Place, Server};
    ///
    /// let server = Server::serve("127.0.0.1:0", &Board::new(Job::new("mnist")))?;
    /// let place = Place::Address(server.address().to_string());
    /// let view: serde_json::Value = serde_json::from_slice(&place.fetch("/status.json", Duration::from_secs(5))?)?;
    /// assert_eq!(view["job"]["name"], "mnist");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fetch(&self, path: &str, within: Duration) -> Result<Vec<u8>> {
        let failed = |source| Error::NoAnswer { place: self.to_string(), source };
        // The caller's thread may run an event loop, in which another one cannot.
        let fetched = thread::scope(|scope| {
            let fetch = || self.fetch_on_this_thread(path, within);
            let thread = thread::Builder::new().name("status".to_owned()).spawn_scoped(scope, fetch)?;
            thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that asks has panicked")))
        });
        let (status, body) = fetched.map_err(failed)?;
        if status == 200 {
            return Ok(body);
        }
        let said = String::from_utf8_lossy(&body).trim().to_owned();
        Err(Error::Refusal { place: self.to_string(), status, said })
    }

    /// Ends within the time.
    fn fetch_on_this_thread(&self, path: &str, within: Duration) -> io::Result<(u16, Vec<u8>)> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let fetched = runtime.block_on(async { timeout(within, self.ask(path)).await });
        // A look-up of a name is not waited for.
        runtime.shutdown_background();
        let late = |_| {
            let text = format!("no answer within {} s", within.as_secs_f64());
            io::Error::new(io::ErrorKind::TimedOut, text)
        };
        fetched.map_err(late)?
    }

    async fn ask(&self, path: &str) -> io::Result<(u16, Vec<u8>)> {
        match self {
            Place::Address(address) => {
                let given = address.clone();
                let found = tokio::task::spawn_blocking(move || given.to_socket_addrs().map(Vec::from_iter));
                let found = found.await.map_err(io::Error::other)??;
                let stream = tokio::net::TcpStream::connect(&found[..]).await?;
                exchange(stream, address, path).await
            }
            #[cfg(unix)]
            Place::Socket(socket) => exchange(tokio::net::UnixStream::connect(socket).await?, "localhost", path).await,
            #[cfg(not(unix))]
            Place::Socket(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Address(address) => f.write_str(address),
            Place::Socket(path) => path.display().fmt(f),
        }
    }
}

/// Sends a request and receives its answer.
async fn exchange<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    host: &str,
    path: &str,
) -> io::Result<(u16, Vec<u8>)> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // Ends with the runtime.
    tokio::spawn(connection);
    let request = Request::get(path).header(HOST, host).body(Body::empty()).map_err(io::Error::other)?;
    let answer = sender.send_request(request).await.map_err(io::Error::other)?;
    let status = answer.status().as_u16();
    let body = to_bytes(Body::new(answer.into_body()), LONGEST).await.map_err(io::Error::other)?;
    Ok((status, body.to_vec()))
}

/// Length limit of an answer, in bytes.
const LONGEST: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{Board, Job, Server};

    #[test]
    fn a_job_is_asked_within_an_event_loop() {
        let server = Server::serve("127.0.0.1:0", &Board::new(Job::new("mnist"))).unwrap();
        let place = Place::Address(server.address().to_string());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            assert!(!place.fetch("/status.json", Duration::from_secs(20)).unwrap().is_empty());
            assert!(matches!(place.fetch("/none", Duration::from_secs(20)), Err(Error::Refusal { status: 404, .. })));
            // Connections wait to be accepted.
            let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let place = Place::Address(silent.local_addr().unwrap().to_string());
            let late = place.fetch("/status.json", Duration::from_millis(20)).unwrap_err();
            assert!(
                matches!(&late, Error::NoAnswer { source, .. } if source.kind() == io::ErrorKind::TimedOut),
                "{late}"
            );
        });
    }
}
