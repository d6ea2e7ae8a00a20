//! A gRPC call that is written by hand, as any program could.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::text;

/// Calls Attend as session 77 of a job, or of none. Expects that the call is refused at once: an accepted call is
/// answered for as long as the session lasts.
pub(super) fn attend(address: &str, service: &str, task: &str, job: &str) -> Result<(), String> {
    let mut stream = TcpStream::connect(address).map_err(|error| format!("no stranger reaches {address}: {error}"))?;
    stream.set_read_timeout(Some(SOON)).map_err(text)?;
    stream.write_all(&request(&format!("/distribute.v1.{service}/Attend"), task, job)).map_err(text)?;
    // Frames: 3 bytes of length, kind, flags, 4 bytes of stream.
    let mut header = [0; 9];
    loop {
        let no_answer = |error| format!("{task} does not answer a call of Attend within {SOON:?}: {error}");
        stream.read_exact(&mut header).map_err(no_answer)?;
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload).map_err(no_answer)?;
        match (header[3], header[4] & END_OF_STREAM) {
            (HEADERS, END_OF_STREAM) => return Ok(()),
            (HEADERS, _) => return Err(format!("{task} accepts the attendance of a stranger (job {job:?})")),
            (RESET | GO_AWAY, _) => {
                return Err(format!("{task} does not understand the call: frame {header:?} {payload:?}"));
            }
            _ => {}
        }
    }
}

fn request(path: &str, task: &str, job: &str) -> Vec<u8> {
    let mut headers = Vec::new();
    let all = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "stranger"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("distribute-version", "2"),
        ("distribute-task", task),
        ("distribute-session", "77"),
        ("distribute-job", job),
    ];
    for (name, value) in all.into_iter().filter(|(_, value)| !value.is_empty()) {
        // A name and a value without compression, each after its length, which is one byte below 127.
        headers.push(0);
        for text in [name, value] {
            headers.push(text.len() as u8);
            headers.extend_from_slice(text.as_bytes());
        }
    }
    // Session 77, replicas, an order, an address.
    let message = b"\x08\x4d\x20\x01\x28\x09\x32\x0b127.0.0.1:9";
    let body = [&[0, 0, 0, 0, message.len() as u8][..], message].concat();
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
    };
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    [&preface[..], &frame(4, 0, 0, &[]), &frame(HEADERS, 4, 1, &headers), &frame(0, 0, 1, &body)].concat()
}

const HEADERS: u8 = 1;
const RESET: u8 = 3;
const GO_AWAY: u8 = 7;
const END_OF_STREAM: u8 = 1;

const SOON: Duration = Duration::from_secs(5);
