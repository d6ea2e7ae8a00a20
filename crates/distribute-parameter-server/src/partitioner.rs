//! Partitioners: the number of shards of a variable.

use distribute_device::DType;

use crate::{Error, Result};

/// Decides into how many shards a variable is split, along its first dimension.
///
/// # Source
/// `tf.distribute.experimental.partitioners.Partitioner`.
pub trait Partitioner: Send + Sync {
    /// Returns the number of parts along each dimension; all but the first must be 1.
    fn partition(&self, shape: &[usize], dtype: DType) -> Vec<usize>;
}

impl<F: Fn(&[usize], DType) -> Vec<usize> + Send + Sync> Partitioner for F {
    fn partition(&self, shape: &[usize], dtype: DType) -> Vec<usize> {
        self(shape, dtype)
    }
}

/// A fixed number of shards, or as many as a variable has rows if these are fewer.
///
/// # Source
/// `tf.distribute.experimental.partitioners.FixedShardsPartitioner`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedShardsPartitioner {
    num_shards: usize,
}

impl FixedShardsPartitioner {
    /// Creates a partitioner of `num_shards` shards.
    pub fn new(num_shards: usize) -> FixedShardsPartitioner {
        FixedShardsPartitioner { num_shards }
    }
}

/// One shard for each minimum size, rounded up and up to a limit, so that shards may be smaller than that size. At
/// most one shard per row.
///
/// # Source
/// `tf.distribute.experimental.partitioners.MinSizePartitioner`, whose defaults are 256 KiB and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MinSizePartitioner {
    min_shard_bytes: usize,
    max_shards: usize,
}

impl MinSizePartitioner {
    /// Creates a partitioner with a minimum size in bytes and a maximum number of shards.
    pub fn new(min_shard_bytes: usize, max_shards: usize) -> MinSizePartitioner {
        MinSizePartitioner { min_shard_bytes, max_shards }
    }
}

/// The smallest number of shards of at most a maximum size; a shard of a single row may be larger.
///
/// # Source
/// `tf.distribute.experimental.partitioners.MaxSizePartitioner`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxSizePartitioner {
    max_shard_bytes: usize,
    max_shards: Option<usize>,
}

impl MaxSizePartitioner {
    /// Creates a partitioner with a maximum size in bytes.
    pub fn new(max_shard_bytes: usize) -> MaxSizePartitioner {
        MaxSizePartitioner { max_shard_bytes, max_shards: None }
    }

    /// Sets a maximum number of shards, which takes precedence over their size.
    pub fn max_shards(self, max_shards: usize) -> MaxSizePartitioner {
        MaxSizePartitioner { max_shards: Some(max_shards), ..self }
    }
}

// A setting of zero gives zero parts, which is an error where the parts are used.

impl Partitioner for FixedShardsPartitioner {
    fn partition(&self, shape: &[usize], _: DType) -> Vec<usize> {
        along_rows(shape, |rows, _| self.num_shards.min(rows))
    }
}

impl Partitioner for MinSizePartitioner {
    fn partition(&self, shape: &[usize], dtype: DType) -> Vec<usize> {
        along_rows(shape, |rows, row_elems| {
            if self.min_shard_bytes == 0 {
                return 0;
            }
            let bytes = rows * row_elems * dtype.size_bytes();
            bytes.div_ceil(self.min_shard_bytes).max(1).min(self.max_shards).min(rows)
        })
    }
}

impl Partitioner for MaxSizePartitioner {
    fn partition(&self, shape: &[usize], dtype: DType) -> Vec<usize> {
        along_rows(shape, |rows, row_elems| {
            if self.max_shard_bytes == 0 {
                return 0;
            }
            let row_bytes = (row_elems * dtype.size_bytes()).max(1);
            let rows_each = (self.max_shard_bytes / row_bytes).max(1);
            rows.div_ceil(rows_each).min(self.max_shards.unwrap_or(usize::MAX))
        })
    }
}

/// Returns `parts` of the number and length of rows, and 1 along all other dimensions.
fn along_rows(shape: &[usize], parts: impl Fn(usize, usize) -> usize) -> Vec<usize> {
    let mut all = vec![1; shape.len()];
    if let (Some(first), Some((rows, row))) = (all.first_mut(), shape.split_first()) {
        *first = if *rows == 0 { 1 } else { parts(*rows, row.iter().product()) };
    }
    all
}

/// Returns the number of shards of a variable, at most its number of rows.
///
/// # Errors
/// [`Error::Partition`] if the partitioner returns anything other than one positive number for each dimension, and 1
/// for all but the first.
pub(crate) fn shards_of(name: &str, shape: &[usize], dtype: DType, partitioner: &dyn Partitioner) -> Result<usize> {
    // A scalar is never split.
    let Some(rows) = shape.first() else { return Ok(1) };
    let parts = partitioner.partition(shape, dtype);
    match parts.split_first() {
        Some((first, rest)) if *first > 0 && parts.len() == shape.len() && rest.iter().all(|part| *part == 1) => {
            Ok((*first).min((*rows).max(1)))
        }
        _ => Err(Error::Partition { name: name.to_owned(), shape: shape.to_vec(), given: parts }),
    }
}

/// Returns each shard's range of rows: the first `rows % shards` have one more.
pub(crate) fn div_cut(rows: usize, shards: usize) -> Vec<std::ops::Range<usize>> {
    let (each, longer) = (rows / shards.max(1), rows % shards.max(1));
    let mut start = 0;
    (0..shards)
        .map(|shard| {
            let end = start + each + usize::from(shard < longer);
            std::mem::replace(&mut start, end)..end
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shards(shape: &[usize], partitioner: impl Partitioner) -> usize {
        shards_of("w", shape, DType::F32, &partitioner).unwrap()
    }

    #[test]
    fn fixed_shards_are_no_more_than_rows() {
        assert_eq!(shards(&[5, 2], FixedShardsPartitioner::new(2)), 2);
        assert_eq!(shards(&[5, 2], FixedShardsPartitioner::new(9)), 5);
        assert_eq!(shards(&[], FixedShardsPartitioner::new(9)), 1);
        assert_eq!(shards(&[0, 4], FixedShardsPartitioner::new(9)), 1);
    }

    #[test]
    fn sizes_decide_as_in_tensorflow() {
        // 16 × 64 × 4 bytes = 4096.
        assert_eq!(shards(&[16, 64], MinSizePartitioner::new(4096, 8)), 1);
        assert_eq!(shards(&[16, 64], MinSizePartitioner::new(1024, 8)), 4);
        assert_eq!(shards(&[16, 64], MinSizePartitioner::new(1000, 8)), 5);
        assert_eq!(shards(&[16, 64], MinSizePartitioner::new(1, 8)), 8);
        assert_eq!(shards(&[16, 64], MinSizePartitioner::new(1, 99)), 16);
        assert_eq!(shards(&[16, 64], MaxSizePartitioner::new(4096)), 1);
        assert_eq!(shards(&[16, 64], MaxSizePartitioner::new(1024)), 4);
        assert_eq!(shards(&[16, 64], MaxSizePartitioner::new(1000)), 6);
        assert_eq!(shards(&[16, 64], MaxSizePartitioner::new(1)), 16);
        assert_eq!(shards(&[16, 64], MaxSizePartitioner::new(1).max_shards(3)), 3);
    }

    #[test]
    fn what_no_partition_is_is_refused_in_words() {
        for given in [vec![], vec![0, 1], vec![2, 2], vec![2, 1, 1], vec![2]] {
            let wrong = given.clone();
            let error =
                shards_of("w", &[5, 2], DType::F32, &move |_: &[usize], _| wrong.clone()).unwrap_err().to_string();
            assert!(error.contains("\"w\"") && error.contains(&format!("{given:?}")), "{error}");
        }
        for zero in [
            &FixedShardsPartitioner::new(0) as &dyn Partitioner,
            &MinSizePartitioner::new(0, 1),
            &MaxSizePartitioner::new(0),
        ] {
            assert!(shards_of("w", &[5, 2], DType::F32, zero).is_err());
        }
    }

    #[test]
    fn thirteen_rows_in_five_shards() {
        let lens: Vec<usize> = div_cut(13, 5).into_iter().map(|rows| rows.len()).collect();
        assert_eq!(lens, [3, 3, 3, 2, 2]);
        assert_eq!(div_cut(5, 2), [0..3, 3..5]);
    }

    proptest! {
        #[test]
        fn every_row_is_in_one_shard(rows in 1usize..500, shards in 1usize..40) {
            let cut = div_cut(rows, shards.min(rows));
            prop_assert_eq!(cut.iter().cloned().flatten().collect::<Vec<_>>(), (0..rows).collect::<Vec<_>>());
        }
    }
}
