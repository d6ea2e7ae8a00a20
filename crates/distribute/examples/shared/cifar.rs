//! CIFAR-10's binary files.

use std::path::Path;

use distribute::Error;

use super::{CHANNELS, CLASSES, Pictures, Split};

const SIDE: usize = 32;
/// A picture in a file: its class, then its pixels by channel, row and column.
const RECORD: usize = 1 + CHANNELS * SIDE * SIDE;

/// Reads the five files of training pictures and that of the test.
///
/// # Source
/// The binary version of Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
pub(super) fn read(folder: &Path) -> distribute::Result<Pictures> {
    let (mut train, mut test) = (Split::default(), Split::default());
    for number in 1..=5 {
        append(&mut train, &folder.join(format!("data_batch_{number}.bin")))?;
    }
    append(&mut test, &folder.join("test_batch.bin"))?;
    Ok(Pictures { train, test, side: SIDE })
}

fn append(split: &mut Split, path: &Path) -> distribute::Result<()> {
    let file = path.display();
    let bytes = std::fs::read(path).map_err(|error| {
        Error::program(format!(
            "{file} cannot be read ({error}); --data expects the unpacked folder of CIFAR-10's binary version"
        ))
    })?;
    if bytes.is_empty() || !bytes.len().is_multiple_of(RECORD) {
        return Err(Error::program(format!(
            "{file} has {} bytes; expected a multiple of {RECORD}, a class and {CHANNELS} × {SIDE} × {SIDE} pixels for \
             each picture: download it again",
            bytes.len()
        )));
    }
    for (at, record) in bytes.chunks_exact(RECORD).enumerate() {
        let class = u32::from(record[0]);
        if class as usize >= CLASSES {
            return Err(Error::program(format!(
                "{file}: picture {at} has class {class}; expected 0 to 9, as in the binary version of CIFAR-10 (CIFAR-\
                 100 has two bytes before the pixels)"
            )));
        }
        split.classes.push(class);
        split.pixels.extend_from_slice(&record[1..]);
    }
    Ok(())
}
