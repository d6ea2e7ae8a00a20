//! Elements as bytes.

mod arrays;
mod composed;

use bytes::Bytes;
use distribute_types::DType;
use prost::Message as _;

use crate::wire::proto::{self, ElementComponents};
use crate::{Error, Result};

/// An element of a dataset that can be sent between processes.
///
/// `L` is a marker type of the library that the value belongs to, as for [`Element`](distribute_input::Element); it is
/// always inferred. Implemented here are [`Array`](distribute_input::Array) of numbers, `bool` and `String`,
/// [`Ragged`](distribute_input::Ragged), [`Sparse`](distribute_input::Sparse), `String` and `Vec<u8>` as readers of
/// files yield them, and tuples of up to four components.
///
/// # Examples
/// ```
/// use distribute_data_service::{Components, Transfer};
/// use distribute_input::Array;
/// let element = (Array::from(vec![1.0f32, 2.0]), Array::scalar("seven".to_owned()));
/// let mut components = Components::new();
/// element.send(&mut components)?;
/// let again: (Array<f32>, Array<String>) = components.receive()?;
/// assert_eq!(again, element);
/// # Ok::<(), distribute_data_service::Error>(())
/// ```
pub trait Transfer<L>: Sized + Send + 'static {
    /// Appends the components of the element.
    ///
    /// # Errors
    /// [`Error::Element`] if the element cannot be sent.
    fn send(&self, components: &mut Components) -> Result<()>;

    /// Takes as many components as [`send`](Transfer::send) appends, from the front, and joins them.
    ///
    /// # Errors
    /// [`Error::ElementType`] if the components are those of another type; [`Error::Element`] if they contradict
    /// themselves.
    fn receive(components: &mut Components) -> Result<Self>;
}

/// The components of one element.
#[derive(Clone, Debug, Default)]
pub struct Components {
    list: std::collections::VecDeque<Component>,
    taken: usize,
}

/// An array of one type.
#[derive(Clone, Debug, PartialEq)]
pub struct Component {
    /// The type of the values.
    pub kind: Kind,
    /// The place of the array in its value.
    pub form: Form,
    /// The extents, outermost first.
    pub shape: Vec<usize>,
    /// The values, little-endian and in row-major order. Of texts: the length of each as `u64`, then all bytes.
    pub bytes: Bytes,
}

/// The type of the values of a [`Component`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Numbers.
    Number(DType),
    /// Truth values, one byte each.
    Bool,
    /// Texts in UTF-8.
    Text,
}

/// The place of an array in the value that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Form {
    /// The whole value.
    Array = 0,
    /// The values of a ragged batch.
    RaggedValues = 1,
    /// The row splits of a ragged batch.
    RaggedSplits = 2,
    /// One row of a ragged batch.
    RaggedRow = 3,
    /// The positions of a sparse array.
    SparseIndices = 4,
    /// The values of a sparse array.
    SparseValues = 5,
    /// The shape of a sparse array.
    SparseShape = 6,
}

impl Components {
    /// Creates an element without components.
    pub fn new() -> Components {
        Components::default()
    }

    /// Appends a component.
    pub fn push(&mut self, component: Component) {
        self.list.push_back(component);
    }

    /// Returns the next component, without taking it.
    pub fn peek(&self) -> Option<&Component> {
        self.list.front()
    }

    /// Takes the next component, which must be of one of the given forms. `expected` names the type that it is for.
    ///
    /// # Errors
    /// [`Error::ElementType`] if there is none, or if it has another form.
    pub fn take(&mut self, forms: &[Form], expected: &str) -> Result<Component> {
        let at = self.taken;
        let Some(component) = self.list.pop_front() else {
            let problem = format!("component {at} of the element is missing, and {expected} was expected");
            return Err(Error::ElementType { problem });
        };
        if !forms.contains(&component.form) {
            return Err(component.mismatch(at, expected));
        }
        self.taken += 1;
        Ok(component)
    }

    /// Joins all components to a value.
    ///
    /// # Errors
    /// The errors of [`Transfer::receive`], and [`Error::ElementType`] if components are left.
    pub fn receive<T, L>(mut self) -> Result<T>
    where
        T: Transfer<L>,
    {
        let value = T::receive(&mut self)?;
        match self.peek() {
            None => Ok(value),
            Some(component) => {
                let problem = format!(
                    "the element has a component {} of {component}, and {} has none",
                    self.taken,
                    std::any::type_name::<T>()
                );
                Err(Error::ElementType { problem })
            }
        }
    }

    /// Describes the components: `f32 [28, 28], i64 []`.
    pub(crate) fn describe(&self) -> String {
        self.list.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }

    /// Returns the message that holds the components.
    pub(crate) fn into_message(self) -> ElementComponents {
        let components = self.list.into_iter().map(|component| proto::Component {
            dtype: component.kind.code(),
            form: component.form as u32,
            shape: component.shape.iter().map(|extent| *extent as u64).collect(),
            payload: component.bytes,
        });
        ElementComponents { components: components.collect() }
    }

    /// Returns the components of a message. The sizes that it claims are compared with the bytes that came.
    ///
    /// # Errors
    /// [`Error::Element`] if a type or a form is not known, or a size does not match.
    pub(crate) fn from_message(message: ElementComponents) -> Result<Components> {
        let list = message.components.into_iter().map(Component::from_message).collect::<Result<_>>()?;
        Ok(Components { list, taken: 0 })
    }
}

impl Component {
    fn from_message(message: proto::Component) -> Result<Component> {
        let wrong = |problem: String| Error::Element { problem: format!("{problem}; run one build in every process") };
        let proto::Component { dtype, form, shape, payload } = message;
        let kind = Kind::from_code(dtype).ok_or_else(|| wrong(format!("values have the unknown type {dtype}")))?;
        let form = Form::from_code(form).ok_or_else(|| wrong(format!("an array has the unknown form {form}")))?;
        let shape: Option<Vec<usize>> = shape.into_iter().map(|extent| usize::try_from(extent).ok()).collect();
        let shape = shape.ok_or_else(|| wrong("an extent exceeds the memory of this machine".to_owned()))?;
        let component = Component { kind, form, shape, bytes: payload };
        let elements = component.shape.iter().try_fold(1_usize, |product, extent| product.checked_mul(*extent));
        let bytes = elements.and_then(|elements| elements.checked_mul(kind.size_bytes()));
        let got = component.bytes.len();
        match bytes {
            Some(bytes) if bytes == got || (kind == Kind::Text && bytes < got) => Ok(component),
            _ => Err(wrong(format!("{component} came with {got} bytes"))),
        }
    }

    /// Returns the number of values.
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the error of a component that is not what `expected` names.
    pub(crate) fn mismatch(&self, at: usize, expected: &str) -> Error {
        let form = match self.form {
            Form::Array => "",
            Form::RaggedValues | Form::RaggedSplits | Form::RaggedRow => " of a ragged array",
            _ => " of a sparse array",
        };
        let problem = format!("component {at} of the element is {self}{form}, and {expected} was expected");
        Error::ElementType { problem }
    }
}

impl std::fmt::Display for Component {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind {
            Kind::Number(dtype) => write!(f, "{dtype} {:?}", self.shape),
            Kind::Bool => write!(f, "bool {:?}", self.shape),
            Kind::Text => write!(f, "text {:?}", self.shape),
        }
    }
}

impl Kind {
    fn code(self) -> u32 {
        match self {
            Kind::Number(dtype) => dtype.code().into(),
            Kind::Bool => BOOL,
            Kind::Text => TEXT,
        }
    }

    fn from_code(code: u32) -> Option<Kind> {
        match code {
            BOOL => Some(Kind::Bool),
            TEXT => Some(Kind::Text),
            _ => u8::try_from(code).ok().and_then(DType::from_code).map(Kind::Number),
        }
    }

    /// Returns the bytes of one value; of a text, those of its length.
    fn size_bytes(self) -> usize {
        match self {
            Kind::Number(dtype) => dtype.size_bytes(),
            Kind::Bool => 1,
            Kind::Text => size_of::<u64>(),
        }
    }
}

const BOOL: u32 = 32;
const TEXT: u32 = 33;

impl Form {
    fn from_code(code: u32) -> Option<Form> {
        let all = [
            Form::Array,
            Form::RaggedValues,
            Form::RaggedSplits,
            Form::RaggedRow,
            Form::SparseIndices,
            Form::SparseValues,
            Form::SparseShape,
        ];
        all.into_iter().find(|form| *form as u32 == code)
    }
}

/// Encodes elements as a payload.
pub(crate) fn encode(elements: Vec<ElementComponents>) -> Bytes {
    proto::Elements { elements }.encode_to_vec().into()
}

/// Decodes a payload; the values of the elements share its memory.
///
/// # Errors
/// A text that says what is wrong.
pub(crate) fn decode(payload: Bytes) -> Result<Vec<Components>, String> {
    let elements = proto::Elements::decode(payload).map_err(|error| error.to_string())?.elements;
    let decoded: Result<_> = elements.into_iter().map(Components::from_message).collect();
    decoded.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests;
