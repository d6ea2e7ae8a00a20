//! Elements as bytes of a message: in the types they travel in, at whatever address they arrive.

use std::borrow::Cow;

use bytes::Bytes;
use distribute_device::{BufferRef, DType, Element, bf16, f16};
use distribute_optim::Real;

/// Elements of type `T` out of bytes that hold elements of `dtype`; those of `T` themselves are not copied where their address
/// allows. `None` where the bytes are no whole number of elements, or `dtype` does not become `T`.
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

/// Whole elements of type `T`, not copied where their address allows.
pub(crate) fn whole<T: Element>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
    }
}

/// Copies bytes of elements of `from` into elements of `to`, which is given as bytes; whether the types and lengths allow it.
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

/// Floating-point elements as they travel: in 16 bits where that was asked for. Others are sent as they are.
pub(crate) fn to_wire(elements: BufferRef<'_>, wire: Option<DType>) -> Option<(DType, Bytes)> {
    let wire = wire.filter(|wire| elements.dtype().is_float() && *wire != elements.dtype())?;
    fn convert<T: Float, W: Element>(elements: &[T], narrow: impl Fn(f32) -> W) -> Bytes {
        to_bytes::<W>(elements.iter().map(|x| narrow(x.to_f32())).collect())
    }
    let bytes = match (elements.dtype(), wire) {
        (DType::F32, DType::F16) => convert(elements.as_slice::<f32>().ok()?, f16::from_f32),
        (DType::F32, DType::BF16) => convert(elements.as_slice::<f32>().ok()?, bf16::from_f32),
        (DType::F64, DType::F16) => convert(elements.as_slice::<f64>().ok()?, f16::from_f32),
        (DType::F64, DType::BF16) => convert(elements.as_slice::<f64>().ok()?, bf16::from_f32),
        _ => return None,
    };
    Some((wire, bytes))
}

/// The type that a message names; `None` where nobody knows it.
pub(crate) fn dtype(code: u32) -> Option<DType> {
    DType::from_code(u8::try_from(code).ok()?)
}

/// Elements as the bytes of a message, without a copy.
pub(crate) fn to_bytes<T: Element>(elements: Vec<T>) -> Bytes {
    struct Elements<T>(Vec<T>);
    impl<T: Element> AsRef<[u8]> for Elements<T> {
        fn as_ref(&self) -> &[u8] {
            bytemuck::cast_slice(&self.0)
        }
    }
    Bytes::from_owner(Elements(elements))
}

/// Row numbers out of a message; `None` where the bytes are no whole number of them.
pub(crate) fn rows(bytes: &[u8]) -> Option<Vec<u64>> {
    let (rows, rest) = bytes.as_chunks();
    rest.is_empty().then(|| rows.iter().map(|row| u64::from_le_bytes(*row)).collect())
}

/// Row numbers for a message.
pub(crate) fn rows_to_bytes(rows: impl IntoIterator<Item = u64>) -> Bytes {
    Bytes::from(rows.into_iter().flat_map(u64::to_le_bytes).collect::<Vec<u8>>())
}

/// What parameters are computed in.
pub(crate) trait Float: Real {
    fn from_f32(x: f32) -> Self;
    fn to_f32(self) -> f32;
}

impl Float for f32 {
    fn from_f32(x: f32) -> f32 {
        x
    }

    fn to_f32(self) -> f32 {
        self
    }
}

impl Float for f64 {
    fn from_f32(x: f32) -> f64 {
        x.into()
    }

    fn to_f32(self) -> f32 {
        self as f32
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
}
