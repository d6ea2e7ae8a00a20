//! Lists of files, which workers divide.

use std::path::PathBuf;
use std::sync::Arc;

use super::{Cardinality, Dataset, Facts, Items, Opener, Share, Shares};
use crate::{BoxError, Error};

/// A file, or one of several equal parts of its records: what a list of files yields.
///
/// Readers take the records whose number, modulo `parts`, is `part`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileShard {
    /// The file.
    pub path: PathBuf,
    /// Which part; 0 where the file is whole.
    pub part: usize,
    /// How many parts there are; 1 where the file is whole.
    pub parts: usize,
}

impl FileShard {
    /// A whole file.
    pub fn whole(path: impl Into<PathBuf>) -> FileShard {
        FileShard { path: path.into(), part: 0, parts: 1 }
    }

    /// Whether a record belongs to this part.
    pub fn has(&self, record: u64) -> bool {
        record.checked_rem(self.parts as u64) == Some(self.part as u64)
    }
}

impl Dataset<FileShard> {
    /// A list of files. Where such a dataset is distributed, each worker reads files of its own; those that cannot be dealt
    /// evenly are divided by records.
    ///
    /// Follow it with [`interleave`](Dataset::interleave) or [`flat_map`](Dataset::flat_map) and a reader of files. A shuffle
    /// in between shuffles the files that a worker has.
    ///
    /// # Errors
    /// An empty list is reported by each pass.
    ///
    /// # Source
    /// `tf.data.Dataset.list_files`, under `AutoShardPolicy.FILE`.
    pub fn from_files<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Dataset<FileShard> {
        let paths: Arc<[PathBuf]> = paths.into_iter().map(Into::into).collect();
        let mut facts = Facts::of(Cardinality::Unknown);
        facts.shares = Shares::Files(vec![Arc::clone(&paths)]);
        facts.note(paths.is_empty().then_some(Error::NoFiles));
        let open: Opener<FileShard> = Arc::new(move |pass| {
            let shards = divide(&paths, pass.share().unwrap_or(Share { count: 1, index: 0 }));
            Box::new(shards.into_iter().map(Ok)) as Items<FileShard>
        });
        Dataset::new(open, facts)
    }

    /// The files of a folder whose names end in `suffix`, in the order of names.
    ///
    /// # Errors
    /// A folder that cannot be read, or has no such file, is reported by each pass.
    pub fn list_files(folder: impl Into<PathBuf>, suffix: &str) -> Dataset<FileShard> {
        let folder: PathBuf = folder.into();
        let list = || -> std::io::Result<Vec<PathBuf>> {
            let mut paths = Vec::new();
            for entry in std::fs::read_dir(&folder)? {
                let path = entry?.path();
                if path.is_file() && path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(suffix)) {
                    paths.push(path);
                }
            }
            paths.sort();
            Ok(paths)
        };
        match list() {
            Ok(paths) => Dataset::from_files(paths),
            Err(source) => {
                let mut dataset = Dataset::from_files(Vec::<PathBuf>::new());
                dataset.facts.error =
                    Some(Error::user("list_files", BoxError::from(format!("{}: {source}", folder.display()))));
                dataset
            }
        }
    }
}

/// The files of one share: whole ones in turn, then its part of each that is left.
pub(crate) fn divide(paths: &[PathBuf], share: Share) -> Vec<FileShard> {
    let count = share.count.max(1);
    let (whole, rest) = paths.split_at(paths.len() / count * count);
    let whole = whole.iter().skip(share.index).step_by(count).map(FileShard::whole);
    let rest = rest.iter().map(|path| FileShard { path: path.clone(), part: share.index, parts: count });
    whole.chain(rest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_dealt_and_what_is_left_divided_by_records() {
        let paths: Vec<PathBuf> = ["a", "b", "c", "d", "e"].into_iter().map(PathBuf::from).collect();
        let names = |count, index| -> Vec<String> {
            let shards = divide(&paths, Share { count, index });
            shards.iter().map(|shard| format!("{}{}/{}", shard.path.display(), shard.part, shard.parts)).collect()
        };
        assert_eq!(names(2, 0), ["a0/1", "c0/1", "e0/2"]);
        assert_eq!(names(2, 1), ["b0/1", "d0/1", "e1/2"]);
        assert_eq!(names(6, 5), ["a5/6", "b5/6", "c5/6", "d5/6", "e5/6"]);
        assert_eq!(names(1, 0).len(), 5);
    }

    #[test]
    fn an_empty_list_and_a_folder_that_is_not_there_are_sentences() {
        let text = Dataset::from_files(Vec::<PathBuf>::new()).iter().next().unwrap().unwrap_err().to_string();
        assert!(text.contains("no file"), "{text}");
        let text = Dataset::list_files("/nowhere/at/all", "").iter().next().unwrap().unwrap_err().to_string();
        assert!(text.contains("/nowhere/at/all"), "{text}");
    }
}
