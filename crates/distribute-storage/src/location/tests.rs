//! Names, listings and conditional writes, in the memory of the process.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::odd::Odd;

fn at(path: &str) -> Location {
    Location::open(&format!("memory://location/{path}")).unwrap()
}

#[test]
fn urls_are_checked_and_secrets_in_them_not_repeated() {
    for (url, words) in [
        ("s3:/bucket", "not a URL"),
        ("ftp://bucket/a", "not a store"),
        ("s3://", "bucket"),
        ("s3:///a", "bucket"),
        ("s3://bucket:80/a", "bucket"),
        ("s3://bucket/a/../b", "path is not valid"),
        ("s3://bucket/a//b", "path is not valid"),
    ] {
        let text = Location::open(url).unwrap_err().to_string();
        assert!(text.contains(words) && text.contains("://") | (words == "not a URL"), "{url}: {text}");
    }
    for url in ["s3://AKIA:hunter2@bucket/a", "az://container/a?sig=hunter2", "s3://bucket?hunter2"] {
        let text = format!("{:?}", Location::open(url).unwrap_err());
        assert!(!text.contains("hunter2") && text.contains("environment"), "{text}");
    }
}

#[test]
fn names_are_joined_and_listed_as_they_are() {
    let folder = at("names");
    assert_eq!(folder.url(), "memory://location/names");
    assert_eq!(folder.join("a/b c%20d#1").url(), "memory://location/names/a/b c%20d#1");
    assert_eq!(folder.join("a").name(), "a");
    assert_eq!(at("").join("x").url(), "memory://location/x");
    for name in ["b", "a/1", "a/b c%20d#1", "c"] {
        folder.join(name).write(name.to_owned()).unwrap();
    }
    at("names2").write("not below").unwrap();
    let names = |listed: Vec<Listed>| {
        listed.into_iter().map(|entry| (entry.name, entry.meta.map(|meta| meta.bytes))).collect::<Vec<_>>()
    };
    let entry = |name: &str, bytes| (name.to_owned(), bytes);
    assert_eq!(names(folder.list().unwrap()), [entry("a", None), entry("b", Some(1)), entry("c", Some(1))]);
    let below = names(folder.list_below().unwrap());
    assert_eq!(below.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a/1", "a/b c%20d#1", "b", "c"]);
    for (name, _) in below {
        assert_eq!(folder.join(&name).read(100).unwrap(), name);
    }
    assert_eq!(names(at("none").list().unwrap()), []);
}

#[test]
fn one_of_several_creates_an_object() {
    let place = at("create/lock");
    let won: Vec<bool> = std::thread::scope(|scope| {
        let tries = (0..8).map(|writer| {
            let place = &place;
            scope.spawn(move || match place.create(format!("writer {writer}")) {
                Ok(()) => true,
                Err(Error::Exists { .. }) => false,
                Err(error) => panic!("{error}"),
            })
        });
        tries.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(won.iter().filter(|won| **won).count(), 1);
    // As if the answer to an attempt had been lost.
    let content = place.read(100).unwrap();
    place.create(content).unwrap();
}

#[test]
fn objects_are_read_copied_and_removed_within_limits() {
    let place = at("one/a");
    assert!(matches!(place.read(10), Err(Error::NotFound { .. })));
    assert_eq!(place.meta().unwrap(), None);
    assert!(!place.exists().unwrap() && !at("one").exists().unwrap());
    place.write("0123456789").unwrap();
    assert!(place.exists().unwrap() && at("one").exists().unwrap() && !at("on").exists().unwrap());
    assert!(matches!(place.read(9), Err(Error::TooLarge { bytes: 10, most: 9, .. })));
    let version = place.meta().unwrap().unwrap();
    assert_eq!(place.read_range(2..5, &version).unwrap(), "234");
    assert!(matches!(place.read_range(8..12, &version), Err(Error::TooLarge { bytes: 12, most: 10, .. })));
    place.copy(&at("one/b")).unwrap();
    assert_eq!(at("one/b").read(10).unwrap(), "0123456789");
    assert!(matches!(place.copy(&Location::open("memory://elsewhere/b").unwrap()), Err(Error::Url { .. })));
    place.delete().unwrap();
    place.delete().unwrap();
    assert!(!place.exists().unwrap());
}

#[test]
fn neither_debug_nor_the_error_of_a_setting_shows_a_credential() {
    let variables = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    };
    let given = variables(&[("AWS_ACCESS_KEY_ID", "AKIAHUNTER2"), ("AWS_SECRET_ACCESS_KEY", "hunter2secret")]);
    let place = Location::with("s3://bucket/a", &given).unwrap();
    assert_eq!(format!("{place:?}"), "Location(s3://bucket/a)");
    let given =
        variables(&[("AZURE_STORAGE_ACCOUNT_NAME", "account"), ("AZURE_STORAGE_ACCOUNT_KEY", "not base64: hunter2!")]);
    let text = Location::with("az://container/a", &given).unwrap_err().to_string();
    assert!(!text.contains("hunter2") && text.contains("AZURE_STORAGE_ACCOUNT_KEY"), "{text}");
    let text = Location::with("gs://b/a", &variables(&[("GOOGLE_SERVICE_ACCOUNT_KEY", "{hunter2")])).unwrap_err();
    assert!(!text.to_string().contains("hunter2") && text.to_string().contains("gs://b"), "{text}");
    let given = variables(&[("AWS_ALLOW_HTTP", "perhaps")]);
    let text = Location::with("s3://bucket/a", &given).unwrap_err().to_string();
    assert!(text.contains("perhaps") && text.contains("s3://bucket"), "{text}");
}

#[test]
fn an_object_is_not_written_over_in_a_store_that_overlooks_conditions() {
    let store = Arc::new(Odd { overlooks_conditions: true, ..Odd::default() });
    let place = store.at("a", u64::MAX);
    place.create("first").unwrap();
    assert!(matches!(place.create("other"), Err(Error::Exists { .. })));
    assert!(matches!(place.create("shorter one"), Err(Error::Exists { .. })));
    place.create("first").unwrap();
    assert_eq!(place.read(10).unwrap(), "first");
}

#[test]
fn a_credential_that_may_only_write_creates_and_uploads() {
    let store = Arc::new(Odd { is_write_only: true, ..Odd::default() });
    store.at("created", u64::MAX).create("first").unwrap();
    let mut upload = store.at("uploaded", u64::MAX).upload().unwrap();
    upload.push("content").unwrap();
    upload.finish().unwrap();
    let names: Vec<String> = store.at("", u64::MAX).list().unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, ["created", "uploaded"]);
}

#[test]
fn an_answer_that_is_short_once_is_asked_for_again() {
    let store = Arc::new(Odd { short: AtomicUsize::new(1), ..Odd::default() });
    let place = store.at("a", u64::MAX);
    place.write("0123456789").unwrap();
    assert_eq!(place.read(10).unwrap(), "0123456789");
    store.short.store(1, Ordering::SeqCst);
    let version = place.meta().unwrap().unwrap();
    assert_eq!(place.read_range(2..5, &version).unwrap(), "234");
    assert_eq!(store.short.load(Ordering::SeqCst), 0);
}

#[test]
fn an_object_too_large_for_the_stores_own_copy_is_copied_in_parts() {
    let store = Arc::new(Odd { most_copied: Some(1000), ..Odd::default() });
    let bytes: Vec<u8> = (0..PART_BYTES + 5).map(|at| (at % 251) as u8).collect();
    let (from, to, mut parts) = (store.at("from", 1000), store.at("to", 1000), 0);
    from.write(bytes.clone()).unwrap();
    from.copy_with_progress(&to, || parts += 1).unwrap();
    assert!(to.read(1 << 30).unwrap() == bytes && parts == 2);
    from.write(vec![7; 1000]).unwrap();
    from.copy_with_progress(&to, || parts += 1).unwrap();
    assert_eq!((to.read(1000).unwrap().as_ref(), parts), (&[7; 1000][..], 2));
    assert!(matches!(store.at("none", 1000).copy(&to), Err(Error::NotFound { .. })));
}
