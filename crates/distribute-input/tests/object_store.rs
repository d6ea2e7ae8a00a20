//! Datasets in stores of objects: what is read equals what is read from a disk.
#![cfg(all(feature = "object-store", feature = "tfrecord", feature = "csv", feature = "parquet"))]
#![expect(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use distribute_input::read::arrow::{ArrowWriter, Int64Array, RecordBatch};
use distribute_input::read::{
    BadRecords, Cache, Csv, ImageFolder, Lines, Parquet, ReadOptions, Skipped, TfRecordWriter, TfRecords, WebDataset,
    read_idx,
};
use distribute_input::{Dataset, Error, FileShard};
use distribute_storage::{Error as StoreError, Location};
use distribute_testkit::{RelayFault, with_object_server};
use distribute_types::ErrorClass;

const LIMIT: Duration = Duration::from_secs(240);

/// Writes record files of different lengths, the largest of several blocks of a store's reader.
fn record_files(folder: &Path) -> Vec<PathBuf> {
    let write = |name: &str, records: usize, bytes: usize| {
        let path = folder.join(name);
        let mut writer = TfRecordWriter::new(fs::File::create(&path).unwrap());
        for record in 0..records {
            writer.write(&vec![(record % 251) as u8; bytes + record % 7]).unwrap();
        }
        writer.finish().unwrap();
        path
    };
    vec![write("0.tfrecord", 200, 90_000), write("1.tfrecord", 0, 0), write("2.tfrecord", 1000, 3)]
}

fn upload(files: &[PathBuf], folder: &Location) {
    for path in files {
        let name = path.file_name().unwrap().to_str().unwrap();
        folder.join(name).write(fs::read(path).unwrap()).unwrap();
    }
}

fn read(data: Dataset<FileShard>, options: ReadOptions) -> Result<Vec<Vec<u8>>, Error> {
    data.read(TfRecords, options).iter().collect()
}

/// Returns a black picture.
fn png() -> Vec<u8> {
    let mut png = std::io::Cursor::new(Vec::new());
    image::RgbImage::new(2, 2).write_to(&mut png, image::ImageFormat::Png).unwrap();
    png.into_inner()
}

/// Returns the classes in a folder, and the class of each image.
fn labels(root: PathBuf, options: ReadOptions) -> (Vec<String>, Vec<i64>) {
    let images = ImageFolder::open(root).unwrap();
    let labels = images.dataset().read(images.images([2, 2]), options);
    (images.classes().to_vec(), labels.iter().map(|image| image.unwrap().1.as_slice()[0]).collect())
}

#[test]
fn record_files_in_a_store_equal_those_on_a_disk() {
    with_object_server(LIMIT, |relay| {
        let local = tempfile::tempdir().unwrap();
        let files = record_files(local.path());
        let folder = Location::open("s3://bucket/train").unwrap();
        upload(&files, &folder);
        let here = || Dataset::list_files(local.path(), ".tfrecord");
        let there = || Dataset::list_files(folder.url(), ".tfrecord");
        let cycle = || ReadOptions::default().cycle(3).block(5);
        let expected = read(here(), cycle()).unwrap();
        assert_eq!(expected.len(), 1200);
        assert!(read(there(), cycle()).unwrap() == expected);
        // Connections are cut, and the same comes.
        relay.set(RelayFault::CutAnswers { after_bytes: 3_000_000, times: 4 });
        assert!(read(there(), cycle()).unwrap() == expected);
        assert_eq!(relay.cuts(), 4);
        // Parts of a file.
        relay.set(RelayFault::None);
        let path = PathBuf::from(folder.join("0.tfrecord").url());
        let part = |path: PathBuf| FileShard::part(path, 1, 3);
        let records = |file: FileShard| -> Vec<Vec<u8>> {
            use distribute_input::read::RecordReader;
            TfRecords.open(&file).unwrap().map(Result::unwrap).collect()
        };
        assert!(records(part(path)) == records(part(files[0].clone())));
        // By copies, of which a later pass fetches none.
        let cached = tempfile::tempdir().unwrap();
        let cache = Cache::new(cached.path(), 1 << 30).unwrap();
        assert!(read(there(), cycle().cache(cache.clone())).unwrap() == expected);
        let copies = fs::read_dir(cached.path()).unwrap().count();
        assert_eq!(copies, 3);
        assert!(read(there(), cycle().cache(cache.clone())).unwrap() == expected);
        // Classes are the folders in the store, whatever the names of the copies.
        let flowers = Location::open("s3://bucket/flowers").unwrap();
        flowers.join("daisy/1.png").write(png()).unwrap();
        flowers.join("rose/1.png").write(png()).unwrap();
        assert_eq!(labels(flowers.url().into(), cycle().cache(cache)).1, [0, 1]);
        assert_eq!(fs::read_dir(cached.path()).unwrap().count(), copies + 2);
        // No copy fits, and objects are streamed.
        let small = tempfile::tempdir().unwrap();
        let cache = Cache::new(small.path(), 10).unwrap();
        assert!(read(there(), cycle().cache(cache)).unwrap() == expected);
        // A store that cannot be asked is not a damaged record, and nothing is skipped.
        relay.set(RelayFault::CutAnswers { after_bytes: 100, times: usize::MAX });
        let skipped = Skipped::default();
        let options = || cycle().bad_records(BadRecords::Skip(skipped.clone()));
        let error = read(Dataset::from_files([folder.join("0.tfrecord").url()]), options()).unwrap_err();
        assert!(error.is_retryable() && error.to_string().contains("s3://bucket/train/0.tfrecord"), "{error}");
        relay.set(RelayFault::None);
        let mut records =
            Dataset::from_files([folder.join("0.tfrecord").url()]).read(TfRecords, options()).iter().take(200);
        assert!(records.next().unwrap().is_ok());
        relay.set(RelayFault::CutAnswers { after_bytes: 100, times: usize::MAX });
        let last = records.find_map(Result::err).unwrap();
        assert!(last.is_retryable() && matches!(last, Error::File { .. }), "{last}");
        assert_eq!(skipped.count(), 0);
        relay.set(RelayFault::None);
        let missing = read(Dataset::list_files("s3://no-such-bucket/train", ""), cycle()).unwrap_err().to_string();
        assert!(missing.contains("the bucket does not exist"), "{missing}");
    });
}

/// Writes a compressed file to the store; returns its URL and its records.
fn compressed(folder: &str) -> (String, Vec<Vec<u8>>) {
    use distribute_input::read::Compression;
    use rand::{Rng, SeedableRng};

    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(7);
    let mut writer = TfRecordWriter::compressed(Vec::new(), Compression::Gzip);
    let mut records = Vec::new();
    for _ in 0..300 {
        // Content that does not shrink, so that the object has several blocks.
        let mut record = vec![0; 90_000];
        random.fill_bytes(&mut record);
        writer.write(&record).unwrap();
        records.push(record);
    }
    let file = Location::open(folder).unwrap().join("0.tfrecord.gz");
    file.write(writer.finish().unwrap()).unwrap();
    (file.url(), records)
}

#[test]
fn compressed_files_are_read_from_a_store_whose_connections_are_cut() {
    with_object_server(LIMIT, |relay| {
        let (url, expected) = compressed("s3://bucket/packed");
        let there = || Dataset::from_files([url.clone()]);
        assert!(read(there(), ReadOptions::default()).unwrap() == expected);
        relay.set(RelayFault::CutAnswers { after_bytes: 3_000_000, times: 4 });
        assert!(read(there(), ReadOptions::default()).unwrap() == expected);
        let skipped = Skipped::default();
        let options = || ReadOptions::default().bad_records(BadRecords::Skip(skipped.clone()));
        relay.set(RelayFault::None);
        let mut records = there().read(TfRecords, options()).iter();
        assert!(records.next().unwrap().is_ok());
        relay.set(RelayFault::CutAnswers { after_bytes: 100, times: usize::MAX });
        let last = records.find_map(Result::err).unwrap();
        assert!(last.is_retryable() && matches!(last, Error::File { .. }), "{last}");
        assert_eq!(skipped.count(), 0);
        relay.set(RelayFault::None);
    });
}

#[test]
fn a_compressed_file_that_cannot_be_read_from_a_store_is_not_a_damaged_one() {
    with_object_server(LIMIT, |relay| {
        let (url, _) = compressed("s3://bucket/packed");
        let there = || Dataset::from_files([url.clone()]);
        let skipped = Skipped::default();
        let options = || ReadOptions::default().bad_records(BadRecords::Skip(skipped.clone()));
        relay.set(RelayFault::CutAnswers { after_bytes: 100, times: usize::MAX });
        let error = read(there(), options()).unwrap_err();
        assert!(error.is_retryable() && error.to_string().contains("s3://bucket/packed/0.tfrecord.gz"), "{error}");
        let rows = there().read(Csv::<(i64, i64)>::new(), options());
        assert!(rows.iter().next().unwrap().unwrap_err().is_retryable());
        assert_eq!(skipped.count(), 0);
        relay.set(RelayFault::None);
    });
}

#[test]
fn every_format_is_read_from_a_store_as_from_a_disk() {
    let local = tempfile::tempdir().unwrap();
    let folder = Location::open("memory://formats/data").unwrap();
    let put = |name: &str, bytes: &[u8]| {
        let path = local.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        folder.join(name).write(bytes.to_vec()).unwrap();
        (path, folder.join(name).url())
    };
    let (here, there) = put("lines.txt", b"a\nb\n\nc");
    let lines = |path: PathBuf| -> Vec<String> {
        Dataset::from_files([path]).read(Lines, ReadOptions::default()).iter().map(Result::unwrap).collect()
    };
    assert_eq!(lines(there.into()), lines(here));
    let (here, there) = put("rows.csv", b"x,y\n1,2\n3,4\n");
    let rows = |path: PathBuf| -> Vec<(i64, i64)> {
        let rows = Dataset::from_files([path]).read(Csv::new(), ReadOptions::default());
        rows.iter().map(Result::unwrap).collect()
    };
    assert_eq!(rows(there.into()), rows(here));

    let batch = RecordBatch::try_from_iter([("n", Arc::new(Int64Array::from_iter_values(0..5000)) as _)]).unwrap();
    let mut parquet = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut parquet, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let (here, there) = put("columns.parquet", &parquet);
    let batches = |path: PathBuf| -> Vec<RecordBatch> {
        Dataset::from_files([path]).read(Parquet::new(), ReadOptions::default()).iter().map(Result::unwrap).collect()
    };
    assert_eq!(batches(there.into()), batches(here));

    let mut tar = tar::Builder::new(Vec::new());
    for (name, content) in [("1.txt", "one"), ("1.cls", "0"), ("2.txt", "two")] {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, name, content.as_bytes()).unwrap();
    }
    let (here, there) = put("samples.tar", &tar.into_inner().unwrap());
    let samples = |path: PathBuf| -> Vec<_> {
        Dataset::from_files([path]).read(WebDataset, ReadOptions::default()).iter().map(Result::unwrap).collect()
    };
    assert_eq!(samples(there.into()), samples(here));

    let (here, there) = put("digits.idx", &[0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]);
    assert_eq!(read_idx(there).unwrap().as_slice(), read_idx(here).unwrap().as_slice());

    put("images/rose/1.png", &png());
    put("images/daisy/1.png", &png());
    put("images/daisy/notes.txt", b"");
    let there = || PathBuf::from(folder.join("images").url());
    let expected = labels(local.path().join("images"), ReadOptions::default());
    assert_eq!(expected, (vec!["daisy".to_owned(), "rose".to_owned()], vec![0, 1]));
    assert_eq!(labels(there(), ReadOptions::default()), expected);
    let cached = tempfile::tempdir().unwrap();
    let cache = Cache::new(cached.path(), 1 << 20).unwrap();
    assert_eq!(labels(there(), ReadOptions::default().cache(cache)), expected);
}

#[test]
fn urls_of_files_are_paths_and_missing_objects_are_told_from_missing_answers() {
    let local = tempfile::tempdir().unwrap();
    record_files(local.path());
    let url = format!("file://{}", local.path().display());
    assert_eq!(read(Dataset::list_files(&url, ".tfrecord"), ReadOptions::default()).unwrap().len(), 1200);
    assert_eq!(read(Dataset::from_files([format!("{url}/2.tfrecord")]), ReadOptions::default()).unwrap().len(), 1000);
    let gone = || Dataset::from_files(["memory://gone/a.tfrecord"]);
    let text = read(gone(), ReadOptions::default()).unwrap_err().to_string();
    assert!(text.starts_with("memory://gone/a.tfrecord: there is no such object"), "{text}");
    let skipped = Skipped::default();
    let options = ReadOptions::default().bad_records(BadRecords::Skip(skipped.clone()));
    assert_eq!(read(gone(), options).unwrap().len(), 0);
    assert_eq!(skipped.count(), 1);
    let text = read(Dataset::list_files("memory://gone/folder", ""), ReadOptions::default()).unwrap_err().to_string();
    assert!(text.contains("memory://gone/folder"), "{text}");
    let wrong = read(Dataset::from_files(["ftp://host/a"]), ReadOptions::default()).unwrap_err();
    assert!(
        matches!(&wrong, Error::File { source, .. } if matches!(StoreError::of(source), Some(StoreError::Url { .. })))
    );
}
