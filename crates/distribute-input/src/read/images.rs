//! Images in folders.

use std::io;
use std::path::{Path, PathBuf};

use super::packing::Packing;
use super::{BadRecord, RecordReader};
use crate::dataset::list;
use crate::{Array, Dataset, Error, FileShard, Result, store};

/// Folders of images, one for each class.
///
/// # Examples
/// ```no_run
/// use distribute_input::read::{ImageFolder, ReadOptions};
/// let flowers = ImageFolder::open("flowers")?;          // flowers/daisy/1.jpg, flowers/rose/7.jpg, …
/// println!("{:?}", flowers.classes());
/// let images = flowers.dataset().read(flowers.images([64, 64]), ReadOptions::default()).shuffle(1000, 42).batch(32);
/// # Ok::<(), distribute_input::Error>(())
/// ```
///
/// # Source
/// `tf.keras.utils.image_dataset_from_directory`.
#[derive(Clone, Debug)]
pub struct ImageFolder {
    classes: Vec<String>,
    paths: Vec<PathBuf>,
}

/// A reader of images, resized to one size as red, green and blue, with the index of their class.
///
/// # Shapes
/// `[height, width, 3]`, and a scalar.
#[derive(Clone, Debug)]
pub struct Images {
    classes: Vec<String>,
    size: [u32; 2],
}

impl ImageFolder {
    /// Lists the subfolders of `root`, which are the classes, sorted by name, and their PNG and JPEG files.
    ///
    /// # Errors
    /// [`Error::File`] if a folder cannot be read, [`Error::NoFiles`] if there is no image.
    pub fn open(root: impl AsRef<Path>) -> Result<ImageFolder> {
        let list = |folder: &Path, is_wanted: &dyn Fn(&Path) -> bool| -> Result<Vec<(PathBuf, bool)>> {
            list(folder, is_wanted).map_err(|source| Error::File { path: folder.to_owned(), source: source.into() })
        };
        let root = root.as_ref();
        // Classes may have names with a dot; of other names with one nothing is asked that could fail.
        let may_be_class = |path: &Path| path.extension().is_none() || store::is_url(root) || path.is_dir();
        let (mut classes, mut paths) = (Vec::new(), Vec::new());
        for (folder, _) in list(root, &may_be_class)?.into_iter().filter(|(_, is_folder)| *is_folder) {
            classes.push(class_of(&folder.join("any")));
            paths.extend(list(&folder, &is_image)?.into_iter().map(|(path, _)| path));
        }
        if paths.is_empty() { Err(Error::NoFiles) } else { Ok(ImageFolder { classes, paths }) }
    }

    /// Returns the names of the classes by index.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Returns the dataset of image files.
    pub fn dataset(&self) -> Dataset<FileShard> {
        Dataset::from_files(self.paths.clone())
    }

    /// Returns a reader that resizes all images to `size`: height and width.
    pub fn images(&self, size: [u32; 2]) -> Images {
        Images { classes: self.classes.clone(), size }
    }
}

impl RecordReader for Images {
    type Record = (Array<u8>, Array<i64>);
    type Records = std::option::IntoIter<Result<Self::Record, BadRecord>>;

    fn open(&self, file: &FileShard) -> io::Result<Self::Records> {
        if !file.has(0) {
            return Ok(None.into_iter());
        }
        let bytes = file.open()?.read_all()?;
        let decode = || -> std::result::Result<Self::Record, String> {
            let [height, width] = self.size;
            let image = image::load_from_memory(&bytes).map_err(|error| match Packing::of(&bytes) {
                Some(packing) => packing.refusal("since images are compressed by themselves"),
                None => error.to_string(),
            })?;
            let image = image.resize_exact(width, height, image::imageops::FilterType::Triangle).to_rgb8();
            let class = class_of(&file.path);
            let label = self.classes.iter().position(|known| *known == class);
            let label = label.ok_or_else(|| format!("its folder {class:?} is none of the classes"))?;
            let shape = [height as usize, width as usize, 3];
            let pixels = Array::new(shape, image.into_raw()).map_err(|error| error.to_string())?;
            Ok((pixels, Array::scalar(label as i64)))
        };
        Ok(Some(decode().map_err(|problem| BadRecord::new(0, 0, problem))).into_iter())
    }
}

fn is_image(path: &Path) -> bool {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase());
    extension.is_some_and(|extension| matches!(extension.as_str(), "png" | "jpg" | "jpeg"))
}

fn class_of(path: &Path) -> String {
    let folder = path.parent().and_then(Path::file_name);
    folder.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
