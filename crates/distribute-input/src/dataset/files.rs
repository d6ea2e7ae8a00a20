//! Lists of files that workers divide.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use distribute_types::{FNV64, fnv1a_64};

use super::{Cardinality, Dataset, Facts, Items, Opener, Share, Shares, Source};
use crate::{BoxError, Error, store};

/// A file, or one of several equal parts of its records: the element of a list of files.
///
/// Readers return the records whose number modulo `parts` is `part`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileShard {
    /// The file, by the path or URL that was listed.
    pub path: PathBuf,
    /// The index of the part; 0 for a whole file.
    pub part: usize,
    /// The number of parts; 1 for a whole file.
    pub parts: usize,
    /// A copy of the file in a cache.
    copy: Option<PathBuf>,
}

impl FileShard {
    /// Creates the shard of a whole file.
    pub fn whole(path: impl Into<PathBuf>) -> FileShard {
        FileShard::part(path, 0, 1)
    }

    /// Creates one of `parts` equal parts of a file.
    pub fn part(path: impl Into<PathBuf>, part: usize, parts: usize) -> FileShard {
        FileShard { path: path.into(), part, parts, copy: None }
    }

    /// Returns the same shard, whose content is read from a copy of the file.
    pub(crate) fn with_copy(&self, copy: &Path) -> FileShard {
        FileShard { copy: Some(copy.to_owned()), ..self.clone() }
    }

    /// Returns where to read the content: the copy of a file in a store if [`ReadOptions::cache`] has made one, which
    /// has another name, and the file itself otherwise.
    ///
    /// [`ReadOptions::cache`]: crate::read::ReadOptions::cache
    pub fn content(&self) -> &Path {
        self.copy.as_deref().unwrap_or(&self.path)
    }

    /// Returns whether a record belongs to this part.
    pub fn has(&self, record: u64) -> bool {
        record.checked_rem(self.parts as u64) == Some(self.part as u64)
    }
}

impl Dataset<FileShard> {
    /// Creates a dataset of a list of files. When it is distributed, each worker reads files of its own; files that
    /// cannot be distributed evenly are divided by records.
    ///
    /// Apply [`interleave`](Dataset::interleave) or [`flat_map`](Dataset::flat_map) with a reader of files to it. A
    /// shuffle between them shuffles the files of a worker.
    ///
    /// # Errors
    /// Each pass reports [`Error::NoFiles`] if the list is empty.
    ///
    /// # Source
    /// `tf.data.Dataset.list_files`, under `AutoShardPolicy.FILE`.
    pub fn from_files<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Dataset<FileShard> {
        let paths: Arc<[PathBuf]> = paths.into_iter().map(Into::into).collect();
        let mut facts = Facts::of(Cardinality::Unknown);
        facts.sources.push(Source::Named(names(paths.iter())));
        facts.shares = Shares::Files(vec![Arc::clone(&paths)]);
        facts.note(paths.is_empty().then_some(Error::NoFiles));
        let open: Opener<FileShard> = Arc::new(move |pass| {
            let shards = divide(&paths, pass.share().unwrap_or(Share { count: 1, index: 0 }));
            Box::new(shards.into_iter().map(Ok)) as Items<FileShard>
        });
        Dataset::new(open, facts)
    }

    /// Creates a dataset of the files in a folder whose names end with `suffix`, sorted by name. With the feature
    /// `object-store`, the folder may be a URL such as `s3://bucket/train`.
    ///
    /// # Errors
    /// Each pass reports [`Error::User`] if the folder cannot be read, and [`Error::NoFiles`] if it has no such file.
    pub fn list_files(folder: impl Into<PathBuf>, suffix: &str) -> Dataset<FileShard> {
        let folder: PathBuf = folder.into();
        let listed = || -> std::io::Result<Vec<PathBuf>> {
            let has_suffix =
                |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(suffix));
            let listed = list(&folder, has_suffix)?.into_iter();
            Ok(listed.filter(|(_, is_folder)| !is_folder).map(|(path, _)| path).collect())
        };
        match listed() {
            Ok(paths) => Dataset::from_files(paths),
            Err(source) => {
                let mut dataset = Dataset::from_files(Vec::<PathBuf>::new());
                dataset.facts.error = Some(Error::user(
                    "list_files",
                    match store::message(&source) {
                        Some(message) => BoxError::from(message),
                        None => BoxError::from(format!("{}: {source}", folder.display())),
                    },
                ));
                dataset
            }
        }
    }
}

/// Describes a list of files by their names: the folder may differ between machines.
pub(super) fn names<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> String {
    let (mut count, mut digest) = (0, FNV64);
    for path in paths {
        count += 1;
        let name = path.file_name().unwrap_or_default();
        digest = fnv1a_64(digest, name.as_encoded_bytes().iter().copied().chain([0]));
    }
    // "Dealt in turn" refuses positions of older versions, where each share had the same part of all remaining files.
    format!("{count} files dealt in turn, whose names have the digest {digest:016x}")
}

/// Returns the files and folders that are wanted in a folder of a disk or a store, sorted by name, each with whether it
/// is a folder. Nothing is asked about the others, which may be links to nothing, or removed meanwhile.
pub(crate) fn list(folder: &Path, is_wanted: impl Fn(&Path) -> bool) -> io::Result<Vec<(PathBuf, bool)>> {
    let folder = match store::list(folder)? {
        Ok(folder) => folder,
        Err(listed) => return Ok(listed.into_iter().filter(|(path, _)| is_wanted(path)).collect()),
    };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if !is_wanted(&path) {
            continue;
        }
        // A link to nothing is an error: a file that is left out in silence is missed in training.
        let about = std::fs::metadata(&path)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
        if about.is_dir() || about.is_file() {
            paths.push((path, about.is_dir()));
        }
    }
    paths.sort();
    Ok(paths)
}

/// Returns the files of one share: whole files in round-robin order, then its part of each remaining file. The parts
/// are dealt in turn, so that files of one record are spread over the shares.
pub(crate) fn divide(paths: &[PathBuf], share: Share) -> Vec<FileShard> {
    let count = share.count.max(1);
    let (whole, rest) = paths.split_at(paths.len() / count * count);
    let whole = whole.iter().skip(share.index).step_by(count).map(FileShard::whole);
    let part = |at: usize| share.index.wrapping_add(at) % count;
    let rest = rest.iter().enumerate().map(|(at, path)| FileShard::part(path, part(at), count));
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
        assert_eq!(names(6, 5), ["a5/6", "b0/6", "c1/6", "d2/6", "e3/6"]);
        // Files of one record, the pictures of a folder for example.
        let firsts = |index| names(6, index).iter().filter(|name| name.ends_with("0/6")).count();
        assert_eq!([0, 1, 2, 3, 4, 5].map(firsts), [1, 0, 1, 1, 1, 1]);
        assert_eq!(names(1, 0).len(), 5);
    }

    #[test]
    fn an_empty_list_and_a_folder_that_is_not_there_are_sentences() {
        let text = Dataset::from_files(Vec::<PathBuf>::new()).iter().next().unwrap().unwrap_err().to_string();
        assert!(text.contains("no file"), "{text}");
        let text = Dataset::list_files("/nowhere/at/all", "").iter().next().unwrap().unwrap_err().to_string();
        assert!(text.contains("/nowhere/at/all"), "{text}");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_nothing_is_not_left_out() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/nowhere/at/all", folder.path().join("lost.txt")).unwrap();
        let text = Dataset::list_files(folder.path(), ".txt").iter().next().unwrap().unwrap_err().to_string();
        assert!(text.contains("lost.txt"), "{text}");
        std::fs::write(folder.path().join("a.csv"), "").unwrap();
        let files: crate::Result<Vec<FileShard>> = Dataset::list_files(folder.path(), ".csv").iter().collect();
        assert_eq!(files.unwrap(), [FileShard::whole(folder.path().join("a.csv"))]);
    }
}
