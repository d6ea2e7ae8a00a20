//! Files of drawn digits in MNIST's form, for trainings that need fewer than the examples draw.

use std::fs;
use std::path::Path;

use distribute_testkit::digits::{Digits, SIDE};

/// Writes as many digits for training and for evaluation to a folder.
pub(crate) fn write_digits(folder: &Path, train: usize, test: usize) {
    let digits = Digits::drawn(42, train, test);
    for (prefix, split) in [("train", &digits.train), ("t10k", &digits.test)] {
        let write = |kind: &str, dims: &[usize], bytes: Vec<u8>| {
            let extents = dims.iter().flat_map(|extent| (*extent as u32).to_be_bytes());
            let file = [0, 0, 8, dims.len() as u8].into_iter().chain(extents).chain(bytes).collect::<Vec<u8>>();
            fs::write(folder.join(format!("{prefix}-{kind}-idx{}-ubyte", dims.len())), file).unwrap();
        };
        let pixels = split.images.iter().map(|pixel| (pixel * 255.0) as u8).collect();
        write("images", &[split.len(), SIDE, SIDE], pixels);
        write("labels", &[split.len()], split.labels.iter().map(|label| *label as u8).collect());
    }
}
