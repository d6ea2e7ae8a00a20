//! Safetensors files outside of checkpoints, written one tensor after another.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use distribute_device::DType;
use distribute_strategy::Strategy;
use distribute_values::TensorStorage;

use super::disk::Disk;
use super::tensor_file::{Described, header};
use crate::chief::agreed;
use crate::{Error, Result};

/// Writes a safetensors file whose tensors the chief gets one after another, for example by gathering the parts of
/// sharded variables. Every worker calls this, outside `run`, with the same tensors: their names, types and shapes.
///
/// `whole` returns the tensor with an index on the chief; what other workers return is not read. It is called for all
/// of them, in the same order on every worker. The chief writes to a temporary file and renames it, so that readers
/// never see an incomplete one.
///
/// # Cost
/// One tensor is in memory at a time.
///
/// # Errors
/// [`Error::File`] on the chief if the file cannot be written, and [`Error::Damaged`] if a tensor has not the type or
/// the shape that was announced. The other workers get [`Error::Chief`] or [`Error::OnWorker`] with the message, after
/// the tensor at which it occurs, and nothing is left of the file. The errors of `whole` on the worker that has them,
/// which the others learn from the end of that worker's job; [`Error::Collective`] if a worker is missing or fails.
///
/// # Examples
/// ```
/// use distribute_device::DType;
/// use distribute_strategy::Strategy;
/// use distribute_train::Error;
/// use distribute_train::checkpoint::write_safetensors;
/// use distribute_values::{Host, HostTensor};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// let strategy = Strategy::default_strategy()?;
/// let values = [HostTensor::scalar(1.0f32), HostTensor::new(&[2], vec![2.0, 3.0])?];
/// let tensors = [("scale", DType::F32, vec![]), ("bias", DType::F32, vec![2])];
/// write_safetensors::<Host, _, Error>(&strategy, &path, &tensors, |index| Ok(Some(values[index].clone())))?;
/// # assert_eq!(safetensors::SafeTensors::deserialize(&std::fs::read(&path)?)?.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write_safetensors<L, T: TensorStorage<L>, E: From<Error> + ToString>(
    strategy: &Strategy,
    path: &Path,
    tensors: &[(&str, DType, Vec<usize>)],
    mut whole: impl FnMut(usize) -> Result<Option<T>, E>,
) -> Result<(), E> {
    let mut described: Vec<Described<'_>> = Vec::with_capacity(tensors.len());
    for (name, dtype, shape) in tensors {
        let bytes = shape.iter().product::<usize>() * dtype.size_bytes();
        described.push(Described { name, dtype: *dtype, shape, bytes });
    }
    let damaged = |problem| Error::Damaged { path: path.to_owned(), problem };
    let begun = header(&described).map_err(damaged).and_then(|(header, order)| {
        let file = strategy.is_chief().then(|| Unfinished::create(path, &header)).transpose()?;
        Ok((file, order))
    });
    let (mut file, order) = agreed(strategy, begun)?;
    for index in order {
        // Workers in a gather learn of another's error by the job's end, and must not be waited for here.
        let tensor = whole(index)?;
        let written = match (file.take(), tensor) {
            (Some(file), Some(tensor)) => file.with(&tensor, &described[index]).map(Some),
            (Some(_), None) => Err(unlike(path, &described[index], "is missing")),
            (None, _) => Ok(None),
        };
        // All end here if the chief's disk is full, and do not gather the rest.
        file = agreed(strategy, written)?;
    }
    Ok(agreed(strategy, file.map_or(Ok(()), Unfinished::finish))?)
}

/// A file that is removed if it is not finished.
struct Unfinished {
    file: File,
    place: PathBuf,
    path: PathBuf,
    is_finished: bool,
}

impl Unfinished {
    fn create(path: &Path, header: &[u8]) -> Result<Unfinished> {
        let mut place = path.as_os_str().to_owned();
        // Random, since processes of several containers that share the folder may have the same number.
        place.push(format!("{TEMPORARY}{:016x}", RandomState::new().hash_one(path)));
        let place = PathBuf::from(place);
        remove_left(path);
        let wrong = |source| Error::File { path: path.to_owned(), source };
        let file = File::create(&place).map_err(wrong)?;
        let mut this = Unfinished { file, place, path: path.to_owned(), is_finished: false };
        this.file.write_all(header).map_err(wrong)?;
        Ok(this)
    }

    /// Adds the next tensor.
    fn with<L, T: TensorStorage<L>>(mut self, tensor: &T, described: &Described<'_>) -> Result<Unfinished> {
        if (tensor.dtype()?, &tensor.shape()[..]) != (described.dtype, described.shape) {
            let now = format!("is of {} {:?} now", tensor.dtype()?, tensor.shape());
            return Err(unlike(&self.path, described, &now));
        }
        let mut written = Ok(());
        tensor.read(&mut |elements| written = self.file.write_all(elements.as_bytes()))?;
        written.map_err(|source| Error::File { path: self.path.clone(), source })?;
        Ok(self)
    }

    fn finish(mut self) -> Result<()> {
        let renamed = self.file.sync_all().and_then(|()| fs::rename(&self.place, &self.path));
        renamed.map_err(|source| Error::File { path: self.path.clone(), source })?;
        self.is_finished = true;
        // The new name is durable only when its folder is synced too.
        Disk::default().sync_folder(folder_of(&self.path))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.is_finished {
            drop(fs::remove_file(&self.place));
        }
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Removes the temporary files of a path that killed processes have left; another process may be writing a newer one.
fn remove_left(path: &Path) {
    let Some(name) = path.file_name().and_then(OsStr::to_str) else { return };
    for entry in fs::read_dir(folder_of(path)).into_iter().flatten().flatten() {
        let other = entry.file_name();
        let number = other.to_str().and_then(|other| other.strip_prefix(name)?.strip_prefix(TEMPORARY));
        let is_own = number.is_some_and(|number| number.len() == 16 && u64::from_str_radix(number, 16).is_ok());
        let age = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
        if is_own && age().is_some_and(|age| age >= LEFT_AFTER) {
            // It does no harm but for its room.
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// Precedes a number in the name of a temporary file.
const TEMPORARY: &str = ".tmp-";

/// A temporary file that has not been written for so long is not written any more.
const LEFT_AFTER: Duration = Duration::from_secs(24 * 3600);

/// Returns the error of a tensor that is not what was announced.
fn unlike(path: &Path, described: &Described<'_>, now: &str) -> Error {
    let Described { name, dtype, shape, .. } = described;
    let problem = format!("{name:?} was announced as {dtype} {shape:?}, and {now}; pass the same tensors");
    Error::Damaged { path: path.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use std::time::{Instant, SystemTime};

    use distribute_strategy::FullyShardedStrategy;
    use distribute_values::{Host, HostTensor};

    use super::*;

    #[test]
    fn nothing_is_gathered_for_a_file_that_cannot_be_written_and_nothing_is_left_of_one_that_fails() {
        let folder = tempfile::tempdir().unwrap();
        let strategy = FullyShardedStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap();
        let tensors = [("a", DType::F32, vec![3]), ("b", DType::F32, vec![2])];
        let mut seen = 0;
        let mut write = |path: &Path, len: usize| {
            seen = 0;
            let written = write_safetensors::<Host, _, Error>(&strategy, path, &tensors, |index| {
                seen += 1;
                let len = if index == 1 { len } else { 3 };
                Ok(Some(HostTensor::new(&[len], vec![0.5f32; len])?))
            });
            (written, seen)
        };
        let began = Instant::now();
        let (error, seen) = write(&folder.path().join("nowhere/file"), 2);
        assert!(matches!(error, Err(Error::File { .. })) && seen == 0, "{error:?} after {seen}");
        let path = folder.path().join("file");
        let (error, seen) = write(&path, 4);
        assert!(error.unwrap_err().to_string().contains("\"b\" was announced as f32 [2], and is of f32 [4] now"));
        assert_eq!((seen, fs::read_dir(folder.path()).unwrap().count()), (2, 0));
        // A process of the same number in another container writes it too.
        let begun = folder.path().join(format!("file.tmp-{}", std::process::id()));
        fs::write(&begun, "begun").unwrap();
        write(&path, 2).0.unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        assert_eq!(fs::read(&begun).unwrap(), b"begun");
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    }

    #[test]
    fn what_killed_processes_have_left_is_removed_after_a_day() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        let names =
            ["file.tmp-0123456789abcdef", "file.tmp-00000000000000ff", "file.tmp-notes", "other.tmp-0123456789abcdef"];
        for name in names {
            let left = File::create(place(name)).unwrap();
            let hours = if name == names[1] { 23 } else { 25 };
            left.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600)).unwrap();
        }
        let strategy = Strategy::default_strategy().unwrap();
        let value = |_| Ok(Some(HostTensor::scalar(0.5f32)));
        write_safetensors::<Host, _, Error>(&strategy, &place("file"), &[("a", DType::F32, vec![])], value).unwrap();
        assert_eq!(names.map(|name| place(name).exists()), [false, true, true, true]);
        assert!(place("file").exists());
    }
}
