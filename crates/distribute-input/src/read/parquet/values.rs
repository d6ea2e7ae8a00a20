//! The values of arrow's arrays.

use std::ops::Range;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrowPrimitiveType, GenericListArray, OffsetSizeTrait, types};
use arrow_schema::DataType;

/// Positions in an array: consecutive ones, or each by itself, where `None` stands for a value that is missing.
#[derive(Clone)]
pub(super) enum Rows {
    Run(Range<usize>),
    Each(Vec<Option<usize>>),
}

/// A value that an array may hold.
pub enum Cell<'a> {
    /// An integer.
    Integer(i128),
    /// A float or a decimal.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A text.
    Text(&'a str),
    /// Bytes that need not be a text.
    Bytes(&'a [u8]),
}

/// Why a value has no counterpart in another type.
pub enum Misfit {
    /// No value of the kind has one.
    Kind,
    /// This value has none.
    Value,
}

/// A type of values that columns are converted to.
pub trait ColumnValue: Clone + Send + Sync + 'static {
    /// The type's name, for messages.
    const NAME: &'static str;

    /// Converts a value exactly, or to the nearest float.
    #[doc(hidden)]
    fn of(cell: Cell<'_>) -> Result<Self, Misfit>;
}

macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl ColumnValue for $integer {
            const NAME: &'static str = stringify!($integer);

            fn of(cell: Cell<'_>) -> Result<$integer, Misfit> {
                match cell {
                    Cell::Integer(value) => value.try_into().map_err(|_| Misfit::Value),
                    Cell::Bool(value) => Ok(value.into()),
                    _ => Err(Misfit::Kind),
                }
            }
        }
    )*};
}

integers!(i8, i16, i32, i64, u8, u16, u32, u64);

macro_rules! floats {
    ($($float:ty),*) => {$(
        impl ColumnValue for $float {
            const NAME: &'static str = stringify!($float);

            fn of(cell: Cell<'_>) -> Result<$float, Misfit> {
                match cell {
                    Cell::Integer(value) if (value as $float) as i128 == value => Ok(value as $float),
                    Cell::Integer(_) => Err(Misfit::Value),
                    // Only a value beyond the range of the type becomes infinite.
                    Cell::Float(value) if (value as $float).is_infinite() && value.is_finite() => Err(Misfit::Value),
                    Cell::Float(value) => Ok(value as $float),
                    Cell::Bool(value) => Ok(u8::from(value).into()),
                    Cell::Text(_) | Cell::Bytes(_) => Err(Misfit::Kind),
                }
            }
        }
    )*};
}

floats!(f32, f64);

impl ColumnValue for bool {
    const NAME: &'static str = "bool";

    fn of(cell: Cell<'_>) -> Result<bool, Misfit> {
        if let Cell::Bool(value) = cell { Ok(value) } else { Err(Misfit::Kind) }
    }
}

impl ColumnValue for String {
    const NAME: &'static str = "String";

    fn of(cell: Cell<'_>) -> Result<String, Misfit> {
        if let Cell::Text(text) = cell { Ok(text.to_owned()) } else { Err(Misfit::Kind) }
    }
}

impl ColumnValue for Vec<u8> {
    const NAME: &'static str = "Vec<u8>";

    fn of(cell: Cell<'_>) -> Result<Vec<u8>, Misfit> {
        match cell {
            Cell::Text(text) => Ok(text.as_bytes().to_vec()),
            Cell::Bytes(bytes) => Ok(bytes.to_vec()),
            _ => Err(Misfit::Kind),
        }
    }
}

/// A float that any number is rounded to.
#[derive(Clone)]
pub(super) struct Rounded(pub(super) f32);

impl ColumnValue for Rounded {
    const NAME: &'static str = "numbers";

    fn of(cell: Cell<'_>) -> Result<Rounded, Misfit> {
        match cell {
            Cell::Integer(value) => Ok(Rounded(value as f32)),
            Cell::Float(_) => f32::of(cell).map(Rounded),
            Cell::Bool(value) => Ok(Rounded(u8::from(value).into())),
            Cell::Text(_) | Cell::Bytes(_) => Err(Misfit::Kind),
        }
    }
}

/// Why the values of a column cannot be had.
pub(super) enum Problem {
    Missing,
    /// The column's type, and the type asked for.
    Kind(DataType, &'static str),
    /// The value at a position of the result, and the type asked for.
    Value(usize, String, &'static str),
    Other(String),
}

impl Problem {
    /// Returns the problem in words; `shape` is that of the result.
    pub(super) fn sentence(self, shape: &[usize]) -> String {
        match self {
            Problem::Missing => "it has missing values; give a substitute for them, or drop their rows".to_owned(),
            Problem::Kind(DataType::Struct(fields), _) => {
                let fields: Vec<&str> = fields.iter().map(|field| field.name().as_str()).collect();
                format!("it holds structs; name one of their fields after a dot: {}", fields.join(", "))
            }
            Problem::Kind(held, wanted) => format!("it holds {held}, and {wanted} are wanted"),
            Problem::Value(position, value, wanted) => {
                let row = position / shape.iter().skip(1).product::<usize>().max(1);
                // Numbers of any type are rounded to this one.
                let wanted = if wanted == Rounded::NAME { f32::NAME } else { wanted };
                format!("row {row} has {value}, which {wanted} does not hold; ask for a wider type")
            }
            Problem::Other(problem) => problem,
        }
    }
}

impl Rows {
    pub(super) fn each(&self) -> Box<dyn Iterator<Item = Option<usize>> + '_> {
        match self {
            Rows::Run(rows) => Box::new(rows.clone().map(Some)),
            Rows::Each(rows) => Box::new(rows.iter().copied()),
        }
    }

    fn lack_some(&self) -> bool {
        match self {
            Rows::Run(_) => false,
            Rows::Each(rows) => rows.contains(&None),
        }
    }

    /// Marks the positions at which an array has no value.
    pub(super) fn present_in(self, array: &dyn Array) -> Rows {
        if array.data_type() == &DataType::Null {
            return Rows::Each(self.each().map(|_| None).collect());
        }
        if array.null_count() == 0 {
            return self;
        }
        Rows::Each(self.each().map(|row| row.filter(|row| array.is_valid(*row))).collect())
    }

    /// Returns the positions of the items of lists of equal length.
    fn items(self, length: usize, start: impl Fn(usize) -> usize) -> Rows {
        match self {
            Rows::Run(rows) if rows.is_empty() => Rows::Run(0..0),
            Rows::Run(rows) => Rows::Run(start(rows.start)..start(rows.end - 1) + length),
            Rows::Each(rows) => {
                let items = |row: Option<usize>| (0..length).map(move |item| row.map(|start| start + item));
                Rows::Each(rows.into_iter().flat_map(|row| items(row.map(&start))).collect())
            }
        }
    }
}

/// Reads values of an array, and appends the lengths of its lists to `shape`.
pub(super) fn values<T: ColumnValue>(
    array: &dyn Array,
    rows: Rows,
    missing: Option<&T>,
    shape: &mut Vec<usize>,
) -> Result<Vec<T>, Problem> {
    if matches!(array.data_type(), DataType::Struct(_)) {
        return Err(Problem::Kind(array.data_type().clone(), T::NAME));
    }
    let rows = rows.present_in(array);
    if missing.is_none() && rows.lack_some() {
        return Err(Problem::Missing);
    }
    macro_rules! primitive {
        ($($cell:ident: $($data_type:ident $arrow:ident),*;)*) => {
            match array.data_type() {
                $($(DataType::$data_type => {
                    return numbers::<types::$arrow, T>(array, &rows, missing, |x| Cell::$cell(x.into()));
                })*)*
                _ => {}
            }
        };
    }
    primitive!(
        Integer: Int8 Int8Type, Int16 Int16Type, Int32 Int32Type, Int64 Int64Type,
            UInt8 UInt8Type, UInt16 UInt16Type, UInt32 UInt32Type, UInt64 UInt64Type;
        Float: Float16 Float16Type, Float32 Float32Type, Float64 Float64Type;
    );
    match array.data_type() {
        DataType::Decimal32(_, scale) => {
            numbers::<types::Decimal32Type, T>(array, &rows, missing, |x| decimal(x.into(), *scale))
        }
        DataType::Decimal64(_, scale) => {
            numbers::<types::Decimal64Type, T>(array, &rows, missing, |x| decimal(x.into(), *scale))
        }
        DataType::Decimal128(_, scale) => {
            numbers::<types::Decimal128Type, T>(array, &rows, missing, |x| decimal(x, *scale))
        }
        DataType::Boolean => {
            let array = array.as_boolean();
            cells(&rows, missing, array.data_type(), |row| Cell::Bool(array.value(row)))
        }
        DataType::Utf8 => {
            let array = array.as_string::<i32>();
            cells(&rows, missing, array.data_type(), |row| Cell::Text(array.value(row)))
        }
        DataType::LargeUtf8 => {
            let array = array.as_string::<i64>();
            cells(&rows, missing, array.data_type(), |row| Cell::Text(array.value(row)))
        }
        DataType::Utf8View => {
            let array = array.as_string_view();
            cells(&rows, missing, array.data_type(), |row| Cell::Text(array.value(row)))
        }
        DataType::Binary => {
            let array = array.as_binary::<i32>();
            cells(&rows, missing, array.data_type(), |row| Cell::Bytes(array.value(row)))
        }
        DataType::LargeBinary => {
            let array = array.as_binary::<i64>();
            cells(&rows, missing, array.data_type(), |row| Cell::Bytes(array.value(row)))
        }
        DataType::BinaryView => {
            let array = array.as_binary_view();
            cells(&rows, missing, array.data_type(), |row| Cell::Bytes(array.value(row)))
        }
        DataType::FixedSizeBinary(_) => {
            let array = array.as_fixed_size_binary();
            cells(&rows, missing, array.data_type(), |row| Cell::Bytes(array.value(row)))
        }
        DataType::Null => cells(&rows, missing, array.data_type(), |_| Cell::Bool(false)),
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            // Without values all keys are missing.
            let keys = if dictionary.values().is_empty() { Vec::new() } else { dictionary.normalized_keys() };
            let picked = rows.each().map(|row| row.and_then(|row| keys.get(row).copied()));
            values(dictionary.values(), Rows::Each(picked.collect()), missing, shape)
        }
        DataType::FixedSizeList(_, length) => {
            let length = usize::try_from(*length).unwrap_or(0);
            shape.push(length);
            let items = rows.items(length, |row| row * length);
            values(array.as_fixed_size_list().values(), items, missing, shape)
        }
        DataType::List(_) => list(array.as_list::<i32>(), rows, missing, shape),
        DataType::LargeList(_) => list(array.as_list::<i64>(), rows, missing, shape),
        other => Err(Problem::Kind(other.clone(), T::NAME)),
    }
}

fn list<O: OffsetSizeTrait, T: ColumnValue>(
    list: &GenericListArray<O>,
    rows: Rows,
    missing: Option<&T>,
    shape: &mut Vec<usize>,
) -> Result<Vec<T>, Problem> {
    let offsets = list.value_offsets();
    let length_of = |row: usize| offsets[row + 1].as_usize() - offsets[row].as_usize();
    let mut lengths = rows.each().enumerate().filter_map(|(at, row)| Some((at, length_of(row?))));
    let (first, length) = match lengths.next() {
        Some(found) => found,
        None if rows.each().next().is_none() => (0, 0),
        None => {
            let problem = "all of its lists are missing, so that their length is unknown; drop their rows";
            return Err(Problem::Other(problem.to_owned()));
        }
    };
    if let Some((row, other)) = lengths.find(|(_, other)| *other != length) {
        return Err(Problem::Other(format!(
            "its lists differ in length: that of row {first} has {length} items, that of row {row} {other}; read \
             them by ragged_column"
        )));
    }
    drop(lengths);
    shape.push(length);
    let items = rows.items(length, |row| offsets[row].as_usize());
    values(list.values(), items, missing, shape)
}

/// Lists of any length: the splits between them, and where their items are.
pub(super) struct Lists<'a> {
    pub(super) row_splits: Vec<usize>,
    pub(super) items: &'a dyn Array,
    pub(super) positions: Rows,
}

/// Finds the items of a column of lists.
pub(super) fn lists(array: &dyn Array, rows: Rows) -> Result<Lists<'_>, Problem> {
    let rows = rows.present_in(array);
    if rows.lack_some() {
        return Err(Problem::Missing);
    }
    let mut row_splits = vec![0];
    let mut positions = Vec::new();
    let mut add = |range: Range<usize>| {
        positions.extend(range.map(Some));
        row_splits.push(positions.len());
    };
    let items: &dyn Array = match array.data_type() {
        DataType::List(_) => {
            let list = array.as_list::<i32>();
            rows.each().flatten().for_each(|row| add(span(list, row)));
            list.values()
        }
        DataType::LargeList(_) => {
            let list = array.as_list::<i64>();
            rows.each().flatten().for_each(|row| add(span(list, row)));
            list.values()
        }
        DataType::FixedSizeList(_, length) => {
            let length = usize::try_from(*length).unwrap_or(0);
            rows.each().flatten().for_each(|row| add(row * length..(row + 1) * length));
            array.as_fixed_size_list().values()
        }
        other => return Err(Problem::Kind(other.clone(), "lists")),
    };
    Ok(Lists { row_splits, items, positions: Rows::Each(positions) })
}

/// Returns the positions of the items of a list.
fn span<O: OffsetSizeTrait>(list: &GenericListArray<O>, row: usize) -> Range<usize> {
    let offsets = list.value_offsets();
    offsets[row].as_usize()..offsets[row + 1].as_usize()
}

fn numbers<'a, A: ArrowPrimitiveType, T: ColumnValue>(
    array: &dyn Array,
    rows: &Rows,
    missing: Option<&T>,
    cell: impl Fn(A::Native) -> Cell<'a>,
) -> Result<Vec<T>, Problem> {
    let numbers = array.as_primitive::<A>().values();
    cells(rows, missing, array.data_type(), |row| cell(numbers[row]))
}

fn cells<'a, T: ColumnValue>(
    rows: &Rows,
    missing: Option<&T>,
    held: &DataType,
    cell: impl Fn(usize) -> Cell<'a>,
) -> Result<Vec<T>, Problem> {
    let value = |(position, row): (usize, usize)| {
        T::of(cell(row)).map_err(|misfit| match misfit {
            Misfit::Kind => Problem::Kind(held.clone(), T::NAME),
            Misfit::Value => Problem::Value(position, cell(row).to_string(), T::NAME),
        })
    };
    match rows {
        Rows::Run(rows) => rows.clone().enumerate().map(value).collect(),
        Rows::Each(rows) => {
            let all = rows.iter().enumerate();
            all.map(|(position, row)| match row {
                Some(row) => value((position, *row)),
                None => missing.cloned().ok_or(Problem::Missing),
            })
            .collect()
        }
    }
}

fn decimal(digits: i128, scale: i8) -> Cell<'static> {
    match scale {
        0 => Cell::Integer(digits),
        _ => Cell::Float(digits as f64 / 10_f64.powi(scale.into())),
    }
}

impl std::fmt::Display for Cell<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Cell::Integer(value) => write!(formatter, "{value}"),
            Cell::Float(value) => write!(formatter, "{value:?}"),
            Cell::Bool(value) => write!(formatter, "{value}"),
            Cell::Text(value) => write!(formatter, "{value:?}"),
            Cell::Bytes(value) => write!(formatter, "{} bytes", value.len()),
        }
    }
}

/// Marks the rows, given with their positions in the array, that have a missing value, also inside of them.
pub(super) fn mark_missing(array: &dyn Array, mut rows: Vec<(usize, usize)>, keep: &mut [bool]) {
    let is_null = array.data_type() == &DataType::Null;
    rows.retain(|(row, at)| {
        let is_there = !is_null && array.is_valid(*at);
        keep[*row] &= is_there;
        is_there
    });
    let items = |items: &dyn Fn(usize) -> Range<usize>| -> Vec<(usize, usize)> {
        rows.iter().flat_map(|(row, at)| items(*at).map(|item| (*row, item))).collect()
    };
    match array.data_type() {
        DataType::Dictionary(..) if !rows.is_empty() => {
            let dictionary = array.as_any_dictionary();
            let keys = dictionary.normalized_keys();
            let values = rows.iter().map(|(row, at)| (*row, keys[*at])).collect();
            mark_missing(dictionary.values(), values, keep);
        }
        DataType::FixedSizeList(_, length) => {
            let length = usize::try_from(*length).unwrap_or(0);
            mark_missing(array.as_fixed_size_list().values(), items(&|at| at * length..(at + 1) * length), keep);
        }
        DataType::List(_) => {
            let list = array.as_list::<i32>();
            mark_missing(list.values(), items(&|at| span(list, at)), keep);
        }
        DataType::LargeList(_) => {
            let list = array.as_list::<i64>();
            mark_missing(list.values(), items(&|at| span(list, at)), keep);
        }
        DataType::Struct(_) => {
            array.as_struct().columns().iter().for_each(|field| mark_missing(field, rows.clone(), keep));
        }
        _ => {}
    }
}
