//! Members show certificates of the job's authority, and others take no part.

#![cfg(all(feature = "coordination", feature = "tls"))]
#![expect(clippy::unwrap_used, reason = "a failure of a test is a panic")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use distribute_cluster::tls::TlsFiles;
use distribute_cluster::{
    Coordination, CoordinationOptions, ElasticJob, ElasticOptions, Error, FailureKind, JobId, JobSecret, JobTls,
    Membership,
};
use distribute_testkit::certificates::{Authority, Certificate, Files};
use distribute_types::ErrorClass;

#[path = "secret/log.rs"]
mod log;

use log::{log, warnings};

const SOON: Duration = Duration::from_secs(10);

fn opened(files: &Files) -> JobTls {
    JobTls::open(TlsFiles::new(&files.authority, &files.certificate, &files.key)).unwrap()
}

fn options(tls: Option<JobTls>) -> CoordinationOptions {
    CoordinationOptions::default().join_timeout(SOON).tls(tls)
}

type Joined = distribute_cluster::Result<Coordination>;

fn start(rank: u32, address: &str, options: CoordinationOptions) -> thread::JoinHandle<Joined> {
    let membership = Membership::new(rank, 2, address).unwrap().with_job_id(JobId::new("job").unwrap());
    thread::spawn(move || Coordination::start(&membership, options))
}

/// A leader that waits for its one member, and its address.
fn leader(options: CoordinationOptions) -> (thread::JoinHandle<Joined>, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (start(0, &address, options.listener(Some(Arc::new(listener)))), address)
}

/// Asserts that a task is refused for good, long before its timeout, and returns the sentence.
fn refused(address: &str, options: CoordinationOptions) -> String {
    let started = Instant::now();
    let error = start(1, address, options).join().unwrap().unwrap_err();
    assert!(started.elapsed() < SOON / 2, "{error}");
    assert_eq!(error.failure_kind(), FailureKind::Configuration, "{error}");
    error.to_string()
}

fn works(leader: &Coordination, second: &Coordination) {
    leader.put("k", b"v").unwrap();
    assert_eq!(second.get("k", SOON).unwrap(), b"v");
    assert_eq!((leader.failure(), second.failure()), (None, None));
}

/// A certificate of the name `distribute` that has expired.
fn expired() -> Certificate {
    let now = SystemTime::now();
    Certificate::valid().within(now - Duration::from_secs(7200), now - Duration::from_secs(60))
}

fn early() -> Certificate {
    let now = SystemTime::now();
    Certificate::valid().within(now + Duration::from_secs(3600), now + Duration::from_secs(7200))
}

/// The certificates of others than the job's tasks, and what is said of them at the caller and at the listener.
fn strangers(folder: &Path, authority: &Authority) -> Vec<(JobTls, &'static str, &'static str)> {
    let issue = |stem: &str, certificate: Certificate| opened(&authority.issue(folder, stem, &certificate).unwrap());
    let other = Authority::new().unwrap().issue(folder, "other", &Certificate::valid()).unwrap();
    // It trusts the job's authority, and is not trusted.
    let trusting = TlsFiles::new(folder.join("expired-ca.pem"), &other.certificate, &other.key);
    vec![
        (
            issue("expired", expired()),
            "the other side says that this process's certificate has expired",
            "the certificate of the other side has expired",
        ),
        (
            issue("early", early()),
            "says that this process's certificate has expired, or is not yet valid",
            "the certificate of the other side is not yet valid",
        ),
        (
            issue("name", Certificate::valid().name("another.job")),
            "says that this process's certificate is for another name",
            "the certificate of the other side is for another name",
        ),
        (
            JobTls::open(trusting).unwrap(),
            "the other side does not trust the authority of this process's certificate",
            "the certificate of the other side is not of the authority that this process trusts",
        ),
        (
            opened(&other),
            "the certificate of the other side is not of the authority that this process trusts",
            "the other side does not trust the authority of this process's certificate",
        ),
    ]
}

#[test]
fn tasks_with_another_certificate_or_none_are_refused_and_disturb_nothing() {
    log();
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new().unwrap();
    let issue = |stem: &str| opened(&authority.issue(folder.path(), stem, &Certificate::valid()).unwrap());
    let (leads, address) = leader(options(Some(issue("leader"))));
    for (stranger, words, _) in strangers(folder.path(), &authority) {
        let text = refused(&address, options(Some(stranger)));
        assert!(text.contains(words) && text.contains("DISTRIBUTE_TLS_CERT"), "{text}");
    }
    for secret in [None, Some(JobSecret::new("the secret of this one job").unwrap())] {
        let text = refused(&address, options(None).secret(secret));
        assert!(text.contains("this process does not use TLS, and the other side does; give every"), "{text}");
    }
    // Garbage instead of a handshake, and a first message that is longer than any.
    let began = Instant::now();
    for bytes in
        [&[0x16, 3, 1, 0, 4, 9, 9, 9, 9][..], &[0x16, 0xff, 0xff, 0xff], &endless_hello(), b"GET / HTTP/1.1\r\n\r\n"]
    {
        let mut stranger = TcpStream::connect(&address).unwrap();
        stranger.set_read_timeout(Some(SOON)).unwrap();
        // It hangs up before all is sent.
        let _ = stranger.write_all(bytes);
        let _ = stranger.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stranger.read_to_end(&mut answer);
        assert!(answer.len() < 200, "{answer:?}");
    }
    assert!(began.elapsed() < SOON / 2, "{:?}", began.elapsed());
    let second = start(1, &address, options(Some(issue("second")))).join().unwrap().unwrap();
    let leader = leads.join().unwrap().unwrap();
    works(&leader, &second);
    assert!(leader.tls().is_some());
    // Once for this host: the first of them.
    let warned = warnings("the certificate of the other side");
    assert_eq!(warned.len(), 1, "{warned:?}");
    let words = "refused a connection of 127.0.0.1";
    assert!(warned[0].contains(words) && warned[0].contains("has expired"), "{warned:?}");
}

/// The beginning of a first message of 16 MiB, in many records.
fn endless_hello() -> Vec<u8> {
    let mut bytes = Vec::new();
    for record in 0..20 {
        bytes.extend_from_slice(&[0x16, 3, 1, 0x40, 0]);
        let mut body = vec![7; 0x4000];
        if record == 0 {
            body[..4].copy_from_slice(&[1, 0xff, 0xff, 0xff]);
        }
        bytes.extend_from_slice(&body);
    }
    bytes
}

#[test]
fn a_leader_without_tls_or_with_another_certificate_is_not_joined() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new().unwrap();
    let issue = |stem: &str| opened(&authority.issue(folder.path(), stem, &Certificate::valid()).unwrap());
    let own = issue("own");
    let (leads, address) = leader(options(None));
    let text = refused(&address, options(Some(own.clone())));
    assert!(text.contains("this process uses TLS, and the other side does not; give every process"), "{text}");
    let second = start(1, &address, options(None)).join().unwrap().unwrap();
    works(&leads.join().unwrap().unwrap(), &second);
    // A leader joins its own service, and so notices at once that no process accepts its certificate.
    let stale = authority.issue(folder.path(), "stale", &expired()).unwrap();
    let (leads, _) = leader(options(Some(opened(&stale))));
    let error = leads.join().unwrap().unwrap_err();
    assert_eq!(error.failure_kind(), FailureKind::Configuration, "{error}");
    assert!(error.to_string().contains("the certificate of the other side has expired"), "{error}");
    // What listens there may not be the leader yet.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let joins = start(1, &address, options(Some(own)).join_timeout(Duration::from_secs(1)));
    let (mut stream, _) = silent.accept().unwrap();
    stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    let error = joins.join().unwrap().unwrap_err();
    assert!(matches!(&error, Error::Unreachable { last, .. } if last.contains("the TLS handshake")), "{error}");
}

#[test]
fn a_secret_is_proved_inside() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new().unwrap();
    let tls = opened(&authority.issue(folder.path(), "own", &Certificate::valid()).unwrap());
    let both =
        |secret: Option<&str>| options(Some(tls.clone())).secret(secret.map(|secret| JobSecret::new(secret).unwrap()));
    let (leads, address) = leader(both(Some("the secret of this one job")));
    let text = refused(&address, both(Some("the secret of another job")));
    assert!(text.contains("do not have the same secret; set DISTRIBUTE_JOB_SECRET_FILE"), "{text}");
    let text = refused(&address, both(None));
    assert!(text.contains("this process has no secret, and the other side has one"), "{text}");
    let second = start(1, &address, both(Some("the secret of this one job"))).join().unwrap().unwrap();
    works(&leads.join().unwrap().unwrap(), &second);
    let (leads, address) = leader(both(None));
    let text = refused(&address, both(Some("the secret of this one job")));
    assert!(text.contains("this process has a secret, and the other side has none"), "{text}");
    let second = start(1, &address, both(None)).join().unwrap().unwrap();
    works(&leads.join().unwrap().unwrap(), &second);
}

#[test]
fn processes_of_an_elastic_job_decide_generations_over_tls_and_others_do_not_join() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new().unwrap();
    let own = opened(&authority.issue(folder.path(), "own", &Certificate::valid()).unwrap());
    let other = opened(&Authority::new().unwrap().issue(folder.path(), "other", &Certificate::valid()).unwrap());
    let listeners = [(); 2].map(|()| Arc::new(TcpListener::bind("127.0.0.1:0").unwrap()));
    let seeds = listeners.each_ref().map(|listener| listener.local_addr().unwrap().to_string());
    let given = |tls: Option<JobTls>, wait: Duration| {
        let options = ElasticOptions::new(1..=2, seeds.clone(), JobId::new("elastic").unwrap());
        options.join_timeout(wait).host("127.0.0.1".to_owned()).tls(tls)
    };
    let joins = listeners.map(|listener| {
        let options = given(Some(own.clone()), SOON).listener(listener);
        thread::spawn(move || ElasticJob::join(options).unwrap())
    });
    let jobs = joins.map(|join| join.join().unwrap());
    let decided = jobs.each_ref().map(|job| job.next_generation(0).unwrap());
    assert_eq!(decided[0], decided[1]);
    for (tls, words) in [(None, "does not use TLS"), (Some(other), "not of the authority that this process trusts")] {
        let listener = Arc::new(TcpListener::bind("127.0.0.1:0").unwrap());
        let error = ElasticJob::join(given(tls, Duration::from_millis(800)).listener(listener)).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    // Over TLS generations are coordinated as over plain connections.
    let decided = &decided[0];
    let coordinated = thread::scope(|scope| {
        let both = jobs.each_ref().map(|job| {
            let options = options(Some(own.clone()));
            scope.spawn(move || job.coordinate(decided, options).unwrap())
        });
        both.map(|one| one.join().unwrap())
    });
    works(&coordinated[0], &coordinated[1]);
}

#[test]
fn renewed_files_are_used_by_the_next_connection_and_broken_ones_are_not() {
    log();
    let folder = tempfile::tempdir().unwrap();
    let (first, next) = (Authority::new().unwrap(), Authority::new().unwrap());
    let issue =
        |authority: &Authority, stem: &str| authority.issue(folder.path(), stem, &Certificate::valid()).unwrap();
    let own = opened(&issue(&first, "renewed"));
    let of_first = opened(&issue(&first, "first"));
    let (leads, address) = leader(options(Some(own.clone())));
    let second = start(1, &address, options(Some(of_first.clone()))).join().unwrap().unwrap();
    let running = leads.join().unwrap().unwrap();
    // Broken files change nothing.
    let certificate = folder.path().join("renewed-cert.pem");
    std::fs::write(&certificate, "half of a certif").unwrap();
    for _ in 0..2 {
        let (leads, address) = leader(options(Some(own.clone())));
        let joined = start(1, &address, options(Some(of_first.clone()))).join().unwrap().unwrap();
        works(&leads.join().unwrap().unwrap(), &joined);
    }
    let warned = warnings("the certificate in use is kept");
    assert_eq!(warned.len(), 1, "{warned:?}");
    // All files of another authority.
    issue(&next, "renewed");
    let (leads, address) = leader(options(Some(own)));
    let text = refused(&address, options(Some(of_first)));
    assert!(text.contains("not of the authority that this process trusts"), "{text}");
    let of_next = opened(&issue(&next, "next"));
    let joined = start(1, &address, options(Some(of_next))).join().unwrap().unwrap();
    works(&leads.join().unwrap().unwrap(), &joined);
    // Connections that exist continue.
    works(&running, &second);
}

#[test]
fn files_that_cannot_be_used_are_told_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new().unwrap();
    let own = authority.issue(folder.path(), "own", &Certificate::valid()).unwrap();
    let other = Authority::new().unwrap().issue(folder.path(), "other", &Certificate::valid()).unwrap();
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let read = |files: [&Path; 3], name: &str| {
        let [ca, certificate, key] = files.map(text);
        let found = JobTls::from_vars(|variable| match variable {
            "DISTRIBUTE_TLS_CA" => Some(ca.clone()),
            "DISTRIBUTE_TLS_CERT" => Some(certificate.clone()),
            "DISTRIBUTE_TLS_KEY" => Some(key.clone()),
            "DISTRIBUTE_TLS_NAME" => Some(name.to_owned()),
            _ => None,
        });
        found.map(|found| found.is_some()).map_err(|error| {
            assert_eq!(error.failure_kind(), FailureKind::Configuration, "{error}");
            error.to_string()
        })
    };
    let files = |files: &Files| files.clone();
    let Files { authority: ca, certificate, key } = files(&own);
    assert_eq!(read([&ca, &certificate, &key], "distribute"), Ok(true));
    let cases: [(_, &str); 6] = [
        (read([&ca, &certificate, &other.key], "distribute"), "the certificate (DISTRIBUTE_TLS_CERT)"),
        (read([&other.authority, &certificate, &key], "distribute"), "it is not of the authority in"),
        (read([&ca, &certificate, &key], "job.example"), "it is for another name than job.example"),
        (read([&ca, &certificate, &key], "no name"), "DISTRIBUTE_TLS_NAME"),
        (read([&ca, &key, &key], "distribute"), "there is no certificate in it"),
        (read([&ca, &certificate, &certificate], "distribute"), "the private key (DISTRIBUTE_TLS_KEY)"),
    ];
    for (outcome, words) in cases {
        let error = outcome.unwrap_err();
        assert!(error.contains(words), "{error}");
    }
    let old = authority.issue(folder.path(), "old", &expired()).unwrap();
    let error = read([&old.authority, &old.certificate, &old.key], "distribute").unwrap_err();
    assert!(error.contains("it has expired") && error.contains("distribute certs"), "{error}");
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o640)).unwrap();
    let error = read([&ca, &certificate, &key], "distribute").unwrap_err();
    assert!(error.contains("others than its owner can read or change it (mode 0640)"), "{error}");
}
