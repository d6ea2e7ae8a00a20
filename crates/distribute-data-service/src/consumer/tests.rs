//! Data workers that do what none should.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use distribute_cluster::grpc::reply_of;
use distribute_cluster::{JobId, JobSecret};
use distribute_input::{Array, Dataset};
use tonic::Status;
use tonic::body::Body;

use crate::transfer::encode;
use crate::wire::proto::{Chunk, Registered, Registration, ServedDataset, Setting};
use crate::wire::{Identity, Inbox, Link, Methods, dispatcher, outbox, serve};
use crate::{Components, Dispatcher, DispatcherOptions, ServiceOptions, Transfer, dataset};

/// Answers each call with the chunks of a function of the call's number.
struct Rogue<F> {
    calls: AtomicUsize,
    answer: F,
}

impl<F: Fn(usize) -> Vec<Chunk> + Send + Sync + 'static> Methods for Rogue<F> {
    const NAME: &'static str = "distribute.v1.DataWorker";

    async fn call(self: Arc<Self>, _: String, _: Inbox) -> Result<Body, Status> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let chunks = (self.answer)(call);
        // A chunk that announces elements and has none stands for silence.
        if !chunks.iter().any(is_silence) {
            return Ok(reply_of(chunks.into_iter().map(Ok)));
        }
        let (outbox, body) = outbox(chunks.len());
        tokio::spawn(async move {
            for chunk in chunks.into_iter().filter(|chunk| !is_silence(chunk)) {
                outbox.send(chunk).await;
            }
            outbox.closed().await;
        });
        Ok(body)
    }
}

fn chunk(first: u64, values: &[i64]) -> Chunk {
    let message = |value: &i64| {
        let mut components = Components::new();
        Array::scalar(*value).send(&mut components).unwrap();
        components.into_message()
    };
    let payload = encode(values.iter().map(message).collect());
    Chunk { first, count: values.len() as u32, ended: false, crc: crc32c::crc32c(&payload), payload }
}

fn silence() -> Chunk {
    Chunk { count: u32::MAX, ..Chunk::default() }
}

fn is_silence(chunk: &Chunk) -> bool {
    chunk.count == u32::MAX
}

fn end(first: u64) -> Chunk {
    Chunk { first, ended: true, ..Chunk::default() }
}

/// Reads a pass of one split from such a data worker: the elements, and the error if there is one.
fn read(answer: impl Fn(usize) -> Vec<Chunk> + Send + Sync + 'static) -> (Vec<i64>, Option<String>) {
    read_within(Duration::from_secs(10), answer)
}

fn read_within(
    element_timeout: Duration,
    answer: impl Fn(usize) -> Vec<Chunk> + Send + Sync + 'static,
) -> (Vec<i64>, Option<String>) {
    let job = JobId::new("rogue").unwrap();
    let identity = Identity::new(job.clone(), None, None);
    let service = Dispatcher::start(DispatcherOptions::default().identity(Some(job.clone()))).unwrap();
    let address = service.address().to_string();
    let threads = crate::dispatcher::threads("rogue").unwrap();
    threads.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let settings = vec![Setting { name: "batch".to_owned(), value: "none".to_owned() }];
        let datasets = vec![ServedDataset { name: "train".to_owned(), settings }];
        let registration = Registration { address: listener.local_addr().unwrap().to_string(), datasets };
        let rogue = Arc::new(Rogue { calls: AtomicUsize::new(0), answer });
        serve(listener, rogue, identity.clone(), Duration::from_secs(5)).unwrap();
        let link = Link::new(&address, &identity, Duration::from_secs(5)).unwrap();
        let path = dispatcher!("Register");
        let _: Registered = link.call(path, registration, Duration::from_secs(5)).await.unwrap();
    });
    let options = ServiceOptions::new("train").dispatcher(address).identity(job).splits(1).max_element_bytes(1024);
    let options = options.silence(Duration::from_secs(1)).worker_timeout(Duration::from_secs(10));
    let data: Dataset<Array<i64>> = dataset(options.element_timeout(element_timeout)).unwrap();
    let (mut values, mut error) = (Vec::new(), None);
    // More come only from a reader that reads on for ever.
    for item in data.iter().take(100) {
        match item {
            Ok(value) => values.push(value.as_slice()[0]),
            Err(failed) => error = Some(failed.to_string()),
        }
    }
    (values, error)
}

#[test]
fn damaged_elements_are_asked_for_again_and_refused_if_they_stay_damaged() {
    let flipped = |mut chunk: Chunk| {
        let mut bytes = chunk.payload.to_vec();
        *bytes.last_mut().unwrap() ^= 1;
        chunk.payload = Bytes::from(bytes);
        chunk
    };
    // The second chunk of the first answer is damaged; the next answer begins with its element.
    let (values, error) = read(move |call| match call {
        0 => vec![chunk(0, &[7, 8]), flipped(chunk(2, &[9])), end(3)],
        _ => vec![chunk(2, &[9]), end(3)],
    });
    assert_eq!((values, error), (vec![7, 8, 9], None));
    let (values, error) = read(move |call| match call {
        0 => vec![chunk(0, &[7, 8]), flipped(chunk(2, &[9]))],
        _ => vec![flipped(chunk(2, &[9]))],
    });
    let text = error.unwrap();
    assert!(values == [7, 8] && text.contains("damaged") && text.contains("checksum"), "{values:?}: {text}");
}

#[test]
fn elements_that_are_left_out_repeated_overlong_or_cut_off_are_refused() {
    let cases = [
        (vec![chunk(0, &[7, 8]), chunk(3, &[9])], "element 3 came, where 2 was expected"),
        (vec![chunk(0, &[7, 8]), chunk(1, &[8])], "element 1 came, where 2 was expected"),
        (vec![chunk(0, &[7, 8]), end(3)], "element 3 came, where 2 was expected"),
        (vec![chunk(0, &[7, 8]), Chunk { count: 2, ..chunk(2, &[9]) }], "1 elements came, where 2 were announced"),
        (vec![chunk(0, &[7, 8]), chunk(2, &vec![9; 200_000])], "a message of "),
    ];
    std::thread::scope(|scope| {
        for (answer, words) in cases {
            scope.spawn(move || {
                // It is asked again from element 2 on.
                let rest = answer[1..].to_vec();
                let (values, error) = read(move |call| if call == 0 { answer.clone() } else { rest.clone() });
                let text = error.unwrap();
                assert!(values == [7, 8] && text.contains(words), "{values:?}: {text}");
            });
        }
    });
    // An answer that ends before the split does is continued by the next one.
    let (values, error) = read(|call| match call {
        0 => vec![chunk(0, &[7, 8])],
        _ => vec![chunk(2, &[9]), end(3)],
    });
    assert_eq!((values, error), (vec![7, 8, 9], None));
}

/// Its process answers pings, and yields nothing.
#[test]
fn a_silent_data_worker_is_left_for_another_one_in_time() {
    let begun = Instant::now();
    let (values, error) = read(|call| match call {
        0 => vec![chunk(0, &[7, 8]), silence()],
        _ => vec![chunk(2, &[9]), end(3)],
    });
    assert_eq!((values, error), (vec![7, 8, 9], None));
    let waited = begun.elapsed();
    assert!(waited > Duration::from_millis(900) && waited < Duration::from_secs(15), "{waited:?}");
}

/// A data worker that gives signs of life and nothing else.
#[test]
fn signs_of_life_without_elements_end_the_pass_in_time() {
    let begun = Instant::now();
    let (values, error) = read_within(Duration::from_secs(1), |_| vec![Chunk::default(); 3]);
    let text = error.unwrap();
    assert!(values.is_empty() && text.contains("no element of split 0 came within"), "{text}");
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
}

#[test]
fn a_caller_without_the_services_secret_is_refused_before_its_body() {
    let (job, secret) = (JobId::new("locked").unwrap(), JobSecret::new("the secret of this service").unwrap());
    let options = DispatcherOptions::default().identity(Some(job.clone())).secret(Some(secret));
    let service = Dispatcher::start(options).unwrap();
    let threads = crate::dispatcher::threads("stranger").unwrap();
    let refused = threads.block_on(async {
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", service.address())).unwrap();
        let mut channel = endpoint.connect().await.unwrap();
        // It knows the service's identity, and its message never comes.
        let (_outbox, body) = outbox(1);
        let headers = Identity::new(job, None, None).headers().unwrap();
        let call = distribute_cluster::grpc::call(&mut channel, dispatcher!("Register"), headers, body);
        tokio::time::timeout(Duration::from_secs(5), call).await.unwrap().err().unwrap()
    });
    assert_eq!(refused.code(), tonic::Code::Unauthenticated, "{refused}");
    assert!(refused.message().starts_with("this process has no secret, and the other side has one; set"), "{refused}");
}
