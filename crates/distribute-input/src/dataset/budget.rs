//! A limit of the memory that the stages of a pipeline hold elements in.

use std::any::{Any, TypeId, type_name};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use crate::{Array, Error, Result};

/// The sizes of elements in memory, by their type, for
/// [`Dataset::memory_budget`](crate::Dataset::memory_budget).
///
/// Known from the beginning are `String`, `Vec<u8>`, and [`Array`] of numbers of 8 to 64 bits, `bool` and `String`.
///
/// # Examples
/// ```
/// use distribute_input::{Array, Sizes};
/// let sizes = Sizes::default()
///     .with(|(pixels, _): &(Array<u8>, Array<i64>)| pixels.as_slice().len() + 8);
/// ```
#[derive(Clone)]
pub struct Sizes {
    /// `None` where elements do not count.
    by_type: HashMap<TypeId, Option<Measure>>,
}

type Measure = Arc<dyn Fn(&dyn Any) -> usize + Send + Sync>;

impl Sizes {
    /// Adds or replaces the size in bytes of elements of type `T`.
    pub fn with<T: 'static>(mut self, size: impl Fn(&T) -> usize + Send + Sync + 'static) -> Sizes {
        let measure = move |element: &dyn Any| element.downcast_ref::<T>().map_or(0, &size);
        self.by_type.insert(TypeId::of::<T>(), Some(Arc::new(measure)));
        self
    }

    /// Leaves elements of a type out of the budget.
    pub(super) fn without(mut self, element: TypeId) -> Sizes {
        self.by_type.insert(element, None);
        self
    }
}

impl Default for Sizes {
    fn default() -> Sizes {
        let sizes = Sizes { by_type: HashMap::new() };
        macro_rules! arrays {
            ($sizes:expr, $($number:ty)*) => {
                $sizes$(.with(|array: &Array<$number>| size_of_val(array.as_slice())))*
            };
        }
        arrays!(sizes, f32 f64 i8 i16 i32 i64 u8 u16 u32 u64 bool)
            .with(|text: &String| text.len())
            .with(|bytes: &Vec<u8>| bytes.len())
            .with(|texts: &Array<String>| texts.as_slice().iter().map(|text| size_of::<String>() + text.len()).sum())
    }
}

impl fmt::Debug for Sizes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Sizes").field("types", &self.by_type.len()).finish_non_exhaustive()
    }
}

/// The share of each stage, and how elements are measured.
#[derive(Debug)]
pub(crate) struct Budget {
    stage_bytes: usize,
    sizes: Sizes,
}

impl Budget {
    pub(super) fn new(stage_bytes: usize, sizes: Sizes) -> Budget {
        Budget { stage_bytes, sizes }
    }

    /// Returns the budget of each of several pipelines that are one stage of this one.
    pub(crate) fn divided(&self, stages: usize) -> Budget {
        Budget { stage_bytes: self.stage_bytes / stages.max(1), sizes: self.sizes.clone() }
    }

    /// Returns how a stage measures elements of type `T`.
    pub(crate) fn limit<T: 'static>(&self, stage: &'static str) -> Result<Limit<T>> {
        let measure = match self.sizes.by_type.get(&TypeId::of::<T>()) {
            Some(Some(measure)) => Arc::clone(measure),
            Some(None) => return Ok(Limit::none()),
            None => return Err(Error::UnknownSize { stage, element: type_name::<T>() }),
        };
        Ok(Limit { bytes: self.stage_bytes, size: Arc::new(move |element: &T| measure(element)) })
    }
}

/// The bytes that one stage may hold in elements of type `T`.
pub(crate) struct Limit<T> {
    bytes: usize,
    size: Arc<dyn Fn(&T) -> usize + Send + Sync>,
}

impl<T> Limit<T> {
    pub(crate) fn none() -> Limit<T> {
        Limit { bytes: usize::MAX, size: Arc::new(|_| 0) }
    }

    pub(crate) fn size(&self, element: &T) -> usize {
        (self.size)(element)
    }

    pub(crate) fn is_none(&self) -> bool {
        self.bytes == usize::MAX
    }

    /// Returns whether there is room for more bytes than are held.
    pub(crate) fn has_room(&self, held: usize, more: usize) -> bool {
        held.saturating_add(more) <= self.bytes
    }
}

impl<T: 'static> Limit<T> {
    /// Returns the limit of lists of elements.
    pub(crate) fn of_lists(self) -> Limit<Vec<T>> {
        let size = self.size;
        Limit { bytes: self.bytes, size: Arc::new(move |list: &Vec<T>| list.iter().map(|one| size(one)).sum()) }
    }
}
