//! Conversion between elements and the bytes of a message, at any alignment.

use std::borrow::Cow;

use bytes::Bytes;
use distribute_device::{BufferRef, DType, Element, bf16, f16};
use distribute_rules::Real;
use distribute_types::{bf16_from_f64, f16_from_f64};

/// Reads elements of type `T` from bytes that hold elements of `dtype`. Elements of type `T` are not copied if their
/// alignment allows. `None` if the bytes are not a whole number of elements, or `dtype` cannot be converted to `T`.
pub(crate) fn read<T: Float>(bytes: &[u8], dtype: DType) -> Option<Cow<'_, [T]>> {
    if !bytes.len().is_multiple_of(dtype.size_bytes()) {
        return None;
    }
    if dtype == T::DTYPE {
        return Some(whole(bytes));
    }
    Some(Cow::Owned(match dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|x| T::from_f64(f32::from_ne_bytes(*x).into())).collect(),
        DType::F64 => bytes.as_chunks().0.iter().map(|x| T::from_f64(f64::from_ne_bytes(*x))).collect(),
        DType::F16 => bytes.as_chunks().0.iter().map(|x| T::from_f32(f16::from_ne_bytes(*x).to_f32())).collect(),
        DType::BF16 => bytes.as_chunks().0.iter().map(|x| T::from_f32(bf16::from_ne_bytes(*x).to_f32())).collect(),
        _ => return None,
    }))
}

/// Reads elements of type `T`, without a copy if their alignment allows.
pub(crate) fn whole<T: Element>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
    }
}

/// Copies bytes of elements of `from` into elements of `to`, given as bytes; returns whether the types and lengths
/// allow it.
pub(crate) fn copy_into(bytes: &[u8], from: DType, target: &mut [u8], to: DType) -> bool {
    if from == to {
        let fits = bytes.len() == target.len();
        if fits {
            target.copy_from_slice(bytes);
        }
        return fits;
    }
    fn convert<T: Float>(bytes: &[u8], from: DType, target: &mut [u8]) -> bool {
        let Some(elements) = read::<T>(bytes, from) else { return false };
        let source: &[u8] = bytemuck::cast_slice(&elements);
        let fits = source.len() == target.len();
        if fits {
            target.copy_from_slice(source);
        }
        fits
    }
    match to {
        DType::F32 => convert::<f32>(bytes, from, target),
        DType::F64 => convert::<f64>(bytes, from, target),
        _ => false,
    }
}

/// Converts floating-point elements to the 16-bit type `wire`; `None` if they are sent unchanged.
pub(crate) fn to_wire(elements: BufferRef<'_>, wire: Option<DType>) -> Option<(DType, Bytes)> {
    let wire = wire.filter(|wire| elements.dtype().is_float() && *wire != elements.dtype())?;
    fn convert<T: Element, W: Element>(elements: &[T], narrow: impl Fn(T) -> W) -> Bytes {
        to_bytes::<W>(elements.iter().copied().map(narrow).collect())
    }
    let bytes = match (elements.dtype(), wire) {
        (DType::F32, DType::F16) => convert(elements.as_slice::<f32>().ok()?, f16::from_f32),
        (DType::F32, DType::BF16) => convert(elements.as_slice::<f32>().ok()?, bf16::from_f32),
        (DType::F64, DType::F16) => convert(elements.as_slice::<f64>().ok()?, f16_from_f64),
        (DType::F64, DType::BF16) => convert(elements.as_slice::<f64>().ok()?, bf16_from_f64),
        _ => return None,
    };
    Some((wire, bytes))
}

/// Returns whether elements are integers of which one is zero, by which nothing can be divided.
pub(crate) fn has_integer_zero(bytes: &[u8], dtype: DType) -> bool {
    let is_zero = |element: &[u8]| element.iter().all(|byte| *byte == 0);
    !dtype.is_float() && bytes.chunks_exact(dtype.size_bytes()).any(is_zero)
}

/// Returns the type with a code; `None` if the code is unknown.
pub(crate) fn dtype(code: u32) -> Option<DType> {
    DType::from_code(u8::try_from(code).ok()?)
}

/// Converts elements to the bytes of a message, without a copy.
pub(crate) fn to_bytes<T: Element>(elements: Vec<T>) -> Bytes {
    struct Elements<T>(Vec<T>);
    impl<T: Element> AsRef<[u8]> for Elements<T> {
        fn as_ref(&self) -> &[u8] {
            bytemuck::cast_slice(&self.0)
        }
    }
    Bytes::from_owner(Elements(elements))
}

/// Reads row numbers from a message; `None` if the bytes are not a whole number of them.
pub(crate) fn rows(bytes: &[u8]) -> Option<Vec<u64>> {
    let (rows, rest) = bytes.as_chunks();
    rest.is_empty().then(|| rows.iter().map(|row| u64::from_le_bytes(*row)).collect())
}

/// Encodes row numbers for a message.
pub(crate) fn rows_to_bytes(rows: impl IntoIterator<Item = u64>) -> Bytes {
    Bytes::from(rows.into_iter().flat_map(u64::to_le_bytes).collect::<Vec<u8>>())
}

/// The types in which parameters are computed.
pub(crate) trait Float: Real {
    fn from_f32(x: f32) -> Self;
}

impl Float for f32 {
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Float for f64 {
    fn from_f32(x: f32) -> f64 {
        x.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_at_odd_addresses_are_read() {
        let bytes = [&[0u8][..], bytemuck::cast_slice(&[1.5f32, -2.0])].concat();
        assert_eq!(&*read::<f32>(&bytes[1..], DType::F32).unwrap(), [1.5, -2.0]);
        assert_eq!(&*read::<f64>(&bytes[1..], DType::F32).unwrap(), [1.5, -2.0]);
        assert!(read::<f32>(&bytes, DType::F32).is_none());
        assert!(read::<f32>(&bytes[1..], DType::I32).is_none());
    }

    #[test]
    fn sixteen_bits_there_and_back() {
        for wire in [DType::F16, DType::BF16] {
            let (dtype, bytes) = to_wire(BufferRef::from(&[1.5f32, -0.25][..]), Some(wire)).unwrap();
            let mut target = [0f32; 2];
            assert!(copy_into(&bytes, dtype, bytemuck::cast_slice_mut(&mut target), DType::F32));
            assert_eq!((bytes.len(), target), (4, [1.5, -0.25]));
        }
        assert!(to_wire(BufferRef::from(&[1i64][..]), Some(DType::F16)).is_none());
    }

    #[test]
    fn f64_is_rounded_once() {
        // A little more than half way between two neighbours, of which the lower one is even.
        for (wire, value, nearest) in [(DType::F16, 2049.0, 2050.0f32), (DType::BF16, 257.0, 258.0)] {
            let value = [value + f64::powi(2.0, -24)];
            let (dtype, bytes) = to_wire(BufferRef::from(&value[..]), Some(wire)).unwrap();
            assert_eq!(*read::<f32>(&bytes, dtype).unwrap(), [nearest], "{wire}");
        }
    }
}
