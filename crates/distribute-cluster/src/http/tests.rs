use std::time::{Duration, Instant};

use super::stand_in::{Answer, StandIn};
use super::*;

fn settings(timeout_ms: u64) -> Settings {
    let options = RequestOptions::default().first_delay(Duration::from_millis(1));
    Settings {
        service: "a service",
        options: options.timeout(Duration::from_millis(timeout_ms)),
        proxies: Proxies::default(),
        is_metadata_given: true,
    }
}

fn ask(server: &StandIn) -> Ask {
    Ask {
        what: "the thing".to_owned(),
        url: Url::parse(&server.url()).unwrap().join("/thing").unwrap(),
        body: None,
        token: Some(AccessToken::new("secret-token")),
        is_metadata: false,
        limit_bytes: 100_000,
        remedies: Remedies {
            unauthorized: "Renew the token".to_owned(),
            forbidden: "Grant the permission".to_owned(),
            not_found: "Check the name".to_owned(),
        },
    }
}

fn send(settings: &Settings, ask: &Ask) -> Result<Value> {
    let ask = ask.clone();
    converse(settings, move |client| async move {
        client.json::<Value>(&ask).await.map_err(|refusal| client.error(&ask, refusal))
    })
}

/// The outcome and the number of requests of a script.
fn by(answers: impl IntoIterator<Item = Answer>) -> (Result<Value>, usize) {
    let server = StandIn::start().on("/thing", answers);
    let outcome = send(&settings(20_000), &ask(&server));
    (outcome, server.count("/thing"))
}

fn right() -> Answer {
    Answer::text(r#"{"a": 1}"#)
}

#[test]
fn an_answer_is_parsed_and_the_token_is_sent() {
    let server = StandIn::start().on("/thing", [right()]);
    assert_eq!(send(&settings(20_000), &ask(&server)).unwrap()["a"], 1);
    let seen = server.seen();
    assert_eq!((seen.len(), seen[0].header("authorization")), (1, "Bearer secret-token"));
    assert!(seen[0].header("user-agent").starts_with("distribute-cluster/"));
}

#[test]
fn what_may_pass_is_tried_again() {
    let (outcome, count) = by([Answer::status(500), Answer::status(503), right()]);
    assert_eq!((outcome.unwrap()["a"].clone(), count), (Value::from(1), 3));
    let (outcome, count) = by([Answer::text("{\"a\"").broken(), right()]);
    assert_eq!((outcome.is_ok(), count), (true, 2));
    let (outcome, count) = by([Answer::error(500, "out of order")]);
    let text = outcome.unwrap_err().to_string();
    let words = "a service: the thing: status 500 Internal Server Error: out of order. Try again later";
    assert!(text.starts_with(words), "{text}");
    assert_eq!(count, 5);
}

#[test]
fn what_stays_is_a_sentence_at_once() {
    for (answer, words) in [
        (Answer::error(401, "expired"), "status 401 Unauthorized: expired. Renew the token"),
        (Answer::error(403, "not yours"), "status 403 Forbidden: not yours. Grant the permission"),
        (Answer::status(404), "status 404 Not Found. Check the name"),
        (Answer::status(418), "status 418 I'm a teapot"),
        (Answer::status(302).header("location", "http://127.0.0.1:1/"), "status 302 Found"),
        (Answer::text(r#"{"a": [1, 2"#), "the answer ends in the middle of its JSON, after 11 bytes"),
        (Answer::text("<html>"), "the answer is not the expected JSON: expected value at line 1 column 1"),
        (Answer::text(vec![b'a'; 100_001]), "the answer has 100001 bytes or more, and at most 100000 are read"),
        (Answer::text(vec![b'a'; 200_000]).streamed(), "and at most 100000 are read"),
    ] {
        let (outcome, count) = by([answer, right()]);
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
        assert_eq!(count, 1, "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
}

#[test]
fn a_delay_that_the_server_asks_for_is_kept() {
    let began = Instant::now();
    let (outcome, count) = by([Answer::status(429).header("retry-after", "1"), right()]);
    assert_eq!((outcome.is_ok(), count), (true, 2));
    assert!(began.elapsed() >= Duration::from_millis(990), "{:?}", began.elapsed());
    let past = "Sun, 06 Nov 1994 08:49:37 GMT";
    let (outcome, count) = by([Answer::status(429).header("retry-after", past), right()]);
    assert_eq!((outcome.is_ok(), count), (true, 2));
}

#[test]
fn a_delay_beyond_the_deadline_ends_the_call_at_once() {
    let began = Instant::now();
    let (outcome, count) = by([Answer::status(429).header("retry-after", "3600"), right()]);
    let text = outcome.unwrap_err().to_string();
    assert!(text.contains("status 429 Too Many Requests (ask again in 3600 s)"), "{text}");
    assert!(count == 1 && began.elapsed() < Duration::from_secs(10));
}

#[test]
fn the_deadline_holds_for_all_attempts_together() {
    let server = StandIn::start().on("/thing", [Answer::status(503), right().after(Duration::from_secs(5))]);
    let began = Instant::now();
    let error = send(&settings(300), &ask(&server)).unwrap_err();
    let words = "a service: the thing: it was not completed within 0.3 s; the last attempt: status 503";
    assert!(error.to_string().starts_with(words), "{error}");
    assert!(began.elapsed() < Duration::from_secs(3));
    let refused = Ask { url: Url::parse("http://127.0.0.1:1/").unwrap(), ..ask(&server) };
    let text = send(&settings(20_000), &refused).unwrap_err().to_string();
    assert!(text.to_lowercase().contains("connection refused"), "{text}");
}

#[test]
fn a_call_works_inside_a_runtime_of_the_caller() {
    let server = StandIn::start().on("/thing", [right()]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let outcome = runtime.block_on(async { send(&settings(20_000), &ask(&server)) });
    assert_eq!(outcome.unwrap()["a"], 1);
}

#[test]
fn a_panic_of_the_thread_is_an_error() {
    let outcome: Result<()> = converse(&settings(20_000), |_| async { std::panic::resume_unwind(Box::new(())) });
    assert!(outcome.unwrap_err().to_string().contains("its thread: panicked"));
}

#[test]
fn a_token_leaves_this_machine_over_tls_alone() {
    let server = StandIn::start();
    let elsewhere = Ask { url: Url::parse("http://192.0.2.1/").unwrap(), ..ask(&server) };
    let text = send(&settings(20_000), &elsewhere).unwrap_err().to_string();
    assert!(text.contains("an access token would be sent to 192.0.2.1 without TLS"), "{text}");
    let broken = Ask { token: Some(AccessToken::new("a\nb")), ..ask(&server) };
    let text = send(&settings(20_000), &broken).unwrap_err().to_string();
    assert!(text.contains("characters that no header can carry") && server.seen().is_empty(), "{text}");
}

#[test]
fn a_server_with_a_certificate_of_its_own_is_refused() {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut connection = rustls::ServerConnection::new(Arc::new(config)).unwrap();
        let mut ended = Ok(());
        while ended.is_ok() && connection.is_handshaking() {
            ended = connection.complete_io(&mut stream).map(drop);
        }
        ended.map_err(|error| error.to_string())
    });
    let url = Url::parse(&format!("https://localhost:{port}/")).unwrap();
    let settings = Settings { options: settings(20_000).options.attempts(1), ..settings(20_000) };
    let text = send(&settings, &Ask { url, ..ask(&StandIn::start()) }).unwrap_err().to_string();
    assert!(text.contains("invalid peer certificate: UnknownIssuer"), "{text}");
    // The refusal is an alert: the server sent its certificate, and got no request.
    let alert = server.join().unwrap().unwrap_err();
    assert!(alert.contains("UnknownCA"), "{alert}");
}

#[test]
fn the_proxy_is_used_for_the_service_and_never_for_metadata() {
    let proxy = StandIn::start();
    let metadata = StandIn::start().on("/thing", [Answer::metadata("{}")]);
    let host = proxy.url();
    let variable = |name: &str| ["HTTPS_PROXY", "HTTP_PROXY"].contains(&name).then(|| host.clone());
    let settings = Settings { proxies: Proxies::from_vars(&variable).unwrap(), ..settings(20_000) };
    send(&settings, &Ask { is_metadata: true, ..ask(&metadata) }).unwrap();
    assert_eq!(proxy.seen().len(), 0);
    // The proxy refuses to connect.
    let secure = Ask { url: Url::parse("https://service.example/thing").unwrap(), ..ask(&metadata) };
    assert!(send(&settings, &secure).is_err());
    let seen = proxy.seen();
    assert!(!seen.is_empty() && seen.iter().all(|seen| seen.method == "CONNECT"), "{seen:?}");
    assert!(seen[0].path.starts_with("service.example:443") && seen[0].header("authorization").is_empty());
}

#[test]
fn metadata_need_their_header_in_both_directions() {
    let server = StandIn::start().on("/thing", [Answer::metadata("{}")]);
    let metadata = Ask { is_metadata: true, token: None, ..ask(&server) };
    assert!(send(&settings(20_000), &metadata).is_ok());
    assert_eq!(server.seen()[0].header(FLAVOR), "Google");
    for wrong in [Answer::text("{}"), Answer::text("{}").header(FLAVOR, "Other"), Answer::status(403)] {
        server.change("/thing", wrong);
        let text = send(&settings(20_000), &metadata).unwrap_err().to_string();
        assert!(text.contains("so it is not the metadata server") && text.contains("GCE_METADATA_HOST"), "{text}");
    }
}
