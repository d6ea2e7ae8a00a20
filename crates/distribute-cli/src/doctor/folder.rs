//! The current folder, to which checkpoints and logs go by default.

use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use super::report::Check;
use super::seen::{bytes, within};
use super::shared_memory::Space;

/// Checks the free space in a folder, and how long writing a small checkpoint takes.
pub(crate) fn folder(path: &Path) -> Check {
    let own = path.to_owned();
    let tried = within(PATIENCE, move || {
        let space = Space::of(&own)?;
        Ok(match &space.writable {
            Ok(()) => (space, write(&own).map(Some)?),
            Err(_) => (space, None),
        })
    });
    judge(path, tried)
}

fn judge(path: &Path, tried: Option<io::Result<(Space, Option<Duration>)>>) -> Check {
    let path = path.display();
    let elsewhere = "write checkpoints to another folder";
    match tried {
        None => Check::warn(TOPIC, format!("{path} did not take {} within {} s", bytes(SAMPLE), PATIENCE.as_secs()))
            .why("a checkpoint takes as long")
            .remedy(format!("look at the file system; {elsewhere} meanwhile")),
        Some(Err(error)) => Check::warn(TOPIC, format!("{path} cannot be written: {error}")).remedy(elsewhere),
        Some(Ok((Space { writable: Err(error), .. }, _))) => {
            Check::warn(TOPIC, format!("{path} cannot be written: {error}")).remedy(elsewhere)
        }
        Some(Ok((space, took))) => {
            let took = took.unwrap_or_default().as_secs_f64() * 1e3;
            let found = format!(
                "{path}, {} free, {} written and synced in {took:.0} ms",
                bytes(space.free_bytes),
                bytes(SAMPLE)
            );
            match space.free_bytes < LITTLE {
                true => Check::warn(TOPIC, found)
                    .why("a checkpoint that does not fit is not saved")
                    .remedy("free some space"),
                false => Check::ok(TOPIC, found),
            }
        }
    }
}

/// Writes and syncs a file without a name.
fn write(folder: &Path) -> io::Result<Duration> {
    let mut file = tempfile::tempfile_in(folder)?;
    let begun = Instant::now();
    file.write_all(&vec![b'd'; SAMPLE as usize])?;
    file.sync_all()?;
    Ok(begun.elapsed())
}

const TOPIC: &str = "folder";

/// A network file system may not answer at all.
const PATIENCE: Duration = Duration::from_secs(3);

const SAMPLE: u64 = 4 << 20;

const LITTLE: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Status;

    #[test]
    fn a_folder_is_written_without_leaving_anything() {
        let here = tempfile::tempdir().unwrap();
        let check = folder(here.path());
        assert!(check.found.contains("4 MiB written and synced in "), "{check:?}");
        assert_eq!(here.path().read_dir().unwrap().count(), 0);
        let missing = folder(&here.path().join("missing"));
        assert_eq!(missing.status, Status::Warn);
        assert!(missing.found.contains("cannot be written"), "{missing:?}");
    }

    #[test]
    fn full_and_silent_file_systems_are_warned_about() {
        let path = Path::new("/data");
        let space = || Space { total_bytes: 1 << 40, free_bytes: 3 << 20, writable: Ok(()) };
        let full = judge(path, Some(Ok((space(), Some(Duration::from_millis(12))))));
        assert_eq!(
            (full.status, full.found.as_str()),
            (Status::Warn, "/data, 3 MiB free, 4 MiB written and synced in 12 ms")
        );
        assert!(judge(path, None).found.contains("did not take 4 MiB within 3 s"));
        let read_only = Space { writable: Err(io::ErrorKind::ReadOnlyFilesystem.into()), ..space() };
        assert!(judge(path, Some(Ok((read_only, None)))).found.contains("cannot be written: read-only"));
    }
}
