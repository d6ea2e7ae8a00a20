//! Tensors from the elements of datasets, and datasets from tensors.
//!
//! The rank of burn's tensors is a part of their type, so a row of a tensor has another type than the tensor, and a
//! tensor cannot be an element of a dataset. Datasets hold [`Array`]s, which become tensors on each replica.

use burn::tensor::{DType, Device, Element, Int, Tensor, TensorData};
use distribute_input::Array;

use crate::tensor::refused;
use crate::{Error, Result};

/// Tensors that are made from an element of a dataset: [`Array`]s, or tuples of them.
///
/// # Examples
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use distribute_burn::FromElement;
/// use distribute_input::Array;
///
/// let batch = (Array::new([2, 3], vec![0u8, 1, 2, 3, 4, 5])?, Array::from(vec![7u32, 8]));
/// let (images, labels): (Tensor<2>, Tensor<1, Int>) = FromElement::from_element(&batch, &Device::flex())?;
/// assert_eq!((images.dims(), labels.dims()), ([2, 3], [2]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait FromElement<A>: Sized {
    /// Creates the tensors on a device, in one copy. Elements are converted to the device's types of floating-point
    /// numbers and of integers.
    ///
    /// # Errors
    /// [`Error::Rank`] if an array does not have the tensor's number of dimensions; [`Error::NotWhole`] if an array is
    /// to become a tensor of integers, and an element is not a whole number that the device's type of integers has.
    fn from_element(element: &A, device: &Device) -> Result<Self>;
}

/// Tensors whose rows become elements of datasets, by [`Dataset::from_tensor_slices`](distribute_input::Dataset).
///
/// # Examples
/// ```
/// use burn::tensor::{Device, Tensor};
/// use distribute_burn::ToArray;
/// use distribute_input::Dataset;
///
/// let x = Tensor::<2>::ones([6, 3], &Device::flex());
/// let data = Dataset::from_tensor_slices(x.to_array()?).shuffle(6, 42).batch(4);
/// assert_eq!(data.iter().count(), 2);
/// # Ok::<(), distribute_burn::Error>(())
/// ```
pub trait ToArray {
    /// The array: of f32 for floating-point numbers, of i64 for integers.
    type Array: distribute_input::Element<distribute_input::Arrays>;

    /// Copies the elements to an array.
    ///
    /// # Errors
    /// [`Error::Values`] if the elements are quantized, or an integer does not fit into i64.
    fn to_array(&self) -> Result<Self::Array>;
}

macro_rules! arrays_of {
    ($($kind:ty, $element:ty, $check:path);*) => {$(
        impl<const D: usize, T: Element> FromElement<Array<T>> for Tensor<D, $kind> {
            fn from_element(array: &Array<T>, device: &Device) -> Result<Self> {
                if array.shape().len() != D {
                    return Err(Error::Rank { shape: array.shape().to_vec(), expected: D });
                }
                $check(array.as_slice(), device)?;
                Ok(Tensor::from_data(TensorData::new(array.as_slice().to_vec(), array.shape().to_vec()), device))
            }
        }

        impl<const D: usize> ToArray for Tensor<D, $kind> {
            type Array = Array<$element>;

            fn to_array(&self) -> Result<Array<$element>> {
                let elements = numbers(self.clone().without_autodiff().into_data())?;
                Ok(Array::new(self.dims().to_vec(), elements)?)
            }
        }
    )*};
}

arrays_of!(burn::tensor::Float, f32, any; Int, i64, whole_numbers);

/// Floating-point numbers take every element.
fn any<T>(_: &[T], _: &Device) -> Result<()> {
    Ok(())
}

/// Refuses numbers that the device's type of integers does not have, with which burn would panic.
fn whole_numbers<T: Element>(elements: &[T], device: &Device) -> Result<()> {
    let dtype = DType::from(device.settings().int_dtype);
    let (least, most) = range(dtype);
    let given = T::dtype();
    let fits = |element: &T| match given {
        DType::U64 => i128::from(element.elem::<u64>()) <= most,
        given if given.is_float() => {
            let value = element.elem::<f64>();
            // The number after the last is a power of two, and as such exact.
            value.trunc() == value && value >= least as f64 && value < (most + 1) as f64
        }
        _ => (least..=most).contains(&i128::from(element.elem::<i64>())),
    };
    let (given_least, given_most) = range(given);
    if !given.is_float() && given_least >= least && given_most <= most {
        return Ok(());
    }
    match elements.iter().position(|element| !fits(element)) {
        None => Ok(()),
        Some(at) => Err(Error::NotWhole { at, value: elements[at].elem(), integers: dtype.name() }),
    }
}

/// Returns the least and the greatest number of a type of integers.
fn range(dtype: DType) -> (i128, i128) {
    let of = |bits: u32, is_signed: bool| match is_signed {
        true => (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1),
        false => (0, (1i128 << bits) - 1),
    };
    match dtype {
        DType::I8 => of(8, true),
        DType::I16 => of(16, true),
        DType::I32 => of(32, true),
        DType::U8 => of(8, false),
        DType::U16 => of(16, false),
        DType::U32 => of(32, false),
        DType::U64 => of(64, false),
        DType::Bool(_) => (0, 1),
        _ => of(64, true),
    }
}

impl<A, B, X: FromElement<A>, Y: FromElement<B>> FromElement<(A, B)> for (X, Y) {
    fn from_element(element: &(A, B), device: &Device) -> Result<Self> {
        Ok((X::from_element(&element.0, device)?, Y::from_element(&element.1, device)?))
    }
}

impl<A, B, C, X: FromElement<A>, Y: FromElement<B>, Z: FromElement<C>> FromElement<(A, B, C)> for (X, Y, Z) {
    fn from_element(element: &(A, B, C), device: &Device) -> Result<Self> {
        let (a, b, c) = element;
        Ok((X::from_element(a, device)?, Y::from_element(b, device)?, Z::from_element(c, device)?))
    }
}

/// Returns the elements as numbers of another type.
///
/// # Errors
/// [`Error::Values`] if the elements are quantized, or one is not in the range of a type of integers, with which burn
/// would panic.
pub(crate) fn numbers<E: Element>(data: TensorData) -> Result<Vec<E>> {
    let (given, wanted) = (data.dtype(), E::dtype());
    if !wanted.is_float() && !given.is_float() {
        let ((given_least, given_most), (least, most)) = (range(given), range(wanted));
        if given_least < least || given_most > most {
            let outside = |(_, value): &(usize, i128)| !(least..=most).contains(value);
            let found = match given {
                DType::U64 => data.iter::<u64>().map(i128::from).enumerate().find(outside),
                _ => data.iter::<i64>().map(i128::from).enumerate().find(outside),
            };
            if let Some((at, value)) = found {
                let problem = format!(
                    "element {at} is {value}, and {} has integers from {least} to {most}; give such",
                    wanted.name()
                );
                return Err(refused("read a tensor", problem).into());
            }
        }
    }
    let elements = data.convert::<E>().try_into_vec::<E>();
    Ok(elements.map_err(|error| refused("read a tensor", format!("{error:?}")))?)
}
