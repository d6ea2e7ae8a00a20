//! Columns of record batches as arrays.

use arrow_array::{Array as _, ArrayRef, BooleanArray, RecordBatch};

use super::values::{ColumnValue, Lists, Problem, Rounded, Rows, lists, mark_missing, values};
use crate::{Array, Error, Ragged, Result};

/// Converts columns of numbers to floats, rounded to the nearest; see [`column()`] for integers that must stay exact,
/// and for texts and lists.
///
/// Columns of integers, floats of 16, 32 and 64 bits, booleans (0 and 1) and decimals are numbers, also where they are
/// encoded by a dictionary. The name `a.b` stands for the field `b` of the struct `a`.
///
/// # Shapes
/// `[rows, names.len()]`.
///
/// # Errors
/// [`Error::Column`] if a column does not exist, is not numeric, or has a number beyond the range of `f32` or missing
/// values, for which [`columns_or`] has a substitute.
pub fn columns(batch: &RecordBatch, names: &[&str]) -> Result<Array<f32>> {
    floats(batch, names, None)
}

/// Converts columns like [`columns`], with a number in place of each missing value.
///
/// # Errors
/// [`Error::Column`] if a column does not exist, is not numeric, or has a number beyond the range of `f32`.
pub fn columns_or(batch: &RecordBatch, names: &[&str], missing: f32) -> Result<Array<f32>> {
    floats(batch, names, Some(missing))
}

fn floats(batch: &RecordBatch, names: &[&str], missing: Option<f32>) -> Result<Array<f32>> {
    let missing = missing.map(Rounded);
    let mut elements = vec![0.0; batch.num_rows() * names.len()];
    for (place, name) in names.iter().enumerate() {
        let read = read::<Rounded>(batch, name, missing.as_ref())?;
        if read.shape().len() > 1 {
            let problem = format!("its rows have shape {:?}, and numbers are wanted; call column", &read.shape()[1..]);
            return Err(Error::Column { name: (*name).to_owned(), problem });
        }
        for (row, Rounded(value)) in read.as_slice().iter().enumerate() {
            elements[row * names.len() + place] = *value;
        }
    }
    Array::new([batch.num_rows(), names.len()], elements)
}

/// Converts one column to values of a type, without changing them: labels and identifiers keep their values.
///
/// - Integers become any integer or float type that holds each of them exactly; booleans are 0 and 1.
/// - Floats become `f32` or `f64`, the former rounded; decimals as well, and integers if their scale is 0.
/// - Booleans become `bool`, texts `String`, texts and bytes `Vec<u8>`.
/// - Dictionaries become the values that their keys stand for.
/// - Lists, whose lengths must be equal, become a further dimension.
///
/// The name `a.b` stands for the field `b` of the struct `a`.
///
/// # Shapes
/// `[rows]`; `[rows, length]` for lists, and so on for lists of lists.
///
/// # Errors
/// [`Error::Column`] if the column does not exist, if a value is missing or has no exact counterpart in `T`, or if
/// lists differ in length. [`column_or`] replaces missing values, [`without_nulls`] drops their rows, and
/// [`ragged_column`] reads lists of any length.
///
/// # Examples
/// ```
/// use distribute_input::read::arrow::{Int64Array, RecordBatch};
/// use distribute_input::read::{column, columns};
/// # use std::sync::Arc;
/// let identifiers = Int64Array::from(vec![16_777_217, 3]);
/// let batch = RecordBatch::try_from_iter([("id", Arc::new(identifiers) as _)])?;
/// assert_eq!(column::<i64>(&batch, "id")?.as_slice(), [16_777_217, 3]);
/// assert_eq!(columns(&batch, &["id"])?.as_slice(), [16_777_216.0, 3.0]);     // rounded
/// assert!(column::<f32>(&batch, "id").is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn column<T: ColumnValue>(batch: &RecordBatch, name: &str) -> Result<Array<T>> {
    read(batch, name, None)
}

/// Converts one column like [`column()`], with a substitute for each missing value; a missing list consists of
/// substitutes.
///
/// # Errors
/// [`Error::Column`] if the column does not exist, if a value has no exact counterpart in `T`, or if lists differ in
/// length.
///
/// # Examples
/// ```
/// use distribute_input::read::arrow::{Int64Array, RecordBatch};
/// use distribute_input::read::column_or;
/// # use std::sync::Arc;
/// let ages = Int64Array::from(vec![Some(41), None]);
/// let batch = RecordBatch::try_from_iter([("age", Arc::new(ages) as _)])?;
/// assert_eq!(column_or(&batch, "age", -1_i64)?.as_slice(), [41, -1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn column_or<T: ColumnValue>(batch: &RecordBatch, name: &str, missing: T) -> Result<Array<T>> {
    read(batch, name, Some(&missing))
}

/// Converts a column of lists that may differ in length, whose items are converted as [`column()`] does.
///
/// # Errors
/// [`Error::Column`] if the column does not exist or does not hold lists, or if a list or an item of one is missing or
/// has no exact counterpart in `T`.
///
/// # Examples
/// ```
/// use distribute_input::read::arrow::{ListArray, RecordBatch};
/// use distribute_input::read::ragged_column;
/// # use std::sync::Arc;
/// # type Int64 = arrow_array::types::Int64Type;
/// let words = [Some(vec![Some(3), Some(1)]), Some(vec![]), Some(vec![Some(4)])];
/// let words = ListArray::from_iter_primitive::<Int64, _, _>(words);
/// let batch = RecordBatch::try_from_iter([("words", Arc::new(words) as _)])?;
/// let words = ragged_column::<i64>(&batch, "words")?;
/// assert_eq!((words.values().as_slice(), words.row_splits()), (&[3, 1, 4][..], &[0, 2, 2, 3][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn ragged_column<T: ColumnValue>(batch: &RecordBatch, name: &str) -> Result<Ragged<T>> {
    let (column, rows) = find(batch, name)?;
    let wrong = |problem: Problem, shape: &[usize]| {
        let problem = problem.sentence(shape);
        Error::Column { name: name.to_owned(), problem }
    };
    let Lists { row_splits, items, positions } = lists(column, rows).map_err(|problem| wrong(problem, &[]))?;
    let mut shape = vec![row_splits.last().copied().unwrap_or(0)];
    let elements = values(items, positions, None, &mut shape).map_err(|problem| wrong(problem, &shape))?;
    Ragged::new(Array::new(shape, elements)?, row_splits)
}

/// Drops the rows in which one of the columns has a missing value, also inside of a list.
///
/// # Errors
/// [`Error::Column`] if a column does not exist.
///
/// # Examples
/// ```
/// use distribute_input::read::arrow::{Int64Array, RecordBatch};
/// use distribute_input::read::{column, without_nulls};
/// # use std::sync::Arc;
/// let (x, y) = (Int64Array::from(vec![Some(1), None, Some(3)]), Int64Array::from(vec![4, 5, 6]));
/// let batch = RecordBatch::try_from_iter([("x", Arc::new(x) as _), ("y", Arc::new(y) as _)])?;
/// let whole = without_nulls(&batch, &["x"])?;
/// assert_eq!(column::<i64>(&whole, "y")?.as_slice(), [4, 6]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn without_nulls(batch: &RecordBatch, names: &[&str]) -> Result<RecordBatch> {
    let mut keep = vec![true; batch.num_rows()];
    for name in names {
        let (column, rows) = find(batch, name)?;
        let numbered = rows.each().enumerate();
        let present = numbered.filter_map(|(row, at)| {
            keep[row] &= at.is_some();
            Some((row, at?))
        });
        let present = present.collect();
        mark_missing(column, present, &mut keep);
    }
    if keep.iter().all(|keep| *keep) {
        return Ok(batch.clone());
    }
    let filtered = arrow_select::filter::filter_record_batch(batch, &BooleanArray::from(keep));
    filtered.map_err(|error| Error::library("without_nulls", error))
}

fn read<T: ColumnValue>(batch: &RecordBatch, name: &str, missing: Option<&T>) -> Result<Array<T>> {
    let (column, rows) = find(batch, name)?;
    let mut shape = vec![batch.num_rows()];
    let elements = values(column, rows, missing, &mut shape)
        .map_err(|problem| Error::Column { name: name.to_owned(), problem: problem.sentence(&shape) })?;
    Array::new(shape, elements)
}

/// Finds a column or a field of a struct, and the rows of it that are there.
fn find<'a>(batch: &'a RecordBatch, name: &str) -> Result<(&'a ArrayRef, Rows)> {
    within(&|name| batch.column_by_name(name), name, Rows::Run(0..batch.num_rows())).ok_or_else(|| {
        let known: Vec<&str> = batch.schema_ref().fields().iter().map(|field| field.name().as_str()).collect();
        let problem = format!("it is not there; name one that is, of {}", known.join(", "));
        Error::Column { name: name.to_owned(), problem }
    })
}

fn within<'a>(columns: &dyn Fn(&str) -> Option<&'a ArrayRef>, name: &str, rows: Rows) -> Option<(&'a ArrayRef, Rows)> {
    if let Some(column) = columns(name) {
        return Some((column, rows));
    }
    // Names may have dots of their own.
    name.match_indices('.').find_map(|(dot, _)| {
        let column = columns(&name[..dot])?;
        let fields = column.as_any().downcast_ref::<arrow_array::StructArray>()?;
        within(&|name| fields.column_by_name(name), &name[dot + 1..], rows.clone().present_in(column))
    })
}
