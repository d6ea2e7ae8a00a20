//! MNIST's files, for the examples that read them.

use std::path::{Path, PathBuf};

use distribute::Error;
use distribute::input::read::read_idx;
use distribute_testkit::digits::{Digits, SIDE, Split};

/// Reads both splits of MNIST from a folder.
pub(crate) fn digits(folder: &Path) -> distribute::Result<Digits> {
    Ok(Digits { train: split(folder, "train")?, test: split(folder, "t10k")? })
}

/// Reads a split of MNIST from files such as `PREFIX-images-idx3-ubyte` and `PREFIX-labels-idx1-ubyte`. Names with a
/// dot before `idx`, and gzip files that end in `.gz`, are found too.
fn split(folder: &Path, prefix: &str) -> distribute::Result<Split> {
    let read = |kind: &str, dims: usize| {
        let endings = ["-", "."].map(|dot| ["", ".gz"].map(|gz| format!("{dot}idx{dims}-ubyte{gz}")));
        let paths: Vec<PathBuf> =
            endings.iter().flatten().map(|ending| folder.join(format!("{prefix}-{kind}{ending}"))).collect();
        read_idx(paths.iter().find(|path| path.exists()).unwrap_or(&paths[0]))
    };
    let (images, labels) = (read("images", 3)?, read("labels", 1)?);
    let count = labels.as_slice().len();
    let fits = images.shape() == [count, SIDE, SIDE] && labels.shape() == [count];
    if !fits || labels.as_slice().iter().any(|label| *label > 9) {
        let (folder, images, labels) = (folder.display(), images.shape(), labels.shape());
        let problem = format!(
            "{folder}: {prefix} has images of shape {images:?} and labels of shape {labels:?}; expected as many labels \
             from 0 to 9 as images of {SIDE} by {SIDE} pixels"
        );
        return Err(Error::program(problem));
    }
    Ok(Split {
        images: images.as_slice().iter().map(|pixel| f32::from(*pixel) / 255.0).collect(),
        labels: labels.as_slice().iter().map(|label| u32::from(*label)).collect(),
    })
}
