//! Members show certificates of the job's authority over every transport.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use distribute_cluster::tls::TlsFiles;
use distribute_cluster::{JobSecret, JobTls};
use distribute_testkit::certificates::{Authority, Certificate, Files};

use super::tests::{connected, form_groups_and_sub_groups, group, kinds, kinds_of_connections, second_is_refused};
use super::*;
use crate::ReduceOp;

/// The deadline of groups that form, and of calls.
const SOON: Duration = Duration::from_secs(20);

fn opened(files: &Files) -> JobTls {
    JobTls::open(TlsFiles::new(&files.authority, &files.certificate, &files.key)).expect("files that were issued")
}

fn issued(authority: &Authority, folder: &Path, stem: &str, certificate: &Certificate) -> JobTls {
    opened(&authority.issue(folder, stem, certificate).expect("a folder"))
}

fn proofs(tls: &JobTls, secret: Option<&str>) -> Proofs {
    Proofs { tls: Some(tls.clone()), secret: secret.map(|text| JobSecret::new(text).expect("long enough")) }
}

#[test]
fn members_with_one_authority_form_groups_and_sub_groups() {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = Authority::new().expect("keys");
    let own: Vec<JobTls> =
        (0..4).map(|rank| issued(&authority, folder.path(), &format!("rank-{rank}"), &Certificate::valid())).collect();
    for (kind, secret) in
        kinds().into_iter().flat_map(|kind| [(kind, None), (kind, Some("the secret of this one job"))])
    {
        let all = [0, 1, 2, 3].map(|rank: usize| proofs(&own[rank], secret));
        form_groups_and_sub_groups(kind, &all, |proofs| proofs.tls.is_some());
    }
}

#[test]
fn a_member_with_another_certificate_or_none_is_refused_for_good_and_the_others_wait() {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = Authority::new().expect("keys");
    let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
    let issue = |stem: &str, certificate: Certificate| issued(&authority, folder.path(), stem, &certificate);
    let own = issue("own", Certificate::valid());
    let expired = issue("expired", Certificate::valid().within(now - 2 * hour, now - hour));
    let early = issue("early", Certificate::valid().within(now + hour, now + 2 * hour));
    let named = issue("named", Certificate::valid().name("another.job"));
    let other = issued(&Authority::new().expect("keys"), folder.path(), "other", &Certificate::valid());
    let plain = Proofs::default;
    let secret = || Proofs { secret: Some(JobSecret::new("the secret of this one job").expect("long")), tls: None };
    // The listener's proofs, the caller's, and what the caller is told.
    let tls = |tls: &JobTls| proofs(tls, None);
    let cases = [
        (tls(&own), tls(&expired), "the other side says that this process's certificate has expired"),
        (tls(&expired), tls(&own), "the certificate of the other side has expired"),
        (tls(&own), tls(&early), "that this process's certificate has expired, or is not yet valid"),
        (tls(&early), tls(&own), "the certificate of the other side is not yet valid"),
        (tls(&own), tls(&named), "says that this process's certificate is for another name"),
        (tls(&named), tls(&own), "the certificate of the other side is for another name"),
        (tls(&own), tls(&other), "is not of the authority that this process trusts"),
        (tls(&own), plain(), "this process does not use TLS, and the other side does"),
        (tls(&own), secret(), "this process does not use TLS, and the other side does"),
        (plain(), tls(&own), "this process uses TLS, and the other side does not"),
        (secret(), tls(&own), "this process uses TLS, and the other side does not"),
    ];
    thread::scope(|scope| {
        for (kind, (first, second, words)) in
            kinds_of_connections().flat_map(|kind| cases.clone().map(|case| (kind, case)))
        {
            scope.spawn(move || {
                let began = Instant::now();
                let words = [words, "DISTRIBUTE_TLS_CERT"];
                second_is_refused(kind, &[first, second], Duration::from_secs(4), words);
                assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
            });
        }
    });
}

#[test]
fn strangers_on_the_port_do_not_disturb_members() {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = Authority::new().expect("keys");
    let own = issued(&authority, folder.path(), "own", &Certificate::valid());
    for kind in kinds_of_connections() {
        let all = [proofs(&own, None), proofs(&own, None), proofs(&own, None)];
        let began = Instant::now();
        let strangers = std::sync::Mutex::new(Vec::new());
        let outcomes = connected(kind, &all, SOON, |address| {
            for turn in 0..24 {
                let garbage: &[u8] = match turn % 6 {
                    0 => b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n",
                    // The beginning of a handshake, and no more.
                    1 => &[0x16, 3, 1],
                    2 => &[0x16, 3, 1, 0, 4, 9, 9, 9, 9],
                    // A first message of 16 MiB.
                    3 => &[&[0x16, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff][..], &[7; 0x3ffc]].concat(),
                    4 => b"dst-tcp2................\x01\0\0\0\0\0\0\0",
                    _ => b"",
                };
                let mut stranger = TcpStream::connect(address).expect("it listens");
                // The other side may have hung up already.
                let _ = stranger.write_all(garbage);
                strangers.lock().expect("no panic").push(stranger);
            }
        });
        assert!(began.elapsed() < Duration::from_secs(9), "{kind:?} waited for strangers: {:?}", began.elapsed());
        thread::scope(|scope| {
            for (rank, transport) in outcomes.into_iter().enumerate() {
                scope.spawn(move || {
                    let mut values = [1u64 << rank];
                    group(transport, rank, 3, SOON).all_reduce(&mut values, ReduceOp::Sum).expect("all are there");
                    assert_eq!(values, [7], "{kind:?}");
                });
            }
        });
    }
}

#[test]
fn failures_of_members_are_told_as_without_tls() {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = Authority::new().expect("keys");
    let own = issued(&authority, folder.path(), "own", &Certificate::valid());
    let both = [proofs(&own, None), proofs(&own, None)];
    for kind in kinds() {
        // One leaves, and the other calls.
        let pair = |wait| {
            let mut transports = connected(kind, &both, SOON, |_| ());
            let second = group(transports.remove(1), 1, 2, wait);
            (group(transports.remove(0), 0, 2, wait), second)
        };
        let (first, second) = pair(SOON);
        drop(second);
        let error = first.barrier().expect_err("the other has left");
        assert!(error.to_string().contains("rank 1"), "{kind:?} {error}");
        // Calls that differ are an error on both.
        let (first, second) = pair(SOON);
        let differing = thread::scope(|scope| {
            let one = scope.spawn(|| first.all_reduce(&mut [1f32; 4], ReduceOp::Sum));
            let two = scope.spawn(|| second.all_reduce(&mut [1f32; 8], ReduceOp::Sum));
            [one, two].map(|call| call.join().expect("no panic"))
        });
        assert!(differing.iter().all(Result::is_err), "{kind:?} {differing:?}");
        // One that does not come is named at the deadline, and told why at its own call.
        let (first, second) = pair(Duration::from_millis(300));
        let error = first.barrier().expect_err("the other does not come");
        assert!(error.to_string().contains("rank 1"), "{kind:?} {error}");
        // What the first had sent before is enough for one barrier.
        let error = (0..2).find_map(|_| second.barrier().err()).expect("the group has failed");
        assert!(error.to_string().contains("rank 0"), "{kind:?} {error}");
    }
}

#[test]
fn a_group_that_forms_later_uses_the_renewed_certificate() {
    let folder = tempfile::tempdir().expect("a folder");
    let (authority, next) = (Authority::new().expect("keys"), Authority::new().expect("keys"));
    let own: Vec<JobTls> =
        (0..2).map(|rank| issued(&authority, folder.path(), &format!("rank-{rank}"), &Certificate::valid())).collect();
    let all: Vec<Proofs> = own.iter().map(|tls| proofs(tls, None)).collect();
    for kind in kinds_of_connections() {
        let running = connected(kind, &all, SOON, |_| ());
        let (tell, told) = mpsc::channel();
        thread::scope(|scope| {
            let mut continued = Vec::new();
            for (rank, transport) in running.into_iter().enumerate() {
                let (tell, (proceed, renewed)) = (tell.clone(), mpsc::channel());
                continued.push(proceed);
                scope.spawn(move || {
                    let group = group(transport, rank, 2, SOON);
                    group.barrier().expect("both are there");
                    tell.send(()).expect("it is awaited");
                    renewed.recv_timeout(SOON).expect("files are renewed");
                    // Connections that exist stay.
                    group.barrier().expect("both are there");
                });
            }
            (0..2).for_each(|_| told.recv_timeout(SOON).expect("members have met"));
            for rank in 0..2 {
                let stem = format!("rank-{rank}");
                next.issue(folder.path(), &stem, &Certificate::valid()).expect("a folder");
            }
            continued.iter().for_each(|proceed| proceed.send(()).expect("it is awaited"));
        });
        // Both have the next authority's, which one of the first would not accept.
        for outcome in connected(kind, &all, SOON, |_| ()) {
            outcome.expect("both are renewed");
        }
        for rank in 0..2 {
            authority.issue(folder.path(), &format!("rank-{rank}"), &Certificate::valid()).expect("a folder");
        }
    }
}
