//! Arrays of numbers, truth values and texts.

use bytes::{BufMut, Bytes, BytesMut};
use distribute_input::{Array, Arrays};
use distribute_types::{DType, Element, bf16, f16};

use super::{Component, Components, Form, Kind, Transfer};
use crate::{Error, Result};

/// A type of values that arrays can be sent of.
pub(super) trait Value: Clone + Send + Sync + 'static {
    /// How an array of it is called in messages.
    const NAME: &'static str;

    fn kind() -> Kind;

    fn write(values: &[Self]) -> Bytes;

    /// Returns the values of a component of this kind; its sizes have been checked.
    fn read(component: &Component) -> Result<Vec<Self>>;
}

macro_rules! numbers {
    ($($number:ty => $name:literal),* $(,)?) => {$(
        impl Value for $number {
            const NAME: &'static str = concat!("an array of ", $name);

            fn kind() -> Kind {
                const DTYPE: DType = <$number as Element>::DTYPE;
                Kind::Number(DTYPE)
            }

            fn write(values: &[$number]) -> Bytes {
                let mut bytes = BytesMut::with_capacity(size_of_val(values));
                values.iter().for_each(|value| bytes.put_slice(&value.to_le_bytes()));
                bytes.freeze()
            }

            fn read(component: &Component) -> Result<Vec<$number>> {
                let (chunks, _) = component.bytes.as_chunks();
                Ok(chunks.iter().map(|bytes| <$number>::from_le_bytes(*bytes)).collect())
            }
        }
    )*};
}

numbers! {
    f32 => "f32",
    f64 => "f64",
    f16 => "f16",
    bf16 => "bf16",
    i8 => "i8",
    u8 => "u8",
    i32 => "i32",
    u32 => "u32",
    i64 => "i64",
    u64 => "u64",
}

impl Value for bool {
    const NAME: &'static str = "an array of bool";

    fn kind() -> Kind {
        Kind::Bool
    }

    fn write(values: &[bool]) -> Bytes {
        values.iter().map(|value| u8::from(*value)).collect()
    }

    fn read(component: &Component) -> Result<Vec<bool>> {
        let value = |byte: &u8| match byte {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Error::Element { problem: format!("{byte} is not a truth value; expected 0 or 1") }),
        };
        component.bytes.iter().map(value).collect()
    }
}

impl Value for String {
    const NAME: &'static str = "an array of texts";

    fn kind() -> Kind {
        Kind::Text
    }

    fn write(values: &[String]) -> Bytes {
        let mut bytes = BytesMut::new();
        values.iter().for_each(|text| bytes.put_u64_le(text.len() as u64));
        values.iter().for_each(|text| bytes.put_slice(text.as_bytes()));
        bytes.freeze()
    }

    fn read(component: &Component) -> Result<Vec<String>> {
        let wrong = |problem: &str| Error::Element { problem: format!("{component}: {problem}") };
        let (lengths, mut rest) = component.bytes.split_at(component.elements() * size_of::<u64>());
        let mut texts = Vec::with_capacity(component.elements());
        for length in lengths.as_chunks().0 {
            let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
            let (text, after) = rest.split_at_checked(length).ok_or_else(|| wrong("a text ends after the bytes"))?;
            texts.push(std::str::from_utf8(text).map_err(|_| wrong("a text is not UTF-8"))?.to_owned());
            rest = after;
        }
        if rest.is_empty() { Ok(texts) } else { Err(wrong("bytes are left after the last text")) }
    }
}

impl<T: Value> Transfer<Arrays> for Array<T> {
    fn send(&self, components: &mut Components) -> Result<()> {
        components.push(component(self, Form::Array));
        Ok(())
    }

    fn receive(components: &mut Components) -> Result<Array<T>> {
        take(components, Form::Array, T::NAME)
    }
}

/// A text, as readers of lines yield it, is sent as an array without dimensions.
impl Transfer<Arrays> for String {
    fn send(&self, components: &mut Components) -> Result<()> {
        let bytes = String::write(std::slice::from_ref(self));
        components.push(Component { kind: Kind::Text, form: Form::Array, shape: Vec::new(), bytes });
        Ok(())
    }

    fn receive(components: &mut Components) -> Result<String> {
        let at = components.taken;
        let component = components.take(&[Form::Array], "a text")?;
        match (component.kind, &component.shape[..]) {
            (Kind::Text, []) => Ok(String::read(&component)?.pop().unwrap_or_default()),
            _ => Err(component.mismatch(at, "a text")),
        }
    }
}

/// The bytes of a record are sent as an array of one dimension.
impl Transfer<Arrays> for Vec<u8> {
    fn send(&self, components: &mut Components) -> Result<()> {
        let (kind, bytes) = (Kind::Number(DType::U8), Bytes::copy_from_slice(self));
        components.push(Component { kind, form: Form::Array, shape: vec![self.len()], bytes });
        Ok(())
    }

    fn receive(components: &mut Components) -> Result<Vec<u8>> {
        let at = components.taken;
        let component = components.take(&[Form::Array], "the bytes of a record")?;
        match (component.kind, &component.shape[..]) {
            (Kind::Number(DType::U8), [_]) => Ok(component.bytes.to_vec()),
            _ => Err(component.mismatch(at, "the bytes of a record")),
        }
    }
}

/// Returns the component of an array.
pub(super) fn component<T: Value>(array: &Array<T>, form: Form) -> Component {
    Component { kind: T::kind(), form, shape: array.shape().to_vec(), bytes: T::write(array.as_slice()) }
}

/// Takes the next component, an array of one type in one form.
pub(super) fn take<T: Value>(components: &mut Components, form: Form, expected: &str) -> Result<Array<T>> {
    let at = components.taken;
    let component = components.take(&[form], expected)?;
    if component.kind != T::kind() {
        return Err(component.mismatch(at, expected));
    }
    Ok(Array::new(component.shape.clone(), T::read(&component)?)?)
}
