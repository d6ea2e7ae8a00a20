//! Encoding of arguments and results between processes: MessagePack with field names, so that a value of another type
//! is detected rather than misread.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::BoxError;

/// Limit of the size of a function's arguments, and of its result.
pub(crate) const MAX_VALUE_BYTES: usize = 1 << 30;

pub(crate) fn encode(value: &impl Serialize) -> Result<Vec<u8>, BoxError> {
    let bytes = rmp_serde::to_vec_named(value)?;
    if bytes.len() > MAX_VALUE_BYTES {
        let given = bytes.len();
        return Err(format!(
            "it has {given} bytes, and at most {MAX_VALUE_BYTES} travel with a function; put it into a variable or a \
            file"
        )
        .into());
    }
    Ok(bytes)
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, BoxError> {
    Ok(rmp_serde::from_slice(bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_and_others_are_refused() {
        let value = (vec![f64::NAN, 1.5], Some("text".to_owned()), 7u64);
        let (numbers, text, count): (Vec<f64>, Option<String>, u64) = decode(&encode(&value).unwrap()).unwrap();
        assert!(numbers[0].is_nan() && numbers[1] == 1.5 && text.as_deref() == Some("text") && count == 7);
        decode::<()>(&encode(&()).unwrap()).unwrap();
        assert!(decode::<u32>(&encode(&1.5).unwrap()).is_err());
        assert!(decode::<String>(&encode(&1).unwrap()).is_err());
        assert!(decode::<(String, u32)>(&encode(&1.5).unwrap()).is_err());
    }
}
