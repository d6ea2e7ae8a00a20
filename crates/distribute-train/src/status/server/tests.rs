use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use super::*;
use crate::progress::{Activity, Event, Message, Spread, Status, Vitals};
use crate::status::{Collector, Job};

const DEADLINE: Duration = Duration::from_secs(20);

fn board() -> Board {
    let mut job = Job::new("mnist \"2\"");
    for task in ["worker:0", "worker:1"] {
        job.expect(task);
    }
    Board::new(job)
}

fn vitals(own_s: f64) -> Event {
    Event::Vitals(Vitals {
        host: "<b>host</b>".into(),
        activity: Activity::Training,
        steps: 12,
        steps_per_s: Some(5.0),
        step_s: Some(Spread { p10: 0.1, p50: 0.2, p90: 0.4 }),
        own_s: Some(own_s),
        collective_s: Some(0.2 - own_s),
        ..Vitals::default()
    })
}

fn connect(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

/// Returns the status line, the headers and the body of an answer.
fn ask(server: &Server, path: &str, host: &str) -> (String, String, String) {
    let mut stream = connect(server);
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let (status, headers) = head.split_once("\r\n").unwrap();
    (status.to_owned(), headers.to_ascii_lowercase(), body.to_owned())
}

fn get(server: &Server, path: &str) -> (String, String, String) {
    ask(server, path, &server.address().to_string())
}

#[test]
fn json_has_the_state_of_all_tasks() {
    let board = board();
    let server = Server::serve("127.0.0.1:0", &board).unwrap();
    for (task, own_s) in [("worker:0", 0.1), ("worker:1", 0.19)] {
        board.update(|job, now| job.receive(&Message { task: task.into(), event: vitals(own_s) }, now));
    }
    let (status, headers, body) = get(&server, "/status.json");
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert!(headers.contains("content-type: application/json") && headers.contains("no-store"), "{headers}");
    let view: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(view["stragglers"], serde_json::json!(["worker:1"]));
    assert_eq!(view["tasks"][0]["host"], "<b>host</b>");
    assert_eq!(view["tasks"][1]["state"], "training");
    assert_eq!(view["tasks"][1]["step_s"]["p90"], 0.4);
    assert_eq!(view["tasks"][1]["memory_bytes"], serde_json::Value::Null);
}

/// Returns the value of a sample by the beginning of its line.
fn sample(text: &str, begin: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(begin)?.trim().parse().ok())
}

#[test]
fn metrics_are_in_the_text_format_of_prometheus() {
    let board = board();
    let server = Server::serve("127.0.0.1:0", &board).unwrap();
    let status = Status { epoch: 2, metrics: vec![("val \"loss\"\\\n".into(), 0.25)], ..Status::default() };
    for event in [vitals(0.1), Event::Step(status)] {
        board.update(|job, now| job.receive(&Message { task: "worker:0".into(), event }, now));
    }
    let (status, headers, text) = get(&server, "/metrics");
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert!(headers.contains("application/openmetrics-text; version=1.0.0"), "{headers}");
    let labels = r#"{job="mnist \"2\"",task="worker:0",role="worker""#;
    assert_eq!(sample(&text, &format!("distribute_steps_total{labels}}}")), Some(12.0), "{text}");
    assert_eq!(sample(&text, &format!("distribute_step_seconds{labels},quantile=\"0.5\"}}")), Some(0.2));
    assert_eq!(sample(&text, &format!("distribute_worker_up{labels}}}")), Some(1.0));
    assert_eq!(sample(&text, r#"distribute_worker_up{job="mnist \"2\"",task="worker:1",role="worker"}"#), Some(0.0));
    assert_eq!(sample(&text, r#"distribute_epoch{job="mnist \"2\""}"#), Some(2.0));
    let value = r#"distribute_value{job="mnist \"2\"",name="val \"loss\"\\ "}"#;
    assert_eq!(sample(&text, value), Some(0.25), "{text}");
    // Every line is a comment or a sample whose name has been described.
    let described: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split('{').next().unwrap();
        assert!(described.contains(&name.trim_end_matches("_total")), "{line}");
        assert!(line.rsplit_once("} ").unwrap().1.parse::<f64>().is_ok(), "{line}");
    }
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn the_page_has_no_other_parts_and_inserts_no_html() {
    let server = Server::serve("127.0.0.1:0", &board()).unwrap();
    let (status, headers, page) = get(&server, "/");
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert!(headers.contains("text/html") && headers.contains("default-src 'none'"), "{headers}");
    for forbidden in ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "http://", "https://"] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    assert!(page.contains("textContent") && page.contains("status.json"));
}

#[test]
fn unknown_paths_methods_and_hosts_are_refused() {
    let server = Server::serve("127.0.0.1:0", &board()).unwrap();
    assert_eq!(get(&server, "/admin").0, "HTTP/1.1 404 Not Found");
    let mut stream = connect(&server);
    write!(stream, "POST /status.json HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n").unwrap();
    let mut start = [0; 12];
    stream.read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 405");
    let (status, _, text) = ask(&server, "/status.json", "evil.example:80");
    assert_eq!(status, "HTTP/1.1 403 Forbidden");
    assert!(text.contains("only requests for localhost"), "{text}");
    for host in ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:80"] {
        assert_eq!(ask(&server, "/", host).0, "HTTP/1.1 200 OK", "{host}");
    }
    for host in ["localhost.example", "127.0.0.1.example", "10.0.0.1", ""] {
        assert!(!is_local(host), "{host}");
    }
}

#[test]
fn slow_clients_do_not_delay_others_and_too_many_are_closed() {
    let server = Server::serve("127.0.0.1:0", &board()).unwrap();
    // Clients that send half a request.
    let mut slow: Vec<TcpStream> = (0..CONNECTIONS - 2)
        .map(|_| {
            let mut stream = connect(&server);
            stream.write_all(b"GET / HTTP/1.1\r\nhost: loc").unwrap();
            stream
        })
        .collect();
    let began = Instant::now();
    (0..20).for_each(|_| assert_eq!(get(&server, "/status.json").0, "HTTP/1.1 200 OK"));
    assert!(began.elapsed() < REQUEST, "{:?}", began.elapsed());
    // All places are taken: further connections end at once, until one is free again.
    slow.extend((0..2).map(|_| connect(&server)));
    let refused = || matches!(connect(&server).read(&mut [0; 1]), Ok(0) | Err(_));
    let deadline = Instant::now() + REQUEST / 2;
    while !refused() {
        assert!(Instant::now() < deadline, "no connection is refused");
    }
    drop(slow);
    let answered = || {
        let mut stream = connect(&server);
        let request = b"GET /status.json HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        let mut answer = String::new();
        stream.write_all(request).is_ok() && stream.read_to_string(&mut answer).is_ok() && answer.contains("200 OK")
    };
    let deadline = Instant::now() + DEADLINE;
    while !answered() {
        assert!(Instant::now() < deadline, "the server does not answer again");
    }
}

#[test]
fn requests_that_are_no_http_and_long_ones_are_refused() {
    let server = Server::serve("127.0.0.1:0", &board()).unwrap();
    for request in [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(), vec![b'a'; 2 * LONGEST_REQUEST]] {
        let mut stream = connect(&server);
        // The server may have closed the connection before all is written.
        let _ = stream.write_all(&request);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(!answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    }
    assert_eq!(get(&server, "/metrics").0, "HTTP/1.1 200 OK");
}

#[test]
fn reports_arrive_and_malformed_ones_end_their_connection() {
    let board = board();
    let collector = Collector::start("127.0.0.1:0", None, &board).unwrap();
    let report = || {
        let stream = TcpStream::connect(collector.reports_address()).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    };
    for malformed in ["{\"task\":\n".to_owned(), format!("{}\n", "x".repeat(300_000))] {
        let mut stream = report();
        let _ = stream.write_all(malformed.as_bytes());
        assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)));
    }
    let mut stream = report();
    let message = Message { task: "worker:1".into(), event: vitals(0.1) };
    writeln!(stream, "{}", serde_json::to_string(&message).unwrap()).unwrap();
    let deadline = Instant::now() + DEADLINE;
    while board.view().tasks[1].steps != Some(12) {
        assert!(Instant::now() < deadline, "{:?}", board.view());
        std::thread::yield_now();
    }
    assert_eq!(board.view().tasks[0].steps, None);
}

#[test]
fn an_address_that_cannot_be_used_is_an_error_with_a_remedy() {
    let server = Server::serve("127.0.0.1:0", &board()).unwrap();
    let taken = Server::serve(&server.address().to_string(), &board()).unwrap_err().to_string();
    assert!(taken.contains("give an address of this machine and a free port"), "{taken}");
    assert!(Server::serve("nonsense", &board()).is_err());
}
