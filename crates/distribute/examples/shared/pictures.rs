//! Small pictures in colour, of ten classes: CIFAR-10 where it is given, else drawn ones.

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{Device, Result as CandleResult, Tensor};
use clap::Args;
use distribute::Error;
use distribute::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

mod cifar;
mod shapes;

pub(crate) const CLASSES: usize = 10;
pub(crate) const CHANNELS: usize = 3;

/// The choice of pictures.
#[derive(Args)]
pub(crate) struct Source {
    /// Folder with CIFAR-10's binary files, data_batch_1.bin to test_batch.bin. Default: drawn shapes.
    #[arg(long)]
    data: Option<PathBuf>,
    /// Number of pictures to train on, with a quarter as many for the test. Default: all of --data, or 2000.
    #[arg(long)]
    images: Option<usize>,
    /// Rows and columns of drawn pictures, a multiple of 4.
    #[arg(long, default_value_t = 16, conflicts_with = "data", value_parser = clap::value_parser!(u32).range(8..=64))]
    size: u32,
    /// Writes the pictures as CIFAR-10's files into a folder, for other programs; drawn ones with `--size 32`.
    #[arg(long, value_name = "FOLDER")]
    save: Option<PathBuf>,
}

/// Pictures of one split: bytes by picture, channel, row and column, and one class for each picture.
#[derive(Default)]
pub(crate) struct Split {
    pixels: Vec<u8>,
    classes: Vec<u32>,
}

/// Pictures for training and for the test.
pub(crate) struct Pictures {
    train: Split,
    test: Split,
    side: usize,
}

impl Source {
    /// Reads or draws the pictures.
    pub(crate) fn read(&self) -> distribute::Result<Pictures> {
        let pictures = self.pictures()?;
        if let Some(folder) = &self.save {
            cifar::write(&pictures, folder)?;
        }
        Ok(pictures)
    }

    fn pictures(&self) -> distribute::Result<Pictures> {
        let Some(folder) = &self.data else {
            let (side, count) = (self.size as usize, self.images.unwrap_or(2000).max(1));
            if !side.is_multiple_of(4) {
                return Err(Error::program(format!("--size {side} cannot be halved twice; give a multiple of 4")));
            }
            let (train, test) = (shapes::drawn(0, count, side), shapes::drawn(1, count.div_ceil(4), side));
            return Ok(Pictures { train, test, side });
        };
        let mut pictures = cifar::read(folder)?;
        if let Some(count) = self.images {
            let width = pictures.pixels();
            pictures.train.truncate(count.max(1), width);
            pictures.test.truncate(count.max(1).div_ceil(4), width);
        }
        Ok(pictures)
    }
}

impl Split {
    fn truncate(&mut self, count: usize, width: usize) {
        self.classes.truncate(count);
        self.pixels.truncate(self.classes.len() * width);
    }
}

impl Pictures {
    /// Returns the number of bytes of a picture.
    fn pixels(&self) -> usize {
        CHANNELS * self.side * self.side
    }

    /// Returns the number of batches of a pass over the training pictures; a last one that is short is a part of one.
    pub(crate) fn batches(&self, batch: usize) -> f64 {
        self.train.classes.len() as f64 / batch.max(1) as f64
    }

    /// Returns the training pictures in a new order in each pass, each shifted by up to an eighth of its side (four of
    /// CIFAR-10's 32 pixels) and mirrored or not.
    ///
    /// Shift and mirroring of a picture depend on a number that it is given in each pass: the same wherever it is read,
    /// and another one in the next pass.
    ///
    /// # Source
    /// He et al., "Deep residual learning for image recognition", 2015, section 4.2.
    pub(crate) fn train(&self, batch: usize, seed: u64) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
        let (count, look) = (self.train.classes.len(), self.look());
        let numbers = Dataset::range(0..count as i64).shuffle(count, seed.wrapping_add(1)).batch(batch);
        let pictures = Dataset::from_tensor_slices(self.tensors(&self.train)?).shuffle(count, seed).batch(batch);
        let varied = pictures.zip(numbers).map(move |((pixels, classes), numbers)| {
            let variants = numbers.as_slice().iter().map(|number| look.variant(seed ^ number.cast_unsigned()));
            Ok((look.seen(&pixels, variants)?, classes))
        });
        Ok(varied.prefetch(AUTOTUNE))
    }

    /// Returns the test pictures as they are, in order.
    pub(crate) fn test(&self, batch: usize) -> distribute::Result<Dataset<(Tensor, Tensor)>> {
        let look = self.look();
        let pictures = Dataset::from_tensor_slices(self.tensors(&self.test)?).batch(batch);
        let plain = pictures
            .map(move |(pixels, classes)| Ok((look.seen(&pixels, std::iter::repeat(Variant::default()))?, classes)));
        Ok(plain.prefetch(AUTOTUNE))
    }

    fn tensors(&self, split: &Split) -> CandleResult<(Tensor, Tensor)> {
        let (count, side) = (split.classes.len(), self.side);
        let pixels = Tensor::from_slice(&split.pixels, (count, CHANNELS, side, side), &Device::Cpu)?;
        Ok((pixels, Tensor::from_slice(&split.classes, count, &Device::Cpu)?))
    }

    /// Computes the mean of each pixel over the training pictures, and the standard deviation of all.
    fn look(&self) -> Look {
        let (width, count) = (self.pixels(), self.train.classes.len() as f64);
        let mut mean = vec![0.0; width];
        for picture in self.train.pixels.chunks_exact(width) {
            mean.iter_mut().zip(picture).for_each(|(sum, pixel)| *sum += f64::from(*pixel));
        }
        mean.iter_mut().for_each(|sum| *sum /= count);
        let squares = |picture: &[u8]| -> f64 {
            picture.iter().zip(&mean).map(|(pixel, mean)| (f64::from(*pixel) - mean).powi(2)).sum()
        };
        let variance = self.train.pixels.chunks_exact(width).map(squares).sum::<f64>() / (count * width as f64);
        let mean = mean.into_iter().map(|mean| mean as f32).collect();
        Look { mean, scale: 1.0 / variance.sqrt().max(1.0) as f32, side: self.side }
    }
}

/// How a network is shown pictures: without the mean of each pixel, and with about unit variance.
#[derive(Clone)]
struct Look {
    mean: Arc<[f32]>,
    scale: f32,
    side: usize,
}

/// A shift in pixels, and whether the picture is mirrored.
#[derive(Clone, Copy, Default)]
struct Variant {
    down: isize,
    right: isize,
    mirrored: bool,
}

impl Look {
    /// Draws the variant that a number stands for.
    fn variant(&self, number: u64) -> Variant {
        let mut random = ChaCha8Rng::seed_from_u64(number);
        let reach = self.side as u64 / 8;
        let mut shift = || (random.next_u64() % (2 * reach + 1)) as isize - reach as isize;
        let (down, right) = (shift(), shift());
        Variant { down, right, mirrored: random.next_u64() % 2 == 1 }
    }

    /// Returns a batch of pictures as floats; pixels from beyond the margin are 0.
    fn seen(&self, pixels: &Tensor, variants: impl Iterator<Item = Variant>) -> CandleResult<Tensor> {
        let (bytes, side) = (pixels.flatten_all()?.to_vec1::<u8>()?, self.side);
        let mut all = vec![0f32; bytes.len()];
        let pictures = all.chunks_exact_mut(self.mean.len()).zip(bytes.chunks_exact(self.mean.len()));
        for ((shown, picture), variant) in pictures.zip(variants) {
            for (at, shown) in shown.iter_mut().enumerate() {
                let (channel, row, column) = (at / (side * side), at / side % side, at % side);
                let column = if variant.mirrored { side - 1 - column } else { column };
                let (row, column) = (row.wrapping_add_signed(variant.down), column.wrapping_add_signed(variant.right));
                if row < side && column < side {
                    let from = (channel * side + row) * side + column;
                    *shown = (f32::from(picture[from]) - self.mean[from]) * self.scale;
                }
            }
        }
        Tensor::from_vec(all, pixels.shape(), pixels.device())
    }
}
