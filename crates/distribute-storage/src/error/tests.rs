//! A server's answers as sentences.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use super::*;
use crate::Location;

/// Returns an object of a server that answers requests by their text; `retry` is the limit of repeating, in seconds.
fn served(retry: &str, answer: impl Fn(&str) -> &'static str + Send + Sync + 'static) -> Location {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let answer = Arc::new(answer);
    thread::spawn(move || {
        for stream in listener.incoming().take(64) {
            let Ok(mut stream) = stream else { return };
            let answer = Arc::clone(&answer);
            thread::spawn(move || {
                // The request ends where nothing more comes.
                stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
                let (mut request, mut piece) = (Vec::new(), [0; 4096]);
                while let Ok(got @ 1..) = stream.read(&mut piece) {
                    request.extend_from_slice(&piece[..got]);
                }
                drop(stream.write_all(answer(&String::from_utf8_lossy(&request)).as_bytes()));
            });
        }
    });
    let variables = [
        ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
        ("AWS_ALLOW_HTTP", "true".to_owned()),
        ("AWS_ACCESS_KEY_ID", "AKIAHUNTER2".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "hunter2secret".to_owned()),
        ("DISTRIBUTE_STORAGE_RETRY", retry.to_owned()),
    ];
    let variables: Vec<(String, String)> = variables.map(|(name, value)| (name.to_owned(), value)).into();
    Location::with("s3://bucket/run/a", &variables).unwrap()
}

/// Asks a server that gives one answer to everything.
fn asked<T>(answer: &'static str, ask: impl FnOnce(&Location) -> Result<T>) -> Error {
    match ask(&served("0", move |_| answer)) {
        Ok(_) => panic!("an error was expected"),
        Err(error) => error,
    }
}

macro_rules! answer {
    ($status:literal, $body:literal) => {
        concat!("HTTP/1.1 ", $status, "\r\nConnection: close\r\n\r\n", $body)
    };
}

#[test]
fn every_refusal_names_the_url_and_the_remedy_and_no_credential() {
    let signature = answer!(
        "403 Forbidden",
        "<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>AKIAHUNTER2</AWSAccessKeyId>\
         <StringToSign>hunter2secret</StringToSign></Error>"
    );
    let denied = answer!("403 Forbidden", "<Error><Code>AccessDenied</Code><Message>AKIAHUNTER2</Message></Error>");
    let bucket = answer!("404 Not Found", "<Error><Code>NoSuchBucket</Code></Error>");
    let object = answer!("404 Not Found", "<Error><Code>NoSuchKey</Code></Error>");
    let odd = answer!("418 I am a teapot", "hunter2secret");
    let away = answer!("503 Service Unavailable", "<Error><Code>SlowDown</Code></Error>");
    let expired = answer!("400 Bad Request", "<Error><Code>ExpiredToken</Code></Error>");
    type Is = fn(&Error) -> bool;
    let cases: [(&str, Is, &str); 7] = [
        (signature, |error| matches!(error, Error::Credential { .. }), "AWS_SECRET_ACCESS_KEY"),
        (denied, |error| matches!(error, Error::Denied { .. }), "permission denied (403 AccessDenied)"),
        (bucket, |error| matches!(error, Error::NoBucket { .. }), "the bucket does not exist"),
        (object, |error| matches!(error, Error::NotFound { .. }), "no such object"),
        (odd, |error| matches!(error, Error::Answer { .. }), "status 418"),
        (away, |error| matches!(error, Error::Connection { .. }) && error.is_retryable(), "503 SlowDown"),
        (expired, |error| matches!(error, Error::Credential { .. }), "ExpiredToken"),
    ];
    for (answer, is, words) in cases {
        for error in [asked(answer, |place| place.read(100)), asked(answer, |place| place.write("x"))] {
            let text = format!("{error} {error:?}");
            assert!(is(&error) && text.contains(words) && text.contains("s3://bucket/run/a"), "{text}");
            assert!(!text.to_lowercase().contains("hunter2"), "{text}");
        }
    }
}

#[test]
fn a_read_only_credential_is_told_from_a_wrong_one() {
    let denied = answer!("403 Forbidden", "<Error><Code>AccessDenied</Code></Error>");
    let text = asked(denied, |place| place.write("x")).to_string();
    assert!(text.contains("writing") && text.contains("may only read"), "{text}");
}

#[test]
fn an_answer_that_something_is_not_implemented_is_final_at_once() {
    let answer = answer!("501 Not Implemented", "<Error><Code>NotImplemented</Code></Error>");
    let began = Instant::now();
    let place = served("180", move |_| answer);
    for error in [place.read(100).unwrap_err(), place.write("x").unwrap_err()] {
        assert!(matches!(error, Error::Answer { .. }) && !error.is_retryable(), "{error}");
        assert!(error.to_string().contains("does not support"), "{error}");
    }
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}

#[test]
fn an_object_is_created_where_conditions_are_not_implemented() {
    let began = Instant::now();
    let place = served("180", |request| match request.to_lowercase() {
        request if request.starts_with("head") => answer!("404 Not Found", ""),
        request if request.contains("if-none-match") => answer!("501 Not Implemented", ""),
        _ => "HTTP/1.1 200 OK\r\nETag: \"1\"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    });
    place.create("x").unwrap();
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}

#[test]
fn a_cut_connection_is_retryable_and_names_its_cause() {
    let cut = "HTTP/1.1 200 OK\r\nContent-Length: 100\r\nLast-Modified: Tue, 01 Jan 2030 00:00:00 GMT\r\n\
               Connection: close\r\n\r\nonly some";
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming().take(64) {
            let Ok(mut stream) = stream else { return };
            let mut request = [0; 4096];
            drop(stream.read(&mut request));
            drop(stream.write_all(cut.as_bytes()));
        }
    });
    let variables = [
        ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
        ("AWS_ALLOW_HTTP", "true".to_owned()),
        ("AWS_SKIP_SIGNATURE", "true".to_owned()),
        ("DISTRIBUTE_STORAGE_RETRY", "1".to_owned()),
    ];
    let variables: Vec<(String, String)> = variables.map(|(name, value)| (name.to_owned(), value)).into();
    let place = Location::with("s3://bucket/run/a", &variables).unwrap();
    let error = place.read(1000).unwrap_err();
    assert!(error.is_retryable() && error.to_string().contains("s3://bucket/run/a"), "{error}");
    let error = io::Error::from(error);
    assert!(Error::of(&error).is_some_and(Error::is_retryable));
    // No server at all.
    let variables: Vec<(String, String)> = variables
        .into_iter()
        .map(|(name, value)| match name.as_str() {
            "AWS_ENDPOINT_URL" => (name, "http://127.0.0.1:1".to_owned()),
            _ => (name, value),
        })
        .collect();
    let error = Location::with("s3://bucket/run/a", &variables).unwrap().write("x").unwrap_err();
    assert!(matches!(&error, Error::Connection { problem, .. } if problem.contains("no connection")), "{error}");
}

#[test]
fn codes_are_read_from_all_kinds_of_answers_and_nothing_else_is() {
    assert_eq!(code("… <Error><Code>NoSuchKey</Code><Key>a</Key>").as_deref(), Some("NoSuchKey"));
    assert_eq!(code("{\"reason\": \"authError\", \"x\": 1}").as_deref(), Some("authError"));
    for text in ["", "<Code></Code>", "<Code>&lt;", &format!("<Code>{}</Code>", "x".repeat(65))] {
        assert_eq!(code(text), None, "{text}");
    }
    assert_eq!(status("status code: 403 Forbidden").as_deref(), Some("403"));
    assert_eq!(status("status code: 40").as_deref(), None);
}
