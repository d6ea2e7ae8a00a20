//! Compressed files.

use std::io::Write as _;

use super::packing::Packing;
use super::*;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    ::zstd::encode_all(bytes, 1).unwrap()
}

type Pack = fn(&[u8]) -> Vec<u8>;
const BOTH: [(&str, Pack); 2] = [("gzip", gzip), ("zstd", zstd)];

/// The first lines of every format, as tools write them.
const UNREAD: [(&str, &[u8]); 3] = [
    ("bzip2", b"BZh91AY&SY\x01\x02\x03\x04"),
    ("lz4", b"\x04\x22\x4d\x18\x60\x40\x82\x01\x02\x03\x04\x05"),
    ("xz", b"\xfd7zXZ\x00\x00\x04\xe6\xd6\xb4\x46"),
];

fn records_of(path: &Path) -> Result<Vec<Vec<u8>>> {
    all(&Dataset::from_files([path]).read(TfRecords, ReadOptions::default()))
}

#[test]
fn record_files_in_gzip_zlib_and_zstd_have_their_records_in_all_parts() {
    let folder = tempfile::tempdir().unwrap();
    let plain = records(folder.path(), 5000);
    let expected = whole_and_parts(&plain, TfRecords);
    let path = folder.path().join("packed.tfrecord");
    let bytes = fs::read(&plain).unwrap();
    for pack in [gzip as Pack, zlib, zstd] {
        fs::write(&path, pack(&bytes)).unwrap();
        assert!(whole_and_parts(&path, TfRecords) == expected);
        fs::write(&path, pack(b"")).unwrap();
        assert_eq!(records_of(&path).unwrap().len(), 0);
    }
    // Two members, as `cat a.gz b.gz` writes them.
    for pack in [gzip as Pack, zlib] {
        fs::write(&path, [pack(&bytes[..100]), pack(b""), pack(&bytes[100..])].concat()).unwrap();
        assert!(whole_and_parts(&path, TfRecords) == expected);
        fs::write(&path, [&pack(&bytes)[..], b"what is no stream"].concat()).unwrap();
        let text = records_of(&path).unwrap_err().to_string();
        assert!(text.contains("data are damaged"), "{text}");
    }
    for (compression, magic) in [(Compression::Gzip, 0x1f), (Compression::Zlib, 0x78), (Compression::None, 8)] {
        let mut writer = TfRecordWriter::compressed(fs::File::create(&path).unwrap(), compression);
        for record in &expected.0 {
            writer.write(record).unwrap();
        }
        writer.flush().unwrap();
        writer.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap()[0], magic);
        assert!(records_of(&path).unwrap() == expected.0);
    }
}

#[test]
fn a_record_whose_length_looks_compressed_is_a_record() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.tfrecord");
    // Their lengths are the bytes 1f 8b 08 and 78 9c.
    for length in [0x08_8b1f, 0x9c78] {
        let mut writer = TfRecordWriter::new(fs::File::create(&path).unwrap());
        writer.write(&vec![7; length]).unwrap();
        writer.finish().unwrap();
        assert!(Packing::of(&fs::read(&path).unwrap()).or(Packing::zlib(&fs::read(&path).unwrap())).is_some());
        assert_eq!(records_of(&path).unwrap()[0].len(), length);
    }
}

#[test]
fn truncated_and_damaged_compressed_files_are_named_with_record_and_byte() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = fs::read(records(folder.path(), 5000)).unwrap();
    let path = folder.path().join("packed.tfrecord");
    for (name, pack) in [("gzip", gzip as Pack), ("zlib", zlib), ("zstd", zstd)] {
        let packed = pack(&bytes);
        fs::write(&path, &packed[..packed.len() / 2]).unwrap();
        let text = records_of(&path).unwrap_err().to_string();
        assert!(text.contains(&format!("the file is truncated: its {name} data do not end")), "{text}");
        let (skipped, options) = skipping();
        let some = all(&Dataset::from_files([&path]).read(TfRecords, options)).unwrap().len();
        assert!(some < 5000 && skipped.count() == 1, "{some}");
        let mut damaged = packed.clone();
        let middle = damaged.len() / 2;
        damaged[middle..middle + 30].fill(0xff);
        fs::write(&path, damaged).unwrap();
        let text = records_of(&path).unwrap_err().to_string();
        assert!(text.contains("packed.tfrecord, record ") && text.contains(" at byte "), "{text}");
    }
    // A length that a bomb promises is not allocated.
    let length = (i64::MAX as u64 - 1000).to_le_bytes();
    let mut header = length.to_vec();
    let crc = crc32c::crc32c(&length);
    header.extend(crc.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes());
    fs::write(&path, gzip(&[&header[..], b"rest"].concat())).unwrap();
    let text = records_of(&path).unwrap_err().to_string();
    assert!(text.contains("the file is truncated: 4 of the"), "{text}");
    // One that promises more than is there, of a record of another part, ends the part.
    let part = FileShard::part(&path, 1, 2);
    assert_eq!(TfRecords.open(&part).unwrap().count(), 0);
}

#[test]
fn compressed_texts_rows_samples_and_arrays_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: Vec<u8>| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let mut builder = ::tar::Builder::new(Vec::new());
    for (name, data) in [("1.cls", "0"), ("1.txt", "one"), ("2.cls", "1"), ("3.cls", "2"), ("4.cls", "3")] {
        let mut header = ::tar::Header::new_gnu();
        header.set_size(data.len() as u64);
        builder.append_data(&mut header, name, data.as_bytes()).unwrap();
    }
    let tar = builder.into_inner().unwrap();
    let samples = whole_and_parts(&write("plain.tar", tar.clone()), WebDataset);
    let idx = [&[0, 0, 8, 1, 0, 0, 0, 3][..], &[7, 8, 9]].concat();
    for (name, pack) in BOTH {
        let (whole, parts) = whole_and_parts(&write("lines.txt", pack(b"a\nb\nc\nd\n")), Lines);
        assert_eq!(
            (whole.join(""), parts),
            ("abcd".to_owned(), vec![vec!["a".into(), "d".into()], vec!["b".into()], vec!["c".into()]])
        );
        let (whole, parts) = whole_and_parts(&write("rows.csv", pack(b"x,y\n1,2\n3,4\n")), Csv::<(i32, i32)>::new());
        assert_eq!((whole, parts), (vec![(1, 2), (3, 4)], vec![vec![(1, 2)], vec![(3, 4)], vec![]]));
        assert_eq!(whole_and_parts(&write("shard.tar", pack(&tar)), WebDataset), samples);
        // The name does not decide.
        assert_eq!(read_idx(write("digits.idx.gz", pack(&idx))).unwrap().as_slice(), [7, 8, 9]);
        assert_eq!(read_idx(write("digits.idx.gz", idx.clone())).unwrap().as_slice(), [7, 8, 9]);
        let cut = pack(&idx);
        let text = read_idx(write("digits.idx", cut[..cut.len() - 1].to_vec())).map(|_| String::new());
        // gzip's last byte belongs to the length of its content; zstd has ended before it.
        assert!(
            name == "zstd" || text.unwrap_err().to_string().contains("digits.idx: the file is truncated: its gzip")
        );
        let long = [&idx[..], &[0; 1 << 20]].concat();
        let text = read_idx(write("digits.idx", pack(&long))).unwrap_err().to_string();
        assert!(text.contains("[3], and more elements are there"), "{text}");
    }
    for text in ["", "x", "x^2 is a square and no zlib", "BZh9"] {
        let path = write("short.txt", text.as_bytes().to_vec());
        let expected: Vec<&str> = Some(text).filter(|text| !text.is_empty()).into_iter().collect();
        assert_eq!(whole_and_parts(&path, Lines).0, expected);
    }
}

#[test]
fn compression_that_is_not_read_is_named_by_every_reader() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("rose")).unwrap();
    let path = folder.path().join("rose/data.png");
    fn problem<T: Send + 'static>(data: Dataset<T>) -> String {
        all(&data).err().unwrap().to_string()
    }
    let data = || Dataset::from_files([&path]);
    let options = ReadOptions::default;
    for (name, bytes) in UNREAD {
        fs::write(&path, bytes).unwrap();
        for text in [
            problem(data().read(Lines, options())),
            problem(data().read(Csv::<(i32, i32)>::new(), options())),
            problem(data().read(TfRecords, options())),
            problem(data().read(WebDataset, options())),
            read_idx(&path).unwrap_err().to_string(),
        ] {
            assert!(text.contains(&format!("data.png: it is compressed with {name}, which is not read")), "{text}");
        }
    }
    let images = ImageFolder::open(folder.path()).unwrap();
    for (name, bytes) in UNREAD
        .iter()
        .map(|(name, bytes)| (*name, bytes.to_vec()))
        .chain(BOTH.map(|(name, pack)| (name, pack(b"some content that is long enough to be a file of a format"))))
    {
        fs::write(&path, bytes).unwrap();
        for text in [
            problem(data().read(Parquet::new(), options())),
            problem(data().read(Arrow, options())),
            problem(images.dataset().read(images.images([2, 2]), options())),
            SafetensorsFile::open(&path).unwrap_err().to_string(),
        ] {
            assert!(text.contains(&format!("it is compressed with {name}; decompress it")), "{text}");
            assert!(text.contains("data.png"), "{text}");
        }
    }
}
