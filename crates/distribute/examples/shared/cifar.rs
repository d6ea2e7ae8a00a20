//! CIFAR-10's binary files.

use std::path::Path;

use distribute::Error;

use super::{CHANNELS, CLASSES, Pictures, Split};

const SIDE: usize = 32;
/// A picture in a file: its class, then its pixels by channel, row and column.
const RECORD: usize = 1 + CHANNELS * SIDE * SIDE;

const TRAIN: [&str; 5] =
    ["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"];
const TEST: &str = "test_batch.bin";

/// Reads the five files of training pictures and that of the test.
///
/// # Source
/// The binary version of Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
pub(super) fn read(folder: &Path) -> distribute::Result<Pictures> {
    let (mut train, mut test) = (Split::default(), Split::default());
    for name in TRAIN {
        append(&mut train, &folder.join(name))?;
    }
    append(&mut test, &folder.join(TEST))?;
    Ok(Pictures { train, test, side: SIDE })
}

/// Writes pictures as such files.
pub(super) fn write(pictures: &Pictures, folder: &Path) -> distribute::Result<()> {
    let Pictures { train, test, side } = pictures;
    if *side != SIDE || train.classes.len() < TRAIN.len() {
        let count = train.classes.len();
        return Err(Error::program(format!(
            "{count} pictures of {side} × {side} do not make CIFAR-10's files; give --size {SIDE} and five or more"
        )));
    }
    let failed = |path: &Path, error| Error::program(format!("{} cannot be written: {error}", path.display()));
    std::fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
    let part = train.classes.len().div_ceil(TRAIN.len());
    let parts = TRAIN.iter().enumerate().map(|(at, name)| (*name, train, at * part, part));
    for (name, split, from, count) in parts.chain([(TEST, test, 0, test.classes.len())]) {
        let records = split.classes.iter().zip(split.pixels.chunks_exact(RECORD - 1)).skip(from).take(count);
        let bytes: Vec<u8> = records.flat_map(|(class, pixels)| [&[*class as u8], pixels].concat()).collect();
        let path = folder.join(name);
        std::fs::write(&path, bytes).map_err(|error| failed(&path, error))?;
    }
    Ok(())
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
