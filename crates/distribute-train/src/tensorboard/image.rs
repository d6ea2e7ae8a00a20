//! Images of event files.

use std::io::Cursor;

use super::wire;
use crate::{Error, Result};

/// An image for [`EventWriter::image`](super::EventWriter::image), encoded as PNG.
///
/// # Examples
/// ```
/// use distribute_train::tensorboard::Image;
/// let checks = Image::new([2, 2, 1], &[0, 255, 255, 0])?;
/// let sky = Image::from_floats([1, 2, 3], &[0.2, 0.4, 1.0, 0.3, 0.5, 1.0])?;
/// assert_eq!((checks.height(), checks.width(), sky.channels()), (2, 2, 3));
/// let read = Image::from_png(sky.png().to_vec())?;
/// assert_eq!(read, sky);
/// # Ok::<(), distribute_train::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    height: u32,
    width: u32,
    channels: u32,
    png: Vec<u8>,
}

impl Image {
    /// Encodes the pixels of an image, row by row.
    ///
    /// # Shapes
    /// `shape` is height, width and channels, and `pixels` has a byte for each channel of each pixel. 1 channel is
    /// gray, 2 are gray and alpha, 3 are red, green and blue, 4 also have alpha.
    ///
    /// # Errors
    /// [`Error::Image`] if the shape is none of an image, or the number of pixels is another one.
    pub fn new(shape: [usize; 3], pixels: &[u8]) -> Result<Image> {
        let [height, width, channels] = checked(shape, pixels.len())?;
        let color = match channels {
            1 => png::ColorType::Grayscale,
            2 => png::ColorType::GrayscaleAlpha,
            3 => png::ColorType::Rgb,
            _ => png::ColorType::Rgba,
        };
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, width, height);
        encoder.set_color(color);
        encoder.set_depth(png::BitDepth::Eight);
        let written = encoder.write_header().and_then(|mut writer| {
            writer.write_image_data(pixels)?;
            writer.finish()
        });
        written.map_err(|error| refused(format!("of shape {shape:?} cannot be encoded: {error}")))?;
        Ok(Image { height, width, channels, png: bytes })
    }

    /// Encodes the pixels of an image, row by row, from numbers between 0 and 1; others are clamped, and NaN is 0.
    ///
    /// # Shapes
    /// As for [`new`](Image::new).
    ///
    /// # Errors
    /// [`Error::Image`], as for [`new`](Image::new).
    pub fn from_floats(shape: [usize; 3], pixels: &[f32]) -> Result<Image> {
        checked(shape, pixels.len())?;
        // The conversion of NaN to an integer is 0.
        let bytes: Vec<u8> = pixels.iter().map(|value| (value.clamp(0.0, 1.0) * 255.0).round() as u8).collect();
        Image::new(shape, &bytes)
    }

    /// Takes the bytes of a PNG file, such as a plot. Only its header is read.
    ///
    /// # Errors
    /// [`Error::Image`] if the bytes are not a PNG file.
    pub fn from_png(bytes: impl Into<Vec<u8>>) -> Result<Image> {
        let png = bytes.into();
        let reader = png::Decoder::new(Cursor::new(&png)).read_info();
        let reader = reader.map_err(|error| refused(format!("of {} bytes is not a PNG file: {error}", png.len())))?;
        let info = reader.info();
        let channels = match info.color_type {
            png::ColorType::Grayscale => 1,
            png::ColorType::GrayscaleAlpha => 2,
            png::ColorType::Rgb | png::ColorType::Indexed => 3,
            png::ColorType::Rgba => 4,
        };
        let (height, width) = (info.height, info.width);
        drop(reader);
        Ok(Image { height, width, channels, png })
    }

    /// Returns the number of rows.
    pub fn height(&self) -> usize {
        self.height as usize
    }

    /// Returns the number of columns.
    pub fn width(&self) -> usize {
        self.width as usize
    }

    /// Returns the number of channels, from 1 to 4.
    pub fn channels(&self) -> usize {
        self.channels as usize
    }

    /// Returns the PNG file.
    pub fn png(&self) -> &[u8] {
        &self.png
    }

    pub(super) fn to_wire(&self) -> wire::Image {
        // PNG has sizes below 2^31.
        let size = |size: u32| i32::try_from(size).unwrap_or(i32::MAX);
        wire::Image {
            height: size(self.height),
            width: size(self.width),
            colorspace: size(self.channels),
            encoded_image_string: self.png.clone(),
        }
    }
}

/// Returns the shape in PNG's numbers.
fn checked(shape: [usize; 3], given: usize) -> Result<[u32; 3]> {
    let [height, width, channels] = shape;
    let size = |size: usize| u32::try_from(size).ok().filter(|size| (1..=MAX_SIZE).contains(size));
    let sizes = size(height).zip(size(width)).filter(|_| (1..=4).contains(&channels));
    let Some((tall, wide)) = sizes else {
        return Err(refused(format!(
            "has the shape {shape:?}, expected height, width (1 or more) and 1 to 4 channels"
        )));
    };
    match height.checked_mul(width).and_then(|count| count.checked_mul(channels)) {
        Some(count) if count == given => Ok([tall, wide, channels as u32]),
        _ => Err(refused(format!("of shape {shape:?} was given {given} values"))),
    }
}

fn refused(problem: String) -> Error {
    Error::Image { problem }
}

/// The largest height and width of PNG.
const MAX_SIZE: u32 = i32::MAX as u32;

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes with the same crate; TensorBoard's tests decode with another one.
    fn pixels(image: &Image) -> Vec<u8> {
        let mut reader = png::Decoder::new(Cursor::new(image.png())).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        pixels
    }

    #[test]
    fn pixels_of_all_channels_are_kept() {
        let bytes: Vec<u8> = (0..24).map(|at| at * 10).collect();
        for channels in 1..=4 {
            let image = Image::new([2, 3, channels], &bytes[..6 * channels]).unwrap();
            assert_eq!((image.height(), image.width(), image.channels()), (2, 3, channels));
            assert_eq!(pixels(&image), bytes[..6 * channels]);
            assert_eq!(Image::from_png(image.png()).unwrap(), image);
        }
    }

    #[test]
    fn numbers_are_clamped_to_bytes() {
        let floats = [0.0, 0.5, 1.0, -3.0, 7.0, f32::NAN];
        assert_eq!(pixels(&Image::from_floats([2, 3, 1], &floats).unwrap()), [0, 128, 255, 0, 255, 0]);
    }

    #[test]
    fn what_is_no_image_is_refused_in_words() {
        let text = |result: Result<Image>| result.unwrap_err().to_string();
        for shape in [[0, 3, 1], [2, 0, 1], [2, 3, 0], [2, 3, 5], [1 << 40, 3, 1]] {
            let text = text(Image::new(shape, &[]));
            assert!(text.contains(&format!("{shape:?}")) && text.contains("1 to 4 channels"), "{text}");
        }
        let short = text(Image::new([2, 3, 1], &[0; 5]));
        assert!(short.contains("[2, 3, 1] was given 5 values"), "{short}");
        assert!(text(Image::from_floats([1, 1, 1], &[])).contains("was given 0 values"));
        assert!(text(Image::new([1 << 30, 1 << 30, 4], &[0; 4])).contains("was given 4 values"));
        assert!(text(Image::from_png(*b"GIF89a")).contains("6 bytes is not a PNG file"));
    }
}
