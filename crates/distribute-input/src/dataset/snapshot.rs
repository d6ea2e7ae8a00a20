//! Caching on disk.

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Dataset, Facts, Items, Opener, Pass, Share};
use crate::read::{RecordReader, TfRecordWriter, TfRecords};
use crate::{BoxError, Error, FileShard, Result, store};

impl<T: Send + 'static> Dataset<T> {
    /// Caches like [`cache`](Dataset::cache), in a folder: the first complete pass writes the elements there, and later
    /// passes, including those of later runs, read them. A pass that ends early writes nothing.
    ///
    /// The folder is a snapshot of the pipeline that wrote it: delete it when the pipeline changes. Where workers read
    /// shares of their own, each share has its file; after [`batch_exact`](Dataset::batch_exact) it has one for each
    /// number of rows that a worker takes in a step.
    ///
    /// # Errors
    /// The pass reports [`Error::File`] or [`Error::Record`] if the folder is a URL, cannot be written or holds
    /// something else, and [`Error::User`] if `decode` fails.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Array, Dataset};
    /// # let folder = tempfile::tempdir()?;
    /// let encode = |x: &Array<i64>| x.as_slice()[0].to_le_bytes().to_vec();
    /// let decode = |bytes: &[u8]| Ok(Array::scalar(i64::from_le_bytes(bytes.try_into()?)));
    /// let squares = Dataset::range(0..4).map(|x| Ok(Array::scalar(x.as_slice()[0].pow(2))));
    /// let kept = squares.snapshot(folder.path().join("squares"), encode, decode);
    /// assert_eq!(kept.iter().count(), 4);                  // computed, and written
    /// assert_eq!(kept.iter().last().unwrap()?.item(), Some(&9));   // read
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Source
    /// `tf.data.Dataset.snapshot`, and `cache` with a file name. Files are TFRecord files.
    pub fn snapshot(
        self,
        folder: impl Into<PathBuf>,
        encode: impl Fn(&T) -> Vec<u8> + Send + Sync + 'static,
        decode: impl Fn(&[u8]) -> Result<T, BoxError> + Send + Sync + 'static,
    ) -> Dataset<T> {
        let (folder, open, exact): (PathBuf, _, _) = (folder.into(), self.open, self.facts.exact_size());
        let mut facts = Facts { prefetch: 0, ..self.facts };
        facts.keeps_order("snapshot");
        facts.note(store::is_url(&folder).then(|| refused(&folder)));
        let (encode, decode) = (Arc::new(encode), Arc::new(decode));
        let opener: Opener<T> = Arc::new(move |pass: Pass| {
            // Each share of a distribution is a different sequence, and so is each end of one.
            let name = match (pass.share(), exact) {
                (Some(Share { index, count }), Some(size)) => {
                    format!("{index}-of-{count}-by-{}.tfrecord", pass.exact_rows(size))
                }
                (Some(Share { index, count }), None) => format!("{index}-of-{count}.tfrecord"),
                (None, _) => "whole.tfrecord".to_owned(),
            };
            let path = folder.join(name);
            if path.exists() {
                return read(path, Arc::clone(&decode));
            }
            match Writer::create(&folder, path) {
                Ok(writer) => {
                    let items = open(pass.first().in_order());
                    Box::new(Written { items, writer: Some(writer), encode: Arc::clone(&encode) }) as Items<T>
                }
                Err(error) => Box::new(std::iter::once(Err(error))),
            }
        });
        Dataset::new(opener, facts)
    }
}

fn refused(folder: &Path) -> Error {
    let problem = "it is a URL, and snapshots are written to local folders; give the path of one, or read files of a \
                   store by ReadOptions::cache";
    Error::File { path: folder.to_owned(), source: Arc::new(io::Error::new(io::ErrorKind::Unsupported, problem)) }
}

fn read<T: Send + 'static>(
    path: PathBuf,
    decode: Arc<impl Fn(&[u8]) -> Result<T, BoxError> + Send + Sync + 'static>,
) -> Items<T> {
    match TfRecords.open(&FileShard::whole(&path)) {
        Ok(records) => Box::new(records.map(move |record| {
            let record = record.map_err(|bad| bad.of(&path))?;
            decode(&record).map_err(|error| Error::user("snapshot", error))
        })),
        Err(source) => Box::new(std::iter::once(Err(Error::File { path, source: Arc::new(source) }))),
    }
}

/// A snapshot in progress, under a temporary name until it is complete.
struct Writer {
    file: Option<TfRecordWriter<File>>,
    part: PathBuf,
    path: PathBuf,
}

impl Writer {
    fn create(folder: &Path, path: PathBuf) -> Result<Writer> {
        // Random, since processes of several containers that share the folder may have the same number.
        let part = path.with_extension(format!("part-{:016x}", RandomState::new().hash_one(&path)));
        let create = || {
            fs::create_dir_all(folder)?;
            File::create(&part)
        };
        let file = create().map_err(|source| Error::File { path: part.clone(), source: Arc::new(source) })?;
        Ok(Writer { file: Some(TfRecordWriter::new(file)), part, path })
    }

    fn put(&mut self, record: &[u8]) -> Result<()> {
        let outcome = self.file.as_mut().map_or(Ok(()), |file| file.write(record));
        outcome.map_err(|source| self.failed(source))
    }

    fn finish(mut self) -> Result<()> {
        let finish = |file: Option<TfRecordWriter<File>>| {
            file.map_or(Ok(()), |file| file.finish()?.sync_all())?;
            fs::rename(&self.part, &self.path)
        };
        let file = self.file.take();
        finish(file).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::File { path: self.part.clone(), source: Arc::new(source) }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Fails if the file was renamed by `finish`.
        drop(fs::remove_file(&self.part));
    }
}

struct Written<T, E> {
    items: Items<T>,
    writer: Option<Writer>,
    encode: Arc<E>,
}

impl<T, E: Fn(&T) -> Vec<u8>> Iterator for Written<T, E> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        match self.items.next() {
            Some(Ok(item)) => {
                let written = self.writer.as_mut().map_or(Ok(()), |writer| writer.put(&(self.encode)(&item)));
                Some(written.map(|()| item))
            }
            Some(Err(error)) => {
                self.writer = None;
                Some(Err(error))
            }
            None => match self.writer.take().map_or(Ok(()), Writer::finish) {
                Ok(()) => None,
                Err(error) => Some(Err(error)),
            },
        }
    }
}
