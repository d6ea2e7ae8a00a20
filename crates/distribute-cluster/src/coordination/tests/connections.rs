use distribute_types::ErrorClass;
use std::io::{Read, Write};
use std::net::TcpStream;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt;
use tonic::Code;

use super::*;

#[test]
fn strangers_are_not_answered() {
    use wire::coordination_client::CoordinationClient;
    let job = job(2, &options());
    job[0].put("endpoint", b"here").unwrap();
    let address = format!("http://{}", job[0].membership().leader_address);
    let id = |job: JobId| wire::Job { id: Vec::from(job.to_bytes()).into(), name: job.to_string(), derived: false };
    let (ours, theirs) = (id(job[0].job_id()), id(JobId::new("theirs").unwrap()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = CoordinationClient::new(channel(address).await);
        let guessed = |job| Some(wire::Caller { job: Some(job), rank: 1, session: vec![7; 16].into() });
        for (caller, code, words) in [
            (None, Code::PermissionDenied, "it belongs to job (none), but worker:0 leads job derived-"),
            (guessed(theirs), Code::PermissionDenied, "it belongs to job theirs, but worker:0 leads job derived-"),
            (guessed(ours), Code::FailedPrecondition, "not a member of the leader's job"),
        ] {
            let (key, value) = ("endpoint".to_owned(), b"there".to_vec().into());
            let put =
                client.put(wire::PutRequest { key: key.clone(), value, caller: caller.clone() }).await.unwrap_err();
            let get = wire::GetRequest { key: key.clone(), timeout_ms: 10_000, caller: caller.clone() };
            let get = client.get(get).await.unwrap_err();
            let value = Vec::new().into();
            let exchange = wire::ExchangeRequest { key, value, timeout_ms: 10_000, caller };
            let exchange = client.exchange(exchange).await.unwrap_err();
            for status in [put, get, exchange] {
                assert!(status.code() == code && status.message().contains(words), "{status}");
            }
        }
    });
    assert_eq!(job[1].get("endpoint", SOON).unwrap(), b"here");
}

#[test]
fn what_is_too_large_or_too_much_is_a_sentence() {
    let job = job(2, &options());
    let long = "k".repeat(Coordination::MAX_KEY_BYTES + 1);
    let texts = [
        job[1].put(&long, b"").unwrap_err(),
        job[1].get(&long, SOON).unwrap_err(),
        job[1].barrier(&long, SOON).unwrap_err(),
        job[1].exchange(&long, b"", SOON).unwrap_err(),
    ];
    for error in texts {
        let text = error.to_string();
        assert!(matches!(error, Error::TooLarge { .. }) && text.len() < 400, "{text}");
        assert!(text.contains("the key has 1025 bytes, at most 1024 are allowed"), "{text}");
    }
    // The leader's own limits are reported to a member as such.
    let largest = vec![0; Coordination::MAX_VALUE_BYTES];
    let refused = (0..).find_map(|key: u32| job[1].put(&format!("{key:03}"), &largest).err()).unwrap();
    let text = refused.to_string();
    assert!(matches!(refused, Error::TooLarge { .. }) && !refused.is_retryable(), "{text}");
    assert!(text.contains("worker:1: put \"255\": the job's keys and values would have"), "{text}");
    assert_eq!(job[0].failure(), None);
}

async fn channel(address: String) -> tonic::transport::Channel {
    tonic::transport::Endpoint::from_shared(address).unwrap().connect().await.unwrap()
}

/// Accepts connections on a thread and echoes every byte; a byte `k` identifies its connection.
fn echoes(deadline: Duration, max_unknown: usize) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut incoming =
                Incoming::new(tokio::net::TcpListener::from_std(listener).unwrap(), deadline, max_unknown);
            while let Ok(Some(accepted)) = tokio::time::timeout(SOON, incoming.next()).await {
                tokio::spawn(echo(accepted.unwrap()));
            }
        });
    });
    address
}

async fn echo(mut connection: Connection) {
    use tonic::transport::server::Connected;
    let acquaintance = connection.connect_info();
    let mut byte = [0];
    while connection.read_exact(&mut byte).await.is_ok() {
        if byte == *b"k" {
            acquaintance.known();
        }
        connection.write_all(&byte).await.unwrap();
    }
}

fn connected(address: std::net::SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

fn answers(stream: &mut TcpStream, byte: u8) -> bool {
    let mut answer = [0];
    stream.write_all(&[byte]).is_ok() && stream.read_exact(&mut answer).is_ok() && answer == [byte]
}

/// Returns whether the peer closes the connection in time, whatever it sends before.
fn closes(stream: &mut TcpStream) -> bool {
    match stream.read_to_end(&mut Vec::new()) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn connections_that_do_not_make_themselves_known_are_closed() {
    let address = echoes(Duration::from_millis(300), 8);
    let mut known = connected(address);
    assert!(answers(&mut known, b'k'));
    let (mut silent, mut talks) = (connected(address), connected(address));
    assert!(answers(&mut talks, b'x'));
    assert!(closes(&mut silent) && closes(&mut talks));
    // Its own deadline came before those of the others.
    assert!(answers(&mut known, b'x'));
}

#[test]
fn of_unknown_connections_the_oldest_gives_way() {
    let address = echoes(SOON, 2);
    let mut known = connected(address);
    assert!(answers(&mut known, b'k'));
    let mut unknown = [(); 4].map(|()| {
        let mut stream = connected(address);
        assert!(answers(&mut stream, b'x'));
        stream
    });
    let [first, second, third, fourth] = &mut unknown;
    assert!(closes(first) && closes(second));
    assert!(answers(third, b'x') && answers(fourth, b'x') && answers(&mut known, b'x'));
}

#[test]
fn a_leader_closes_sockets_that_say_nothing_while_its_job_goes_on() {
    let job = job(2, &options());
    let address = &job[0].membership().leader_address;
    // More unidentified connections than are allowed; the first of them is closed at once.
    let mut silent: Vec<TcpStream> = (0..200).map(|_| connected(address.parse().unwrap())).collect();
    assert!(closes(&mut silent[0]));
    assert!(each(&job, |member| member.barrier("b", SOON)).iter().all(Result::is_ok));
}
