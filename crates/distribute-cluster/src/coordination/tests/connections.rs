use distribute_types::ErrorClass;
use std::io::{Read, Write};
use std::net::TcpStream;

use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::{Connection, Incoming};

/// Encodes a message as it is sent, after the preamble.
fn framed(kind: wire::member_message::Kind) -> Vec<u8> {
    let message = wire::MemberMessage { kind: Some(kind) }.encode_to_vec();
    [&b"distcoor"[..], &(message.len() as u32).to_be_bytes(), &message].concat()
}

/// Returns how rank 1 of two joins.
fn second_of_two(job: JobId, process: u64) -> Vec<u8> {
    let (id, name) = (Vec::from(job.to_bytes()).into(), job.to_string());
    framed(wire::member_message::Kind::Join(wire::Join {
        version: roster::VERSION,
        rank: 1,
        process,
        world_size: 2,
        job: Some(wire::Job { id, name, derived: job.is_derived(), ..wire::Job::default() }),
        tasks_digest: Vec::from(roster::digest(&[0, 1].map(|index| Task::new(TaskType::Worker, index)))).into(),
        heartbeat_interval_us: roster::micros(options().heartbeat_interval),
        heartbeat_timeout_us: roster::micros(options().heartbeat_timeout),
        ..wire::Join::default()
    }))
}

#[test]
fn a_connection_that_is_answered_after_it_was_given_up_is_no_member() {
    let (listener, address) = listener();
    let [first, second] = [0, 1].map(|rank| Membership::new(rank, 2, address.clone()).unwrap());
    let job_id = first.job_id();
    let (tell, told) = mpsc::channel();
    let progress: Arc<Progress> =
        Arc::new(move |waiting: &Waiting| tell.send(waiting.missing_count).unwrap_or_default());
    let options = CoordinationOptions { progress_interval: Duration::from_millis(20), ..options() };
    let leading = CoordinationOptions { listener: Some(listener), progress: Some(progress), ..options.clone() };
    let leader = thread::spawn(move || Coordination::start(&first, leading));
    while told.recv_timeout(SOON).unwrap() > 1 {}
    // A leader that has no descriptors free reads it later, and by then its member comes by another one.
    let mut given_up = connected(address.parse().unwrap());
    given_up.write_all(&second_of_two(job_id, 7)).unwrap();
    drop(given_up);
    let member = Coordination::start(&second, options).unwrap();
    let job = [leader.join().unwrap().unwrap(), member];
    assert!(each(&job, |member| member.barrier("all", SOON)).iter().all(Result::is_ok));
}

#[test]
fn strangers_are_not_answered() {
    use wire::member_message::Kind;
    let job = job(2, &options());
    job[0].put("endpoint", b"here").unwrap();
    let address: std::net::SocketAddr = job[0].membership().leader_address.parse().unwrap();
    let put = wire::PutRequest { key: "endpoint".to_owned(), value: b"there".to_vec().into() };
    let put = Kind::Call(wire::Call { id: 1, request: Some(wire::call::Request::Put(put)) });
    for bytes in [
        framed(put.clone()),
        framed(Kind::Heartbeat(wire::Heartbeat {})),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        b"distcoor\xff\xff\xff\xff".to_vec(),
    ] {
        let (mut stranger, mut answer) = (connected(address), Vec::new());
        stranger.write_all(&bytes).unwrap();
        // Bytes that were not read reset the connection.
        let ended = stranger.read_to_end(&mut answer).is_ok_and(|bytes| bytes == 0);
        assert!(ended || answer.is_empty(), "{answer:?}");
    }
    // Members of other jobs, and other processes, are told so, and their calls are not read.
    for (join, words) in [
        (second_of_two(JobId::new("theirs").unwrap(), 1), "it belongs to job theirs, but worker:0 leads job derived-"),
        (second_of_two(job[0].job_id(), 1), "two processes say that they are worker:1"),
    ] {
        let (mut stranger, mut answer) = (connected(address), Vec::new());
        stranger.write_all(&[join, framed(put.clone())[8..].to_vec()].concat()).unwrap();
        stranger.shutdown(std::net::Shutdown::Write).unwrap();
        stranger.read_to_end(&mut answer).unwrap();
        assert!(String::from_utf8_lossy(&answer).contains(words), "{answer:?}");
    }
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
            while let Ok(accepted) = tokio::time::timeout(SOON, incoming.accept()).await {
                tokio::spawn(echo(accepted));
            }
        });
    });
    address
}

async fn echo(mut connection: Connection) {
    let acquaintance = connection.acquaintance();
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
