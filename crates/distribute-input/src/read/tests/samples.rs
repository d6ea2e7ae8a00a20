//! Samples in tar files.

use super::*;

#[test]
fn samples_of_tar_files_are_runs_of_one_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shard.tar");
    let mut builder = ::tar::Builder::new(fs::File::create(&path).unwrap());
    for (name, data) in [("a/1.cls", "0"), ("a/1.seg.png", "x"), ("a/2.cls", "1"), ("b/2.cls", "2")] {
        let mut header = ::tar::Header::new_gnu();
        header.set_size(data.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        builder.append_data(&mut header, name, data.as_bytes()).unwrap();
    }
    builder.finish().unwrap();
    let (whole, parts) = whole_and_parts(&path, WebDataset);
    let keys: Vec<&str> = whole.iter().map(|sample| sample.key.as_str()).collect();
    assert_eq!(keys, ["a/1", "a/2", "b/2"]);
    assert_eq!(whole[0].files["seg.png"], b"x");
    assert_eq!(parts, [[whole[0].clone()], [whole[1].clone()], [whole[2].clone()]]);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..3 * 512 + 100]).unwrap();
    let (skipped, options) = skipping();
    all(&Dataset::from_files([&path]).read(WebDataset, options)).unwrap();
    assert!(skipped.count() == 1 && skipped.first()[0].contains("shard.tar, record 0"), "{:?}", skipped.first());
}

/// An archive of entries with a type, a path, and their content.
fn archive(entries: &[(::tar::EntryType, &str, &[u8])]) -> Vec<u8> {
    let mut builder = ::tar::Builder::new(Vec::new());
    for (kind, path, content) in entries {
        let mut header = ::tar::Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o644);
        if kind.is_symlink() || kind.is_hard_link() {
            header.set_size(0);
            builder.append_link(&mut header, path, "a/1.cls").unwrap();
        } else {
            header.set_size(content.len() as u64);
            if kind.is_gnu_sparse() {
                header.as_gnu_mut().unwrap().set_real_size(0);
            }
            if path.len() > 100 {
                // GNU's long names.
                builder.append_data(&mut header, path, *content).unwrap();
            } else {
                // The builder's own way of setting a path removes "./".
                header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
                header.set_cksum();
                builder.append(&header, *content).unwrap();
            }
        }
    }
    builder.into_inner().unwrap()
}

fn keys(samples: &[Sample]) -> Vec<(&str, Vec<&str>)> {
    samples.iter().map(|one| (one.key.as_str(), one.files.keys().map(String::as_str).collect())).collect()
}

#[test]
fn samples_are_named_as_webdataset_names_them() {
    use ::tar::EntryType;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shard.tar");
    let long = format!("{}/{}.seg.png", "folder.of.dots".repeat(10), "name".repeat(30));
    let file = |path: &'static str| (EntryType::Regular, path, &b"x"[..]);
    let entries = [
        (EntryType::Directory, "a/", &b""[..]),
        file("__index__/0.json"),
        file("__meta__"),
        file("a/1.CLS"),
        (EntryType::Symlink, "a/1.link", b""),
        (EntryType::Link, "a/1.hard", b""),
        (EntryType::Continuous, "a/1.Seg.PNG", b"x"),
        file("README"),
        file("a/.hidden"),
        file("a/._2.cls"),
        file("a.b/2.tar.gz"),
        (EntryType::Regular, &long, b"x"),
        file("./3.cls"),
        file("3.cls"),
    ];
    fs::write(&path, archive(&entries)).unwrap();
    let (whole, parts) = whole_and_parts(&path, WebDataset);
    let long_key = long.split_at(long.len() - ".seg.png".len()).0;
    let expected = [
        ("a/1", vec!["cls", "seg.png"]),
        ("a.b/2", vec!["tar.gz"]),
        (long_key, vec!["seg.png"]),
        ("./3", vec!["cls"]),
        ("3", vec!["cls"]),
    ];
    assert_eq!(keys(&whole), expected);
    assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 1]);

    let mut builder = ::tar::Builder::new(Vec::new());
    builder.append_pax_extensions([("path", long.as_bytes())]).unwrap();
    let mut header = ::tar::Header::new_ustar();
    header.set_size(1);
    builder.append_data(&mut header, "short.cls", &b"x"[..]).unwrap();
    fs::write(&path, builder.into_inner().unwrap()).unwrap();
    assert_eq!(keys(&whole_and_parts(&path, WebDataset).0), [(long_key, vec!["seg.png"])]);
}

#[test]
fn an_archive_without_its_end_mark_is_truncated_also_between_two_files() {
    use ::tar::EntryType;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shard.tar");
    let entries = ["1.cls", "1.txt", "2.cls", "2.txt"].map(|path| (EntryType::Regular, path, &b"x"[..]));
    let bytes = archive(&entries);
    // Each entry has two blocks, and one block of the mark at the end is enough.
    let end = 8 * 512;
    for (length, expected, record, byte) in
        [(end, 1, 1, 2048), (end - 1024, 1, 1, 2048), (end - 2048, 0, 0, 0), (0, 0, 0, 0), (end + 512, 2, 0, 0)]
    {
        fs::write(&path, &bytes[..length]).unwrap();
        let (skipped, options) = skipping();
        let samples = all(&Dataset::from_files([&path]).read(WebDataset, options)).unwrap();
        assert_eq!(samples.len(), expected, "{length} bytes");
        let text = skipped.first().concat();
        let named = text.contains(&format!("shard.tar, record {record} at byte {byte}: the file is truncated"));
        assert_eq!(named, length <= end, "{length} bytes: {text}");
    }
}

#[test]
fn a_sample_with_two_files_of_one_name_or_a_sparse_one_is_bad_and_others_are_read() {
    use ::tar::EntryType;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shard.tar");
    let entries = [
        (EntryType::Regular, "1.cls", &b"0"[..]),
        (EntryType::Regular, "1.CLS", b"1"),
        (EntryType::Regular, "2.cls", b"2"),
        (EntryType::GNUSparse, "3.cls", b""),
        (EntryType::Regular, "4.cls", b"4"),
    ];
    fs::write(&path, archive(&entries)).unwrap();
    let (skipped, options) = skipping();
    let samples = all(&Dataset::from_files([&path]).read(WebDataset, options)).unwrap();
    assert_eq!(keys(&samples), [("2", vec!["cls"]), ("4", vec!["cls"])]);
    let first = skipped.first();
    assert!(first[0].contains("shard.tar, record 0 at byte 0: the sample 1 has two files named cls"), "{first:?}");
    assert!(first[1].contains("record 2 at byte 3072: 3.cls is stored as a sparse file"), "{first:?}");
}
