//! Decoders of files, for fuzzers and for the replay of their corpora. Not part of the public interface.
//!
//! Each function decodes its input, checks what it decoded, and returns whether the input was accepted. The crate has
//! them in its tests, and in builds by cargo-fuzz, which sets `cfg(fuzzing)`.

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};

use crate::FileShard;
use crate::read::RecordReader;

/// Most records that are read of a file: compressed ones may have very many.
const MOST_RECORDS: usize = 500;

thread_local! {
    /// The file of this thread.
    static FILE: RefCell<File> = RefCell::new(File(std::env::temp_dir().join(format!(
        "distribute-fuzz-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ))));
}

/// A file that is removed at the end.
struct File(PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn with_file<R>(bytes: &[u8], read: impl FnOnce(&Path) -> R) -> R {
    FILE.with_borrow_mut(|file| {
        fs::write(&file.0, bytes).expect("the temporary folder can be written");
        read(&file.0)
    })
}

/// Reads a file whole and in three parts. Without bad records, the parts have as many together.
fn records<R: RecordReader>(reader: &R, path: &Path) -> Option<Vec<R::Record>> {
    let part = |part, parts| {
        let shard = FileShard::part(path, part, parts);
        let (mut good, mut bad) = (Vec::new(), false);
        for record in reader.open(&shard).ok()?.take(MOST_RECORDS) {
            match record {
                Ok(record) => good.push(record),
                Err(_) => bad = true,
            }
        }
        Some((good, bad))
    };
    let (whole, bad) = part(0, 1)?;
    if !bad && whole.len() < MOST_RECORDS {
        let parts: usize = (0..3).map(|index| part(index, 3).map_or(0, |(good, _)| good.len())).sum();
        assert_eq!(parts, whole.len());
    }
    (!bad || !whole.is_empty()).then_some(whole)
}

/// TFRecord files, as they are and compressed, and the examples in them; also a record without the file around it.
#[cfg(feature = "tfrecord")]
pub fn tfrecord(bytes: &[u8]) -> bool {
    use crate::read::{TfRecordWriter, TfRecords};
    let alone = example(bytes);
    let Some(records) = with_file(bytes, |path| records(&TfRecords, path)) else { return alone };
    for record in &records {
        example(record);
    }
    let mut writer = TfRecordWriter::new(Vec::new());
    records.iter().try_for_each(|record| writer.write(record)).expect("memory can be written");
    let written = writer.finish().expect("memory can be written");
    let again = with_file(&written, |path| self::records(&TfRecords, path));
    assert!(records.is_empty() || again.as_ref() == Some(&records));
    alone || !records.is_empty()
}

#[cfg(feature = "tfrecord")]
fn example(bytes: &[u8]) -> bool {
    use crate::read::{Example, Feature};
    let Ok(example) = Example::decode(bytes) else { return false };
    let again = Example::decode(&example.encode()).expect("it was encoded");
    let number = example.floats("a").map_or(0, <[f32]>::len);
    assert_eq!(again.floats("a").map_or(0, <[f32]>::len), number);
    for name in ["a", "label", ""] {
        let same = match (example.get(name), again.get(name)) {
            // Numbers may not equal themselves.
            (Some(Feature::Float(a)), Some(Feature::Float(b))) => {
                a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits()))
            }
            (a, b) => a == b,
        };
        assert!(same);
        let values = [example.int64s(name).map(<[i64]>::len), example.bytes(name).map(<[Vec<u8>]>::len)];
        // Packed numbers have a byte each at least, and texts two.
        assert!(values.into_iter().flatten().all(|count| count <= bytes.len()));
    }
    !bytes.is_empty()
}

/// IDX files.
#[cfg(feature = "idx")]
pub fn idx(bytes: &[u8]) -> bool {
    let Ok(array) = with_file(bytes, |path| crate::read::read_idx(path)) else { return false };
    assert_eq!(array.shape().iter().product::<usize>(), array.as_slice().len());
    true
}

/// Samples in tar files.
#[cfg(feature = "webdataset")]
pub fn webdataset(bytes: &[u8]) -> bool {
    let samples = with_file(bytes, |path| records(&crate::read::WebDataset, path));
    samples.is_some_and(|samples| {
        for sample in &samples {
            assert!(!sample.key.is_empty());
            assert!(sample.files.keys().all(|extension| extension.to_lowercase() == *extension));
        }
        !samples.is_empty()
    })
}

/// Rows of CSV files, and lines.
#[cfg(feature = "csv")]
pub fn csv(bytes: &[u8]) -> bool {
    use crate::read::{Csv, Lines};
    with_file(bytes, |path| {
        let lines = records(&Lines, path);
        assert!(lines.is_none_or(|lines| lines.iter().all(|line| !line.contains('\n'))));
        let rows = records(&Csv::<(f32, i64, String)>::new(), path);
        let texts = records(&Csv::<Vec<String>>::new().has_headers(false).delimiter(b';'), path);
        rows.is_some_and(|rows| !rows.is_empty()) || texts.is_some_and(|texts| texts.len() > 1)
    })
}

/// Safetensors files.
#[cfg(feature = "safetensors")]
pub fn safetensors_file(bytes: &[u8]) -> bool {
    use crate::read::SafetensorsFile;
    let Ok(file) = with_file(bytes, |path| SafetensorsFile::open(path)) else { return false };
    for name in file.names() {
        if let Ok(array) = file.array::<f32>(&name) {
            assert!(array.as_slice().len() * 4 <= bytes.len());
        }
        let _ = (file.array::<bool>(&name), file.array::<i64>(&name), file.array::<half::bf16>(&name));
    }
    true
}

/// Parquet and Arrow files.
#[cfg(feature = "parquet")]
pub fn parquet(bytes: &[u8]) -> bool {
    use crate::read::{Arrow, Parquet, column_or, columns_or};
    with_file(bytes, |path| {
        let whole = FileShard::whole(path);
        let parquet = Parquet::new().open(&whole).ok().map(|records| records.take(MOST_RECORDS).flatten().collect());
        let arrow = Arrow.open(&whole).ok().map(|records| records.take(MOST_RECORDS).flatten().collect());
        let batches: [Option<Vec<_>>; 2] = [parquet, arrow];
        for batch in batches.iter().flatten().flatten() {
            for name in ["a", "b", "c"] {
                let numbers = column_or::<f32>(batch, name, 0.0);
                assert!(numbers.is_err() || numbers.is_ok_and(|numbers| numbers.shape()[0] == batch.num_rows()));
                let _ = (column_or::<i64>(batch, name, 0), column_or::<String>(batch, name, String::new()));
            }
            let _ = columns_or(batch, &["a", "b"], 0.0);
        }
        batches.iter().flatten().any(|batches| !batches.is_empty())
    })
}
