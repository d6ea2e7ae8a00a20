use std::fs;
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::*;
use crate::digits::Digits;

const COUNT: usize = 12;

fn images(count: u32, side: u32, pixels: usize) -> Vec<u8> {
    let mut file = Vec::new();
    for word in [0x0803, count, side, side] {
        file.extend(word.to_be_bytes());
    }
    file.extend((0..pixels).map(|at| (at * 31 % 256) as u8));
    file
}

fn labels(count: u32, labels: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    for word in [0x0801, count] {
        file.extend(word.to_be_bytes());
    }
    file.extend(labels);
    file
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn good() -> (Vec<u8>, Vec<u8>) {
    let digits: Vec<u8> = (0..COUNT).map(|at| (at % 10) as u8).collect();
    (images(COUNT as u32, 28, COUNT * PIXELS), labels(COUNT as u32, &digits))
}

/// A directory whose training files are these and whose test files are good.
fn dir(images: &[u8], labels: &[u8]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (good_images, good_labels) = good();
    for (name, bytes) in [
        ("train-images-idx3-ubyte", images),
        ("train-labels-idx1-ubyte", labels),
        ("t10k-images-idx3-ubyte", &good_images),
        ("t10k-labels-idx1-ubyte", &good_labels),
    ] {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

fn sentence(images: &[u8], labels: &[u8]) -> String {
    let dir = dir(images, labels);
    let error = Digits::idx(dir.path()).unwrap_err().to_string();
    let dir = dir.path().display().to_string();
    assert!(error.contains(&dir), "{error}");
    error.replace(&format!("{dir}/"), "")
}

#[test]
fn files_are_read_plain_compressed_and_under_either_name() {
    let (images, labels) = good();
    let plain = Digits::idx(dir(&images, &labels).path()).unwrap();
    assert_eq!(plain.train.len(), COUNT);
    assert_eq!(plain.train.labels, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]);
    assert_eq!(plain.train.image(0)[..2], [0.0, 31.0 / 255.0]);
    assert_eq!(plain.train, plain.test);

    let other = tempfile::tempdir().unwrap();
    for (name, bytes) in [
        ("train-images.idx3-ubyte", images.clone()),
        ("train-labels.idx1-ubyte.gz", gzip(&labels)),
        ("t10k-images-idx3-ubyte.gz", gzip(&images)),
        ("t10k-labels.idx1-ubyte", labels.clone()),
    ] {
        fs::write(other.path().join(name), bytes).unwrap();
    }
    assert_eq!(Digits::load(Some(other.path())).unwrap(), plain);
}

#[test]
fn drawn_digits_survive_the_round_trip() {
    let drawn = Digits::drawn(1, COUNT, 0).train;
    let mut file = images(COUNT as u32, 28, 0);
    file.extend(drawn.images.iter().map(|pixel| (pixel * 255.0).round() as u8));
    let digits: Vec<u8> = drawn.labels.iter().map(|label| *label as u8).collect();
    let read = Digits::idx(dir(&file, &labels(COUNT as u32, &digits)).path()).unwrap();
    assert_eq!(read.train, drawn);
}

#[test]
fn a_missing_file_is_named_with_all_names_tried() {
    let dir = tempfile::tempdir().unwrap();
    let error = Digits::idx(dir.path()).unwrap_err().to_string();
    let names =
        "train-images-idx3-ubyte, train-images-idx3-ubyte.gz, train-images.idx3-ubyte, train-images.idx3-ubyte.gz;";
    assert!(error.contains(names), "{error}");
    assert!(error.contains("leave the directory out"), "{error}");
}

#[test]
fn exchanged_files_are_recognised() {
    let (images, labels) = good();
    let error = sentence(&labels, &images);
    assert!(
        error.starts_with(
            "train-images-idx3-ubyte begins with 0x00000801, an IDX file of images begins with 0x00000803;"
        ),
        "{error}"
    );
}

#[test]
fn a_file_that_ends_early_or_late_is_refused() {
    let (images, labels) = good();
    let whole = images.len();
    let error = sentence(&images[..whole - 1], &labels);
    let expected = format!("train-images-idx3-ubyte has {} bytes, its header promises {whole};", whole - 1);
    assert!(error.starts_with(&expected), "{error}");

    let mut long = labels.clone();
    long.push(0);
    let error = sentence(&images, &long);
    assert!(error.starts_with("train-labels-idx1-ubyte has 21 bytes, its header promises 20;"), "{error}");

    for short in [0, 3, 4, 15] {
        let error = sentence(&images[..short], &labels);
        let expected = format!("train-images-idx3-ubyte has {short} bytes, its header promises 16;");
        assert!(error.starts_with(&expected), "{error}");
    }
}

#[test]
fn a_header_that_promises_the_moon_allocates_nothing() {
    let (_, labels) = good();
    let mut moon = images(u32::MAX, 28, 100);
    moon[8..16].fill(0xff);
    let error = sentence(&moon, &labels);
    assert!(error.contains("has 116 bytes, its header promises 18446744073709551615;"), "{error}");
}

#[test]
fn half_a_compressed_file_is_refused() {
    let (images, _) = good();
    let dir = tempfile::tempdir().unwrap();
    let compressed = gzip(&images);
    let path = dir.path().join("train-images-idx3-ubyte.gz");
    fs::write(dir.path().join("train-labels-idx1-ubyte"), good().1).unwrap();
    fs::write(&path, &compressed[..compressed.len() / 2]).unwrap();
    let error = Digits::idx(dir.path()).unwrap_err();
    assert!(matches!(error, Error::Length { expected, got, .. } if got < expected), "{error}");
    fs::write(&path, b"no gzip at all").unwrap();
    let error = Digits::idx(dir.path()).unwrap_err();
    assert!(matches!(error, Error::Read { .. }), "{error}");
}

#[test]
fn labels_that_do_not_fit_the_images_are_refused() {
    let (images, labels) = good();
    let mut fewer = labels[..labels.len() - 1].to_vec();
    fewer[7] -= 1;
    let error = sentence(&images, &fewer);
    assert!(
        error.starts_with("train-images-idx3-ubyte holds 12 images and train-labels-idx1-ubyte holds 11 labels;"),
        "{error}"
    );

    let mut odd = labels.clone();
    odd[8 + 3] = 10;
    let error = sentence(&images, &odd);
    assert!(error.starts_with("train-labels-idx1-ubyte gives image 3 the label 10, expected 0 to 9;"), "{error}");
}

#[test]
fn images_of_another_size_are_refused() {
    let error = sentence(&images(12, 32, 12 * 32 * 32), &good().1);
    assert!(
        error.starts_with("train-images-idx3-ubyte holds images of 32 by 32 pixels, expected 28 by 28;"),
        "{error}"
    );
}
