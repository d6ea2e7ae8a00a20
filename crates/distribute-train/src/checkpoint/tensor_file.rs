//! The layout of a safetensors file: a header that describes the tensors, and their bytes one after another.

use distribute_device::DType;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

/// The bytes before the header, which hold its length.
pub(super) const LENGTH_BYTES: usize = 8;

/// The longest header that readers accept.
const MOST_HEADER_BYTES: u64 = 100_000_000;

/// A tensor that is to be written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Described<'a> {
    pub(super) name: &'a str,
    pub(super) dtype: DType,
    pub(super) shape: &'a [usize],
    pub(super) bytes: usize,
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Located {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    /// The position of its first byte in the file.
    pub(super) start: u64,
    pub(super) bytes: usize,
}

/// Returns the bytes before those of the tensors, and the tensors' indices in the order in which their bytes follow:
/// the widest type first, so that all are aligned, and then by name.
///
/// # Errors
/// A sentence if a tensor has not as many bytes as its shape says, or there are too many tensors for one file.
pub(super) fn header(tensors: &[Described<'_>]) -> Result<(Vec<u8>, Vec<usize>), String> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    let key = |index: &usize| (std::cmp::Reverse(dtype_of(tensors[*index].dtype)), tensors[*index].name);
    order.sort_by_key(key);
    let (mut infos, mut start) = (Vec::with_capacity(tensors.len()), 0);
    for index in &order {
        let Described { name, dtype, shape, bytes } = tensors[*index];
        let end = start + bytes;
        let info = TensorInfo { dtype: dtype_of(dtype), shape: shape.to_vec(), data_offsets: (start, end) };
        infos.push((name.to_owned(), info));
        start = end;
    }
    let metadata = Metadata::new(None, infos).map_err(|error| error.to_string())?;
    let mut text = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
    text.resize(text.len().next_multiple_of(LENGTH_BYTES), b' ');
    if text.len() as u64 > MOST_HEADER_BYTES {
        return Err(format!("{} tensors are too many for one file; make files smaller", tensors.len()));
    }
    let mut all = (text.len() as u64).to_le_bytes().to_vec();
    all.append(&mut text);
    Ok((all, order))
}

/// Returns the length of the header from the first bytes of a file with this length.
pub(super) fn header_bytes(first: [u8; LENGTH_BYTES], file_bytes: u64) -> Result<usize, String> {
    let length = u64::from_le_bytes(first);
    let fits = length <= MOST_HEADER_BYTES && length <= file_bytes.saturating_sub(LENGTH_BYTES as u64);
    usize::try_from(length).ok().filter(|_| fits).ok_or_else(|| format!("its header cannot have {length} bytes"))
}

/// Returns the tensors of a file with this header and length, in the order of their bytes.
pub(super) fn tensors_of(header: &[u8], file_bytes: u64) -> Result<Vec<Located>, String> {
    let metadata: Metadata = serde_json::from_slice(header).map_err(|error| error.to_string())?;
    let before = LENGTH_BYTES as u64 + header.len() as u64;
    let described = metadata.data_len() as u64;
    if before.checked_add(described) != Some(file_bytes) {
        return Err(format!("its header describes {described} bytes after byte {before}, and it has {file_bytes}"));
    }
    let located = |name: String| {
        let info = metadata.info(&name).ok_or_else(|| format!("{name} is not described"))?;
        let dtype = dtype_from(info.dtype).ok_or_else(|| format!("{name} has type {:?}", info.dtype))?;
        let (start, end) = info.data_offsets;
        Ok(Located { dtype, shape: info.shape.clone(), start: before + start as u64, bytes: end - start, name })
    };
    metadata.offset_keys().into_iter().map(located).collect()
}

/// Returns the file format's name of a type.
pub(super) fn dtype_of(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I8 => Dtype::I8,
        DType::U8 => Dtype::U8,
        DType::I32 => Dtype::I32,
        DType::U32 => Dtype::U32,
        DType::I64 => Dtype::I64,
        DType::U64 => Dtype::U64,
    }
}

pub(super) fn dtype_from(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I8 => DType::I8,
        Dtype::U8 => DType::U8,
        Dtype::I32 => DType::I32,
        Dtype::U32 => DType::U32,
        Dtype::I64 => DType::I64,
        Dtype::U64 => DType::U64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::stored::Stored;
    use super::*;

    #[test]
    fn files_are_those_of_the_crate_safetensors() {
        let stored = |dtype: DType, shape: &[usize], first: u8| {
            let bytes = shape.iter().product::<usize>() * dtype.size_bytes();
            Stored { dtype, shape: shape.to_vec(), bytes: (0..bytes).map(|at| first.wrapping_add(at as u8)).collect() }
        };
        let tensors = [
            ("z.weight", stored(DType::F32, &[3, 2], 1)),
            ("count", stored(DType::I64, &[], 2)),
            ("a.\"weight\"", stored(DType::F32, &[5], 3)),
            ("mask", stored(DType::U8, &[3], 4)),
            ("empty", stored(DType::BF16, &[0, 4], 5)),
        ];
        let described: Vec<Described<'_>> = tensors.iter().map(|(name, stored)| stored.described(name)).collect();
        let (mut file, order) = header(&described).unwrap();
        let (before, sorted) = (file.len(), order.clone());
        order.into_iter().for_each(|index| file.extend(&tensors[index].1.bytes));
        let expected = safetensors::serialize(tensors.iter().map(|(name, stored)| (*name, stored)), None).unwrap();
        assert_eq!(file, expected);

        let first: [u8; LENGTH_BYTES] = file[..LENGTH_BYTES].try_into().unwrap();
        assert_eq!(header_bytes(first, file.len() as u64).unwrap() + LENGTH_BYTES, before);
        let located = tensors_of(&file[LENGTH_BYTES..before], file.len() as u64).unwrap();
        for (located, index) in located.iter().zip(sorted) {
            let (name, stored) = &tensors[index];
            assert_eq!((located.name.as_str(), located.dtype, &located.shape), (*name, stored.dtype, &stored.shape));
            let start = located.start as usize;
            assert_eq!(file[start..start + located.bytes], stored.bytes);
        }
        let short = Described { bytes: 3, ..described[0] };
        assert!(header(&[short]).is_err());
        // Lengths that do not fit are found before anything is read.
        assert!(header_bytes(first, before as u64 - 1).unwrap_err().contains("cannot have"));
        assert!(tensors_of(&file[LENGTH_BYTES..before], file.len() as u64 - 1).unwrap_err().contains("describes"));
    }

    #[test]
    fn tensors_that_no_file_can_hold_are_refused() {
        let each = 1u64 << 60;
        let tensors = (0..16).map(|index| {
            let (start, end) = (index * each, (index * each).wrapping_add(each).wrapping_sub(u64::from(index == 15)));
            format!(r#""t{index}":{{"dtype":"U8","shape":[{}],"data_offsets":[{start},{end}]}}"#, end - start)
        });
        let header = format!("{{{}}}", tensors.collect::<Vec<_>>().join(","));
        // Their lengths fit into 64 bits, but not together with the header's.
        for file_bytes in [0, LENGTH_BYTES as u64 + header.len() as u64, u64::MAX] {
            let problem = tensors_of(header.as_bytes(), file_bytes).unwrap_err();
            assert!(problem.contains("its header describes"), "{problem}");
        }
    }
}
