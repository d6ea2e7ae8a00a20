//! Options and attributes: values with names.
#![expect(unsafe_code, reason = "lists of C are read")]

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::slice;

use pjrt_sys::{NamedValue, NamedValueUnion, ValueType};

use crate::{Error, Result};

/// The value of an option or an attribute.
///
/// # Examples
/// ```
/// use distribute_device::pjrt::Value;
/// assert_eq!(Value::from(4), Value::Integer(4));
/// assert_eq!(Value::from(vec![1, 2]).as_integers(), Some([1, 2].as_slice()));
/// assert_eq!(Value::from("v5e").as_text(), Some("v5e"));
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// A text; bytes that are not UTF-8 are replaced.
    Text(String),
    /// An integer.
    Integer(i64),
    /// A list of integers.
    Integers(Vec<i64>),
    /// A number in 32 bits.
    Float(f32),
    /// A truth value.
    Bool(bool),
    /// A type that this crate does not know, by its number. It cannot be an option.
    Unknown(i32),
}

/// Attributes by their names.
pub type Attributes = BTreeMap<String, Value>;

impl Value {
    /// Returns the text, if it is one.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the integer, if it is one.
    pub fn as_integer(&self) -> Option<i64> {
        match self {
            Value::Integer(integer) => Some(*integer),
            _ => None,
        }
    }

    /// Returns the list of integers, if it is one.
    pub fn as_integers(&self) -> Option<&[i64]> {
        match self {
            Value::Integers(integers) => Some(integers),
            _ => None,
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::Text(text)
    }
}

impl From<i64> for Value {
    fn from(integer: i64) -> Value {
        Value::Integer(integer)
    }
}

impl From<Vec<i64>> for Value {
    fn from(integers: Vec<i64>) -> Value {
        Value::Integers(integers)
    }
}

impl From<f32> for Value {
    fn from(number: f32) -> Value {
        Value::Float(number)
    }
}

impl From<bool> for Value {
    fn from(truth: bool) -> Value {
        Value::Bool(truth)
    }
}

/// Returns the list as C has it. It points into `options`, which must stay as they are while it is used.
///
/// # Errors
/// [`Error::Operands`] for a value of unknown type.
pub(super) fn to_named(options: &[(String, Value)]) -> Result<Vec<NamedValue>> {
    let one = |(name, value): &(String, Value)| {
        let (kind, value, value_size) = match value {
            Value::Text(text) => {
                (ValueType::STRING, NamedValueUnion { string_value: text.as_ptr().cast() }, text.len())
            }
            Value::Integer(integer) => (ValueType::INT64, NamedValueUnion { int64_value: *integer }, 1),
            Value::Integers(integers) => {
                let list = NamedValueUnion { int64_array_value: integers.as_ptr() };
                (ValueType::INT64_LIST, list, integers.len())
            }
            Value::Float(number) => (ValueType::FLOAT, NamedValueUnion { float_value: *number }, 1),
            Value::Bool(truth) => (ValueType::BOOL, NamedValueUnion { bool_value: u8::from(*truth) }, 1),
            Value::Unknown(number) => {
                return Err(Error::Operands {
                    operation: "options of a PJRT plugin",
                    problem: format!("{name} has the unknown type {number}; give a text, numbers or a truth value"),
                });
            }
        };
        let name_size = name.len();
        Ok(NamedValue { name: name.as_ptr().cast(), name_size, kind, value, value_size, ..NamedValue::new() })
    };
    options.iter().map(one).collect()
}

/// Copies a list of attributes.
///
/// # Safety
/// The list is null, or has as many elements, which are valid during the call.
pub(super) unsafe fn attributes(values: *const NamedValue, count: usize) -> Attributes {
    if values.is_null() || count == 0 {
        return Attributes::new();
    }
    // SAFETY: the caller promises as many elements.
    let values = unsafe { slice::from_raw_parts(values, count) };
    values
        .iter()
        .map(|value| {
            // SAFETY: names and values are valid, as the caller promises.
            unsafe { (text(value.name, value.name_size), value_of(value)) }
        })
        .collect()
}

/// Copies a value.
///
/// # Safety
/// The value is valid during the call.
unsafe fn value_of(value: &NamedValue) -> Value {
    match value.kind {
        ValueType::STRING => {
            // SAFETY: the type says which field is set.
            let string = unsafe { value.value.string_value };
            // SAFETY: the caller promises a valid text.
            Value::Text(unsafe { text(string, value.value_size) })
        }
        // SAFETY: as above.
        ValueType::INT64 => Value::Integer(unsafe { value.value.int64_value }),
        ValueType::INT64_LIST => {
            // SAFETY: as above.
            let list = unsafe { value.value.int64_array_value };
            // SAFETY: the caller promises a valid list.
            Value::Integers(unsafe { list_of(list, value.value_size) })
        }
        // SAFETY: as above.
        ValueType::FLOAT => Value::Float(unsafe { value.value.float_value }),
        // SAFETY: as above.
        ValueType::BOOL => Value::Bool(unsafe { value.value.bool_value } != 0),
        ValueType(number) => Value::Unknown(number),
    }
}

/// Copies a text; null becomes an empty one.
///
/// # Safety
/// The text is null, or has as many bytes, which are valid during the call.
pub(super) unsafe fn text(text: *const c_char, size: usize) -> String {
    // SAFETY: the caller promises as many bytes.
    String::from_utf8_lossy(&unsafe { list_of(text.cast::<u8>(), size) }).into_owned()
}

/// Copies a list; null becomes an empty one.
///
/// # Safety
/// The list is null, or has as many elements, which are valid during the call.
pub(super) unsafe fn list_of<T: Clone>(list: *const T, count: usize) -> Vec<T> {
    if list.is_null() || count == 0 {
        return Vec::new();
    }
    // SAFETY: the caller promises as many elements.
    unsafe { slice::from_raw_parts(list, count) }.to_vec()
}
