//! Against a server that speaks S3's protocol.

use std::io::Read;
use std::time::Duration;

use distribute_storage::{Cache, Error, Location, ObjectReader, PART_BYTES};
use distribute_testkit::{RelayFault, with_object_server};

const LIMIT: Duration = Duration::from_secs(240);

fn content(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 % 251) as u8).collect()
}

fn upload(place: &Location, bytes: &[u8]) -> Result<(), Error> {
    let mut upload = place.upload()?;
    for part in bytes.chunks(PART_BYTES) {
        upload.push(part.to_vec())?;
    }
    upload.finish()
}

#[test]
fn objects_are_written_read_listed_and_removed() {
    with_object_server(LIMIT, |_| {
        let folder = Location::open("s3://bucket/folder").unwrap();
        assert!(folder.list().unwrap().is_empty() && !folder.exists().unwrap());
        let bytes = content(PART_BYTES + 12345);
        upload(&folder.join("large"), &bytes).unwrap();
        folder.join("small").write("small").unwrap();
        folder.join("below/one").write("").unwrap();
        let names: Vec<String> = folder.list().unwrap().into_iter().map(|entry| entry.name).collect();
        assert_eq!(names, ["below", "large", "small"]);
        assert!(folder.join("large").read(1 << 30).unwrap() == bytes);
        let mut read = Vec::new();
        ObjectReader::open(&folder.join("large")).unwrap().read_to_end(&mut read).unwrap();
        assert!(read == bytes);
        folder.join("large").copy(&folder.join("copy")).unwrap();
        assert_eq!(folder.join("copy").meta().unwrap().unwrap().bytes, bytes.len() as u64);
        for entry in folder.list_below().unwrap() {
            folder.join(&entry.name).delete().unwrap();
        }
        assert!(!folder.exists().unwrap());
        // More than one page of a listing.
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let folder = folder.clone();
                scope.spawn(move || {
                    (0..260).for_each(|at| folder.join(&format!("many/{thread}-{at}")).write("x").unwrap());
                });
            }
        });
        assert_eq!(folder.join("many").list().unwrap().len(), 1040);
    });
}

#[test]
fn one_of_several_writers_creates_an_object_also_if_answers_are_lost() {
    with_object_server(LIMIT, |relay| {
        let place = Location::open("s3://bucket/lock").unwrap();
        place.create("one").unwrap();
        assert!(matches!(place.create("two"), Err(Error::Exists { .. })));
        assert_eq!(place.read(10).unwrap(), "one");
        // The first answer does not arrive.
        let place = Location::open("s3://bucket/lost").unwrap();
        relay.set(RelayFault::CutAnswers { after_bytes: 20, times: 1 });
        place.create("mine").unwrap();
        assert_eq!((relay.cuts(), place.read(10).unwrap().as_ref()), (1, "mine".as_bytes()));
    });
}

#[test]
fn cut_connections_are_repeated_and_slow_ones_waited_for() {
    with_object_server(LIMIT, |relay| {
        let (place, bytes) = (Location::open("s3://bucket/cut").unwrap(), content(2 * PART_BYTES + 5));
        relay.set(RelayFault::CutRequests { after_bytes: 7_000_000, times: 3 });
        upload(&place, &bytes).unwrap();
        assert_eq!(relay.cuts(), 3);
        relay.set(RelayFault::CutAnswers { after_bytes: 9_000_000, times: 3 });
        let mut read = Vec::new();
        ObjectReader::open(&place).unwrap().read_to_end(&mut read).unwrap();
        assert!(read == bytes && relay.cuts() == 3);
        relay.set(RelayFault::Slow(Duration::from_millis(1)));
        assert!(place.read(1 << 30).unwrap() == bytes);
    });
}

#[test]
fn an_object_whose_upload_stays_cut_is_as_it_was() {
    with_object_server(LIMIT, |relay| {
        let (place, bytes) = (Location::open("s3://bucket/stays-cut").unwrap(), content(2 * PART_BYTES + 5));
        upload(&place, &bytes).unwrap();
        relay.set(RelayFault::CutRequests { after_bytes: 1_000_000, times: usize::MAX });
        let error = upload(&place, &content(PART_BYTES)).unwrap_err();
        let text = error.to_string();
        assert!(error.is_retryable() && text.contains("s3://bucket/stays-cut"), "{text}");
        relay.set(RelayFault::CutAnswers { after_bytes: 1000, times: usize::MAX });
        let error = place.read(1 << 30).unwrap_err();
        assert!(error.is_retryable(), "{error}");
        relay.set(RelayFault::None);
        assert!(place.read(1 << 30).unwrap() == bytes);
    });
}

#[test]
fn a_missing_bucket_is_named() {
    with_object_server(LIMIT, |_| {
        let folder = Location::open("s3://no-such-bucket/run").unwrap();
        let errors = [
            folder.list().unwrap_err(),
            folder.join("a").write("x").unwrap_err(),
            folder.join("a").read(1).unwrap_err(),
        ];
        for error in errors {
            let text = error.to_string();
            assert!(matches!(error, Error::NoBucket { .. }) && text.contains("s3://no-such-bucket/run"), "{text}");
            assert!(!text.contains("test-secret"));
        }
    });
}

#[test]
fn copies_are_fetched_once_and_anew_after_a_change() {
    with_object_server(LIMIT, |relay| {
        let local = tempfile::tempdir().unwrap();
        let cache = Cache::new(local.path(), 1 << 30).unwrap();
        let (place, bytes) = (Location::open("s3://bucket/data/train.bin").unwrap(), content(9_000_000));
        place.write(bytes.clone()).unwrap();
        // Cut in the middle: no part of a copy is taken for a whole one.
        relay.set(RelayFault::CutAnswers { after_bytes: 100_000, times: usize::MAX });
        assert!(cache.fetch(&place).unwrap_err().is_retryable());
        relay.set(RelayFault::None);
        let read = || std::fs::read(cache.fetch(&place).unwrap().unwrap().path()).unwrap();
        assert!(read() == bytes);
        relay.set(RelayFault::CutAnswers { after_bytes: 100_000, times: usize::MAX });
        assert!(read() == bytes);
        relay.set(RelayFault::None);
        place.write(content(100)).unwrap();
        assert!(read() == content(100));
    });
}
