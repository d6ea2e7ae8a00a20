//! Calls, data and options that are refused.

use std::time::Duration;

use distribute_cluster::tls::TlsFiles;
use distribute_cluster::{FailureKind, JobId, JobSecret, JobTls};
use distribute_data_service::{DataWorker, Dispatcher, DispatcherOptions, Error, dataset};
use distribute_input::{Array, Dataset};
use distribute_testkit::certificates::{Authority, Certificate};
use distribute_types::ErrorClass;

use crate::{dispatcher, dispatcher_at, elements, options, worker};

fn first_error<T: Send + 'static>(data: &Dataset<T>) -> String {
    data.iter().find_map(Result::err).expect("the pass fails").to_string()
}

#[test]
fn another_service_other_data_and_another_type_are_refused_in_words() {
    let name = "refused";
    let dispatcher = dispatcher(name);
    let _serving = worker(&dispatcher, name).dataset("train", &Dataset::range(0..9).shuffle(4, 1)).start().unwrap();
    let stranger = JobId::new("stranger").unwrap();
    let refused = |served: Dataset<Array<i64>>| {
        let error = worker(&dispatcher, name).dataset("train", &served).start().unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error}");
        error.to_string()
    };
    let seed = refused(Dataset::range(0..9).shuffle(4, 2));
    assert!(seed.contains("its seeds of shuffles is [2], and there [1]"), "{seed}");
    let content = refused(Dataset::range(1..10).shuffle(4, 1));
    assert!(content.contains("its first element's checksum is"), "{content}");
    let other = worker(&dispatcher, name).identity(stranger.clone()).dataset("train", &Dataset::range(0..9));
    let text = other.start().unwrap_err().to_string();
    assert!(text.contains("the caller to stranger") && text.contains("DISTRIBUTE_DATA_SERVICE_ID"), "{text}");

    let of_another: Dataset<Array<i64>> = dataset(options(&dispatcher, name).identity(stranger)).unwrap();
    assert!(first_error(&of_another).contains("the caller to stranger"), "{}", first_error(&of_another));
    let typed: Dataset<Array<f32>> = dataset(options(&dispatcher, name)).unwrap();
    let text = first_error(&typed);
    assert!(text.contains("i64 [], and an array of f32 was expected; declare the type that is served"), "{text}");
    let unknown = distribute_data_service::ServiceOptions::new("test").dispatcher(dispatcher.address().to_string());
    let unknown = unknown.identity(crate::identity(name)).worker_timeout(Duration::from_millis(100));
    let unknown: Dataset<Array<i64>> = dataset(unknown).unwrap();
    assert!(first_error(&unknown).contains("data workers serve [\"train\"], and not \"test\""));
}

#[test]
fn without_the_services_secret_nothing_is_served() {
    let name = "secret";
    let secret = |text: &str| JobSecret::new(text).unwrap();
    let own = secret("the secret of this one service");
    let given = DispatcherOptions::default().identity(Some(crate::identity(name))).secret(Some(own.clone()));
    let dispatcher = Dispatcher::start(given).unwrap();
    let serves = || worker(&dispatcher, name).dataset("train", &Dataset::range(0..9));
    let _serving = serves().secret(own.clone()).start().unwrap();
    let data: Dataset<Array<i64>> = dataset(options(&dispatcher, name).secret(own)).unwrap();
    assert_eq!(data.iter().filter(Result::is_ok).count(), 9);
    let wrong = secret("the secret of another service");
    for (given, words) in [
        (Some(wrong), "this process and the other side do not have the same secret"),
        (None, "this process has no secret, and the other side has one"),
    ] {
        let reads = options(&dispatcher, name);
        let (reads, serves) = match given {
            Some(given) => (reads.secret(given.clone()), serves().secret(given)),
            None => (reads, serves()),
        };
        let error = serves.start().unwrap_err();
        let read: Dataset<Array<i64>> = dataset(reads).unwrap();
        for text in [error.to_string(), first_error(&read)] {
            assert!(text.contains(words) && text.contains("set DISTRIBUTE_DATA_SERVICE_SECRET_FILE"), "{text}");
        }
        assert_eq!(error.failure_kind(), FailureKind::Configuration, "{error}");
    }
    assert_eq!(data.iter().filter(Result::is_ok).count(), 9);
}

#[test]
fn without_a_certificate_of_the_services_authority_nothing_is_served() {
    let name = "certificates";
    let folder = tempfile::tempdir().unwrap();
    let issued = |authority: &Authority, stem: &str| {
        let files = authority.issue(folder.path(), stem, &Certificate::valid()).unwrap();
        JobTls::open(TlsFiles::new(files.authority, files.certificate, files.key)).unwrap()
    };
    let authority = Authority::new().unwrap();
    let own = issued(&authority, "own");
    let given = DispatcherOptions::default().identity(Some(crate::identity(name))).tls(Some(own.clone()));
    let dispatcher = Dispatcher::start(given).unwrap();
    let serves = || worker(&dispatcher, name).dataset("train", &Dataset::range(0..9));
    let _serving = serves().tls(issued(&authority, "worker")).start().unwrap();
    let data: Dataset<Array<i64>> = dataset(options(&dispatcher, name).tls(own)).unwrap();
    assert_eq!(data.iter().filter(Result::is_ok).count(), 9);
    let other = issued(&Authority::new().unwrap(), "other");
    for (given, words) in [
        (Some(other), "the certificate of the other side is not of the authority that this process trusts"),
        (None, "this process does not use TLS, and the other side does"),
    ] {
        let reads = options(&dispatcher, name);
        let (reads, serves) = match given {
            Some(given) => (reads.tls(given.clone()), serves().tls(given)),
            None => (reads, serves()),
        };
        let error = serves.start().unwrap_err();
        let read: Dataset<Array<i64>> = dataset(reads).unwrap();
        for text in [error.to_string(), first_error(&read)] {
            assert!(text.contains(words) && text.contains("DISTRIBUTE_TLS_CERT"), "{text}");
        }
        assert_eq!(error.failure_kind(), FailureKind::Configuration, "{error}");
    }
    assert_eq!(data.iter().filter(Result::is_ok).count(), 9);
}

/// A dispatcher that was started again does not know the first dataset of the name.
#[test]
fn another_dataset_under_the_name_of_the_first_one_ends_the_pass() {
    let name = "changed";
    let first = dispatcher(name);
    let address = first.address();
    let serving = worker(&first, name).dataset("train", &Dataset::range(0..9)).start().unwrap();
    let data: Dataset<Array<i64>> = dataset(options(&first, name)).unwrap();
    assert_eq!(data.iter().filter(Result::is_ok).count(), 9);
    drop((first, serving));
    let again = dispatcher_at(address, name);
    let _other = worker(&again, name).dataset("train", &Dataset::range(1..10)).start().unwrap();
    let text = first_error(&data);
    assert!(text.contains("now knows another dataset \"train\" than at the beginning"), "{text}");
}

#[test]
fn a_pipeline_that_fails_and_an_element_that_is_too_large_end_the_pass() {
    let name = "fails";
    let dispatcher = dispatcher(name);
    let fails = |number: Array<i64>| match number.item() {
        Some(5) => Err("five".into()),
        Some(6) => panic!("six"),
        _ => Ok(number),
    };
    let large = Dataset::range(0..4).map(|number| Ok(Array::from(vec![number.as_slice()[0]; 1000])));
    let _worker = worker(&dispatcher, name)
        .dataset("train", &Dataset::range(0..6).map(fails))
        .dataset("panics", &Dataset::range(0..5).concatenate(Dataset::range(6..9)).map(fails))
        .dataset("large", &large)
        .start()
        .unwrap();
    let error = |name: &str| {
        let mut given = options(&dispatcher, "fails").splits(1).max_element_bytes(1024);
        given.name = name.to_owned();
        let data: Dataset<Array<i64>> = dataset(given).unwrap();
        (data.iter().filter(Result::is_ok).count(), first_error(&data))
    };
    let (seen, text) = error("train");
    assert!(seen == 5 && text.contains("element 5 of split 0 of pass") && text.contains("five"), "{seen}: {text}");
    let (seen, text) = error("panics");
    assert!(seen == 5 && text.contains("the pipeline panicked"), "{seen}: {text}");
    let (seen, text) = error("large");
    assert!(seen == 0 && text.contains("at most 1024; raise max_element_bytes"), "{seen}: {text}");
}

#[test]
fn options_without_sense_are_refused_before_anything_is_called() {
    let named = |address: &str| DataWorker::builder().dispatcher(address).dataset("train", &elements());
    for (error, words) in [
        (named("nowhere").start().unwrap_err(), "the address of the dispatcher is nowhere; expected host:port"),
        (named("127.0.0.1:1").dataset("train", &elements()).start().unwrap_err(), "two datasets named \"train\""),
        (named("127.0.0.1:1").max_streams(0).start().unwrap_err(), "max_streams is 0"),
        (DataWorker::builder().dispatcher("127.0.0.1:1").start().unwrap_err(), "serves no dataset"),
        (
            named("127.0.0.1:1").register_timeout(Duration::from_millis(300)).start().unwrap_err(),
            "no answer of the dispatcher at 127.0.0.1:1",
        ),
    ] {
        assert!(error.to_string().contains(words), "{error}");
    }
}
