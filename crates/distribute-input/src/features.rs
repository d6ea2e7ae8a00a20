//! Named columns, as tables have them.

use std::ops::Range;
use std::sync::Arc;

use crate::{Array, Arrays, Element, ElementSpec, Error, Pad, Result};

/// The library marker under which [`Features`] and [`Column`] are elements.
#[derive(Clone, Copy, Debug)]
pub enum Named {}

/// One column of floating-point numbers, integers or texts. In a batch, its leading dimension runs over the examples.
#[derive(Clone, Debug, PartialEq)]
pub enum Column {
    /// Floating-point numbers, such as measurements.
    Numbers(Array<f32>),
    /// Integers, such as classes and counts.
    Integers(Array<i64>),
    /// Texts, such as names of categories.
    Texts(Array<String>),
}

/// Named columns with equal numbers of rows: the features of a batch of examples, or of one example.
///
/// # Examples
/// ```
/// use distribute_input::{Column, Dataset, Features};
/// let flowers = Features::new([
///     ("width", Column::from(vec![0.2, 1.3, 2.1])),
///     ("colour", Column::from(vec!["white", "blue", "blue"])),
/// ])?;
/// let kinds = Column::from(vec![0, 1, 1]);
/// let data = Dataset::from_tensor_slices((flowers, kinds)).shuffle(3, 7).batch(2);
/// let (features, kinds) = data.iter().next().expect("there is a batch")?;
/// assert_eq!((features.examples(), kinds.len()), (2, 2));
/// assert_eq!(features.column("width")?.shape(), [2]);
/// # Ok::<(), distribute_input::Error>(())
/// ```
///
/// # Source
/// The dictionary of features that an input function of `tf.estimator` yields.
#[derive(Clone, Debug, PartialEq)]
pub struct Features {
    /// Sorted; shared because every row and every batch has the same names.
    names: Arc<[String]>,
    columns: Vec<Column>,
}

impl Features {
    /// Creates features from named columns.
    ///
    /// # Errors
    /// [`Error::Column`] if a name is repeated or columns differ in length, [`Error::Nothing`] if there are no columns.
    pub fn new<N: Into<String>>(columns: impl IntoIterator<Item = (N, Column)>) -> Result<Features> {
        let mut named: Vec<(String, Column)> =
            columns.into_iter().map(|(name, column)| (name.into(), column)).collect();
        named.sort_by(|(one, _), (two, _)| one.cmp(two));
        let Some((first, column)) = named.first() else { return Err(Error::Nothing { action: "Features::new" }) };
        let (first, rows) = (first.clone(), column.shape().first().copied());
        for (index, (name, column)) in named.iter().enumerate() {
            let problem = match column.shape().first().copied() {
                _ if index > 0 && named[index - 1].0 == *name => {
                    "it is there twice; give each column a name of its own".to_owned()
                }
                own if own != rows => {
                    let said =
                        |rows: Option<usize>| rows.map_or("one example".to_owned(), |rows| format!("{rows} rows"));
                    let (own, rows) = (said(own), said(rows));
                    format!("it has {own}, and column {first:?} {rows}; give every column the same number")
                }
                _ => continue,
            };
            return Err(Error::Column { name: name.clone(), problem });
        }
        let (names, columns): (Vec<String>, Vec<Column>) = named.into_iter().unzip();
        Ok(Features { names: names.into(), columns })
    }

    /// Returns the names in sorted order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns a column by its name.
    ///
    /// # Errors
    /// [`Error::Column`] if there is no such column; the message lists the existing names.
    pub fn column(&self, name: &str) -> Result<&Column> {
        let found = self.names.binary_search_by(|known| known.as_str().cmp(name));
        found.map(|index| &self.columns[index]).map_err(|_| Error::Column {
            name: name.to_owned(),
            problem: format!("the data have none of this name; they have {}", self.names.join(", ")),
        })
    }

    /// Returns the number of examples; 1 for the features of a single example, which have no dimension for examples.
    pub fn examples(&self) -> usize {
        self.columns.first().map_or(0, Column::len)
    }

    /// Applies a function to every column.
    fn each(&self, function: impl Fn(&Column) -> Result<Column>) -> Result<Features> {
        let columns: Result<Vec<Column>> = self.columns.iter().map(function).collect();
        Ok(Features { names: self.names.clone(), columns: columns? })
    }

    /// Joins the columns of several features by name.
    fn joined(
        items: &[Features],
        action: &'static str,
        join: impl Fn(&[Column]) -> Result<Column>,
    ) -> Result<Features> {
        let first = items.first().ok_or(Error::Nothing { action })?;
        for item in items {
            if let Some(name) = differing(&first.names, &item.names) {
                let problem = "some examples have it and others do not; give every example the same columns".to_owned();
                return Err(Error::Column { name: name.to_owned(), problem });
            }
        }
        let column = |index: usize| {
            let columns: Vec<Column> = items.iter().map(|item| item.columns[index].clone()).collect();
            join(&columns).map_err(|error| match error {
                Error::Column { problem, .. } => Error::Column { name: first.names[index].clone(), problem },
                Error::UnequalShapes { index: at, got, expected, .. } => {
                    let problem = format!(
                        "example {at} has shape {got:?}, example 0 {expected:?}; make them equal, or call padded_batch"
                    );
                    Error::Column { name: first.names[index].clone(), problem }
                }
                other => other,
            })
        };
        let columns: Result<Vec<Column>> = (0..first.columns.len()).map(column).collect();
        Ok(Features { names: first.names.clone(), columns: columns? })
    }
}

/// Returns a name that only one of the lists contains.
fn differing<'a>(one: &'a Arc<[String]>, two: &'a Arc<[String]>) -> Option<&'a str> {
    if Arc::ptr_eq(one, two) || one == two {
        return None;
    }
    let lacks = |names: &Arc<[String]>, name: &String| names.binary_search(name).is_err();
    one.iter().find(|name| lacks(two, name)).or_else(|| two.iter().find(|name| lacks(one, name))).map(String::as_str)
}

/// Evaluates an expression on the array of a column, for every type of column.
macro_rules! of_array {
    ($column:expr, $array:ident => $value:expr) => {
        match $column {
            Column::Numbers($array) => $value,
            Column::Integers($array) => $value,
            Column::Texts($array) => $value,
        }
    };
}

/// Evaluates an expression on the array of a column and wraps the result in a column of the same type.
macro_rules! in_kind {
    ($column:expr, $array:ident => $value:expr) => {
        match $column {
            Column::Numbers($array) => Ok(Column::Numbers($value)),
            Column::Integers($array) => Ok(Column::Integers($value)),
            Column::Texts($array) => Ok(Column::Texts($value)),
        }
    };
}

impl Column {
    /// Returns the extents, outermost first.
    pub fn shape(&self) -> &[usize] {
        of_array!(self, array => array.shape())
    }

    /// Returns the number of rows; 1 for the value of a single example, which has no dimension for rows.
    pub fn len(&self) -> usize {
        self.shape().first().copied().unwrap_or(1)
    }

    /// Returns whether the column has no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the type of the column for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Column::Numbers(_) => "numbers",
            Column::Integers(_) => "whole numbers",
            Column::Texts(_) => "texts",
        }
    }

    fn joined(
        items: &[Column],
        action: &'static str,
        numbers: fn(&[Array<f32>]) -> Result<Array<f32>>,
        integers: fn(&[Array<i64>]) -> Result<Array<i64>>,
        texts: fn(&[Array<String>]) -> Result<Array<String>>,
    ) -> Result<Column> {
        fn all<T: Clone>(items: &[Column], pick: fn(&Column) -> Option<&Array<T>>) -> Result<Vec<Array<T>>> {
            let of = |item| pick(item).cloned().ok_or_else(|| mixed(items));
            items.iter().map(of).collect()
        }
        match items.first().ok_or(Error::Nothing { action })? {
            Column::Numbers(_) => {
                let arrays = all(items, |item| if let Column::Numbers(array) = item { Some(array) } else { None })?;
                numbers(&arrays).map(Column::Numbers)
            }
            Column::Integers(_) => {
                let arrays = all(items, |item| if let Column::Integers(array) = item { Some(array) } else { None })?;
                integers(&arrays).map(Column::Integers)
            }
            Column::Texts(_) => {
                let arrays = all(items, |item| if let Column::Texts(array) = item { Some(array) } else { None })?;
                texts(&arrays).map(Column::Texts)
            }
        }
    }
}

fn mixed(items: &[Column]) -> Error {
    let mut kinds: Vec<&str> = items.iter().map(Column::kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let problem = format!("its examples are of several types: {}; give all the same", kinds.join(" and "));
    Error::Column { name: "labels".to_owned(), problem }
}

impl Element<Named> for Column {
    fn stack(items: &[Self]) -> Result<Self> {
        Column::joined(items, "stack", Element::<Arrays>::stack, Element::<Arrays>::stack, Element::<Arrays>::stack)
    }

    fn rows(&self) -> Result<usize> {
        of_array!(self, array => array.rows())
    }

    fn row(&self, index: usize) -> Result<Self> {
        in_kind!(self, array => array.row(index)?)
    }

    fn slice(&self, rows: Range<usize>) -> Result<Self> {
        in_kind!(self, array => array.slice(rows)?)
    }

    fn gather(&self, rows: &[usize]) -> Result<Self> {
        in_kind!(self, array => array.gather(rows)?)
    }

    fn concat(items: &[Self]) -> Result<Self> {
        Column::joined(items, "concat", Element::<Arrays>::concat, Element::<Arrays>::concat, Element::<Arrays>::concat)
    }

    fn spec(&self) -> Vec<ElementSpec> {
        of_array!(self, array => array.spec())
    }
}

impl Pad<Named> for Column {
    fn padded(items: &[Self]) -> Result<Vec<Self>> {
        let shapes: Vec<Array<()>> = items
            .iter()
            .map(|item| Array::new(item.shape(), vec![(); item.shape().iter().product()]))
            .collect::<Result<_>>()?;
        // Arrays of units determine the common shape.
        let shape = Array::padded(&shapes)?.first().map_or_else(Vec::new, |first| first.shape().to_vec());
        items.iter().map(|item| in_kind!(item, array => array.filled(&shape))).collect()
    }
}

impl Element<Named> for Features {
    fn stack(items: &[Self]) -> Result<Self> {
        Features::joined(items, "stack", Column::stack)
    }

    fn rows(&self) -> Result<usize> {
        self.columns.first().map_or(Ok(0), Element::rows)
    }

    fn row(&self, index: usize) -> Result<Self> {
        self.each(|column| column.row(index))
    }

    fn slice(&self, rows: Range<usize>) -> Result<Self> {
        self.each(|column| column.slice(rows.clone()))
    }

    fn gather(&self, rows: &[usize]) -> Result<Self> {
        self.each(|column| column.gather(rows))
    }

    fn concat(items: &[Self]) -> Result<Self> {
        Features::joined(items, "concat", Column::concat)
    }

    fn spec(&self) -> Vec<ElementSpec> {
        self.columns.iter().flat_map(Element::spec).collect()
    }
}

impl Pad<Named> for Features {
    fn padded(items: &[Self]) -> Result<Vec<Self>> {
        let Some(first) = items.first() else { return Ok(Vec::new()) };
        let mut padded = items.to_vec();
        for (index, name) in first.names.iter().enumerate() {
            let columns: Result<Vec<Column>> = items.iter().map(|item| item.column(name).cloned()).collect();
            for (item, column) in padded.iter_mut().zip(Column::padded(&columns?)?) {
                item.columns[index] = column;
            }
        }
        Ok(padded)
    }
}

macro_rules! from_values {
    ($($kind:ident of $($value:ty),+;)*) => {$($(
        /// Creates a column with one value per example.
        impl From<Vec<$value>> for Column {
            fn from(values: Vec<$value>) -> Column {
                Column::$kind(values.into_iter().map(Into::into).collect::<Vec<_>>().into())
            }
        }

        /// Creates the value of a single example.
        impl From<$value> for Column {
            fn from(value: $value) -> Column {
                Column::$kind(Array::scalar(value.into()))
            }
        }
    )+)*};
}

from_values! {
    Numbers of f32;
    Integers of i64, i32, u32;
    Texts of String, &str;
}

impl From<Array<f32>> for Column {
    fn from(array: Array<f32>) -> Column {
        Column::Numbers(array)
    }
}

impl From<Array<i64>> for Column {
    fn from(array: Array<i64>) -> Column {
        Column::Integers(array)
    }
}

impl From<Array<String>> for Column {
    fn from(array: Array<String>) -> Column {
        Column::Texts(array)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dataset, InputOptions, Topology, distribute_dataset};

    fn people(names: &[&str]) -> Features {
        let ages: Vec<f32> = (0..names.len()).map(|age| age as f32).collect();
        Features::new([("name", Column::from(names.to_vec())), ("age", Column::from(ages))]).unwrap()
    }

    fn texts(features: &Features) -> Vec<&str> {
        let Column::Texts(names) = features.column("name").unwrap() else { panic!("{features:?}") };
        names.as_slice().iter().map(String::as_str).collect()
    }

    #[test]
    fn columns_are_divided_and_joined_together() {
        let all = people(&["a", "b", "c"]);
        assert_eq!(all.names(), ["age", "name"]);
        let rows: Vec<Features> = (0..3).map(|row| all.row(row).unwrap()).collect();
        assert_eq!(rows[1].column("name").unwrap(), &Column::from("b"));
        assert_eq!(Features::stack(&rows).unwrap(), all);
        assert_eq!(texts(&all.gather(&[2, 0]).unwrap()), ["c", "a"]);
        let parts = [all.slice(0..1).unwrap(), all.slice(1..1).unwrap(), all.slice(1..3).unwrap()];
        assert_eq!((parts[1].examples(), Features::concat(&parts).unwrap()), (0, all.clone()));
        assert_eq!(all.spec()[1].to_string(), "[3] alloc::string::String");
    }

    #[test]
    fn features_and_labels_go_through_a_pipeline() {
        let data = Dataset::from_tensor_slices((people(&["a", "b", "c", "d", "e"]), Column::from(vec![0, 1, 2, 3, 4])));
        let options = InputOptions::default();
        let data = distribute_dataset(&data.shuffle(5, 3).batch(2), Topology::local(2).unwrap(), options).unwrap();
        let mut seen: Vec<(String, i64)> = Vec::new();
        for step in &data {
            for (features, labels) in step.unwrap() {
                let Column::Integers(labels) = labels else { panic!("{labels:?}") };
                seen.extend(texts(&features).into_iter().map(str::to_owned).zip(labels.as_slice().iter().copied()));
            }
        }
        seen.sort();
        let expected = ["a", "b", "c", "d", "e"].map(str::to_owned).into_iter().zip(0..);
        assert_eq!(seen, expected.collect::<Vec<_>>());
    }

    #[test]
    fn rows_of_different_lengths_are_filled_up() {
        let words = |words: &[&str]| {
            let words = words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
            Features::new([("words", Column::Texts(words.into()))]).unwrap()
        };
        let padded = Features::stack(&Features::padded(&[words(&["a"]), words(&["b", "c"])]).unwrap()).unwrap();
        let Column::Texts(words) = padded.column("words").unwrap() else { panic!("{padded:?}") };
        assert_eq!((words.shape(), words.as_slice().join(",")), (&[2, 2][..], "a,,b,c".to_owned()));
    }

    #[test]
    fn bad_columns_are_answered_by_a_sentence() {
        let said = |result: Result<Features>| result.unwrap_err().to_string();
        let (one, two) = (Column::from(vec![1.0]), Column::from(vec![1, 2]));
        assert!(
            said(Features::new([("a", one.clone()), ("b", two.clone())]))
                .contains("it has 2 rows, and column \"a\" 1 rows")
        );
        assert!(said(Features::new([("a", one.clone()), ("a", one.clone())])).contains("\"a\": it is there twice"));
        assert!(said(Features::new::<String>([])).contains("no values were given"));
        let text = people(&["x"]).column("height").unwrap_err().to_string();
        assert!(text.contains("\"height\"") && text.contains("they have age, name"), "{text}");
        let other = Features::new([("age", one.clone())]).unwrap();
        assert!(said(Features::concat(&[people(&["x"]), other.clone()])).contains("\"name\": some examples have it"));
        let whole = Features::new([("age", Column::from(vec![1]))]).unwrap();
        assert!(
            said(Features::concat(&[other, whole]))
                .contains("\"age\": its examples are of several types: numbers and whole")
        );
    }
}
