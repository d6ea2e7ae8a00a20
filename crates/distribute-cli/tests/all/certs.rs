//! `distribute certs` and `distribute run --tls` as users see them.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use distribute_cluster::JobTls;
use distribute_cluster::tls::TlsFiles;
use distribute_testkit::{Job, Outcome, Signal};

const DEADLINE: Duration = Duration::from_secs(60);

fn certs(args: &[&str]) -> Outcome {
    let job = Job::builder(env!("CARGO_BIN_EXE_distribute")).arg("certs").args(args);
    job.start().unwrap().wait(0, DEADLINE).unwrap()
}

fn opened(folder: &Path, name: &str) -> JobTls {
    let file = |end: &str| folder.join(format!("{name}.{end}"));
    JobTls::open(TlsFiles::new(folder.join("ca.pem"), file("pem"), file("key"))).unwrap()
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o777
}

#[test]
fn certificates_are_issued_shown_and_renewed_with_their_keys() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("certs");
    let dir = folder.to_str().unwrap();
    let created = certs(&["init", dir]);
    assert!(created.success() && created.stdout.contains("ca.pem"), "{created:?}");
    assert_eq!((mode(&folder.join("ca.key")), mode(&folder.join("ca.pem"))), (0o600, 0o644));
    let again = certs(&["init", dir]);
    assert!(again.code == Some(2) && again.stderr.contains("exists already"), "{again:?}");
    let issued = certs(&["issue", dir, "--name", "worker-0", "--host", "node1.example", "--host", "10.0.0.7"]);
    assert!(issued.success(), "{issued:?}");
    // What it prints gives a process its certificate.
    let tls = JobTls::from_vars(|name| {
        let line = issued.stdout.lines().find_map(|line| line.strip_prefix(&format!("{name}=")));
        line.map(str::to_owned)
    });
    assert!(tls.unwrap().is_some());
    assert_eq!(mode(&folder.join("worker-0.key")), 0o600);
    let other = certs(&["issue", dir, "--name", "worker-1", "--days", "30"]);
    assert!(other.success(), "{other:?}");
    let shown = certs(&["show", dir]);
    let lines: Vec<&str> = shown.stdout.lines().collect();
    assert!(lines.len() == 3 && lines[0].starts_with("ca "), "{shown:?}");
    assert!(lines[1].contains("7.0 days left") && lines[1].contains("distribute, worker-0, node1.example, 10.0.0.7"));
    assert!(lines[2].contains("30.0 days left"), "{shown:?}");
    // Nothing ends soon, and all are renewed on demand, with the keys and names that they have.
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let before = (read("worker-0.pem"), read("worker-0.key"));
    assert!(certs(&["renew", dir]).stdout.contains("nothing ends soon"));
    let renewed = certs(&["renew", dir, "--all"]);
    assert!(renewed.success() && renewed.stdout.contains("worker-0.pem") && !renewed.stdout.contains("ca.pem"));
    assert!(read("worker-0.pem") != before.0 && read("worker-0.key") == before.1);
    opened(&folder, "worker-0").check().unwrap();
    assert!(certs(&["show", dir]).stdout.contains("distribute, worker-0, node1.example, 10.0.0.7"));
    // What cannot be a certificate is told in words.
    for (args, words) in [
        (&["issue", dir, "--name", "ca"][..], "--name is not the name of a certificate"),
        (&["issue", dir, "--name", "../x"], "--name is not the name of a certificate"),
        (&["issue", dir, "--name", "worker-0"], "exists already"),
        (&["issue", dir, "--name", "w", "--host", "a b"], "host names and addresses"),
        (&["issue", home.path().to_str().unwrap(), "--name", "w"], "cannot read it"),
        (&["show", "/does/not/exist"], "the folder cannot be read"),
    ] {
        let outcome = certs(args);
        assert!(outcome.code == Some(2) && outcome.stderr.contains(words), "{args:?} {outcome:?}");
    }
}

#[test]
fn a_watch_renews_until_it_is_stopped() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("certs");
    let dir = folder.to_str().unwrap();
    assert!(certs(&["init", dir]).success() && certs(&["issue", dir, "--name", "w"]).success());
    let path = folder.join("w.pem");
    let first = std::fs::read(&path).unwrap();
    let watch = Job::builder(env!("CARGO_BIN_EXE_distribute"))
        .args(["certs", "renew", dir, "--all", "--watch", "--every", "1"]);
    let mut watch = watch.start().unwrap();
    let started = SystemTime::now();
    let mut seen = vec![first];
    while seen.len() < 3 {
        assert!(started.elapsed().unwrap() < DEADLINE);
        std::thread::sleep(Duration::from_millis(20));
        let now = std::fs::read(&path).unwrap();
        if seen.last() != Some(&now) {
            // Each is whole.
            opened(&folder, "w").check().unwrap();
            seen.push(now);
        }
    }
    watch.kill(0, Signal::TERM).unwrap();
    assert!(watch.wait(0, DEADLINE).unwrap().success());
}

#[test]
fn tasks_of_a_job_get_certificates_that_end_with_it() {
    let script = r#"
        stat -c %a "$DISTRIBUTE_TLS_KEY"; echo "$DISTRIBUTE_TLS_CERT"; cat "$DISTRIBUTE_TLS_CA" | head -1"#;
    let job =
        Job::builder(env!("CARGO_BIN_EXE_distribute")).args(["run", "--tls", "-n", "2", "--", "sh", "-c", script]);
    let outcome = job.start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.success(), "{outcome:?}");
    let paths: Vec<&str> =
        outcome.stdout.lines().filter_map(|line| line.split_once(" │ ")).map(|(_, text)| text).collect();
    assert_eq!(paths.iter().filter(|line| **line == "600").count(), 2, "{outcome:?}");
    assert_eq!(paths.iter().filter(|line| line.contains("BEGIN CERTIFICATE")).count(), 2, "{outcome:?}");
    let certificates: Vec<&&str> = paths.iter().filter(|line| line.ends_with(".pem")).collect();
    assert!(certificates.len() == 2 && certificates[0] != certificates[1], "{outcome:?}");
    assert!(certificates.iter().all(|path| !Path::new(path).exists()), "{certificates:?}");
    let several = ["run", "--tls", "-n", "2", "--nnodes", "2", "--rendezvous", "127.0.0.1:9", "--", "true"];
    let outcome =
        Job::builder(env!("CARGO_BIN_EXE_distribute")).args(several).start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.code == Some(2) && outcome.stderr.contains("--tls makes certificates for one host"), "{outcome:?}");
}
