//! A caller that writes the protocol by hand, to send messages that no build would send.

use std::convert::Infallible;
use std::future::poll_fn;
use std::time::Duration;

use bytes::Bytes;
use distribute_cluster::JobId;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tower_service::Service as _;

use super::SOON;

/// A connection, and the headers of its calls.
pub(crate) struct Caller {
    channel: Channel,
    pub(crate) headers: Vec<(&'static str, String)>,
}

/// A call whose body is still open.
pub(crate) struct Open {
    sender: mpsc::Sender<Result<Frame<Bytes>, Infallible>>,
    body: Option<Body>,
}

/// The fields of a message.
#[derive(Clone, Default)]
pub(crate) struct Fields(Vec<u8>);

impl Fields {
    pub(crate) fn number(mut self, field: u32, value: u64) -> Fields {
        varint(&mut self.0, u64::from(field) << 3);
        varint(&mut self.0, value);
        self
    }

    pub(crate) fn bytes(mut self, field: u32, bytes: impl AsRef<[u8]>) -> Fields {
        varint(&mut self.0, u64::from(field) << 3 | 2);
        varint(&mut self.0, bytes.as_ref().len() as u64);
        self.0.extend_from_slice(bytes.as_ref());
        self
    }

    pub(crate) fn inside(self, field: u32, fields: Fields) -> Fields {
        self.bytes(field, fields.0)
    }

    /// Returns the encoded message.
    pub(crate) fn message(&self) -> Vec<u8> {
        let mut bytes = vec![0];
        bytes.extend_from_slice(&(self.0.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&self.0);
        bytes
    }
}

fn varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// The header that names the job of a call.
pub(crate) fn job(id: &JobId) -> String {
    let digest: String = id.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{digest} {id}")
}

impl Caller {
    /// Connects to an address with the headers of a job's task.
    pub(crate) fn new(address: &str, task: &str, id: &JobId, session: u64) -> Caller {
        let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect_lazy();
        let headers = vec![
            ("distribute-version", "4".to_owned()),
            ("distribute-job", job(id)),
            ("distribute-task", task.to_owned()),
            ("distribute-session", session.to_string()),
        ];
        Caller { channel, headers }
    }

    /// Sets another value of a header; an empty one removes it.
    pub(crate) fn with(&self, name: &'static str, value: &str) -> Caller {
        let others = self.headers.iter().filter(|(known, _)| *known != name).cloned();
        let new = (!value.is_empty()).then(|| (name, value.to_owned()));
        Caller { channel: self.channel.clone(), headers: others.chain(new).collect() }
    }

    /// Sends bytes as the body of a call, and waits for its end; returns the messages of the answer, without their
    /// prefixes.
    pub(crate) async fn call(&self, path: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, Status> {
        let body = self.open(bytes).body.unwrap();
        self.answer(path, body).await
    }

    /// Sends bytes as the beginning of the body of a call, which stays open.
    pub(crate) fn open(&self, bytes: Vec<u8>) -> Open {
        let (sender, frames) = mpsc::channel(64);
        // In several chunks, since one could exceed a frame.
        for piece in bytes.chunks(1 << 20) {
            sender.try_send(Ok(Frame::data(Bytes::copy_from_slice(piece)))).unwrap();
        }
        Open { sender, body: Some(Body::new(StreamBody::new(ReceiverStream::new(frames)))) }
    }

    /// Returns the answer to a call that stays open, up to its end.
    pub(crate) async fn answer_to(&self, path: &str, open: &mut Open) -> Result<Vec<Vec<u8>>, Status> {
        self.answer(path, open.body.take().unwrap()).await
    }

    async fn answer(&self, path: &str, body: Body) -> Result<Vec<Vec<u8>>, Status> {
        let mut request = http::Request::post(format!("/distribute.v1.{path}"))
            .version(http::Version::HTTP_2)
            .header("te", "trailers")
            .header("content-type", "application/grpc");
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        let request = request.body(body).unwrap();
        let answered = async {
            let mut channel = self.channel.clone();
            let gone = |error: tonic::transport::Error| Status::unavailable(error.to_string());
            poll_fn(|context| channel.poll_ready(context)).await.map_err(gone)?;
            let reply = channel.call(request).await.map_err(gone)?;
            if let Some(status) = Status::from_header_map(reply.headers()).filter(|status| status.code() != Code::Ok) {
                return Err(status);
            }
            let collected = reply.into_body().collect().await?;
            if let Some(status) = collected.trailers().and_then(Status::from_header_map)
                && status.code() != Code::Ok
            {
                return Err(status);
            }
            let bytes = collected.to_bytes();
            let (mut rest, mut messages) = (&bytes[..], Vec::new());
            while let Some((prefix, behind)) = rest.split_first_chunk::<5>() {
                let len = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
                messages.push(behind[..len].to_vec());
                rest = &behind[len..];
            }
            Ok(messages)
        };
        tokio::time::timeout(SOON, answered).await.unwrap_or_else(|_| panic!("{path} was not answered"))
    }
}

impl Open {
    pub(crate) async fn send(&self, bytes: Vec<u8>) -> bool {
        self.sender.send(Ok(Frame::data(bytes.into()))).await.is_ok()
    }
}

/// Waits until the other side has closed a connection on which only these bytes were sent.
pub(crate) async fn closed_after(address: &str, bytes: &[u8]) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let closed = async { while stream.read(&mut [0; 1024]).await.is_ok_and(|len| len > 0) {} };
    let limit = Duration::from_secs(30);
    tokio::time::timeout(limit, closed).await.unwrap_or_else(|_| panic!("still open after {bytes:?}"));
}
