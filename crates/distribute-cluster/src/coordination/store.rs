//! The key-value store of a job, within limits.

use std::collections::HashMap;

use bytes::Bytes;

use super::limits::{MAX_KEY_BYTES, MAX_KEYS, MAX_STORED_BYTES, MAX_VALUE_BYTES};

/// The leader's store of the values that members have put.
#[derive(Default)]
pub(super) struct Store {
    values: HashMap<String, Bytes>,
    bytes: usize,
}

impl Store {
    /// Stores a value, replacing an earlier one with the same key.
    ///
    /// # Errors
    /// A message if the key or value is too large or the store is full.
    pub(super) fn put(&mut self, key: String, value: Bytes) -> Result<(), String> {
        check(&key, value.len())?;
        let before = self.values.get(&key).map(|value| key.len() + value.len());
        if before.is_none() && self.values.len() >= MAX_KEYS {
            return Err(format!(
                "the job has put {} keys, as many as are allowed; use a key again, or fewer of them",
                self.values.len()
            ));
        }
        let bytes = self.bytes - before.unwrap_or(0) + key.len() + value.len();
        if bytes > MAX_STORED_BYTES {
            return Err(format!(
                "the job's keys and values would have {bytes} bytes, at most {} are allowed; send tensors by \
                 collectives",
                MAX_STORED_BYTES
            ));
        }
        self.bytes = bytes;
        self.values.insert(key, value);
        Ok(())
    }

    pub(super) fn get(&self, key: &str) -> Option<Bytes> {
        self.values.get(key).cloned()
    }
}

/// Checks the sizes of a key and its value; the error is a message.
pub(super) fn check(key: &str, value_bytes: usize) -> Result<(), String> {
    if key.len() > MAX_KEY_BYTES {
        return Err(format!(
            "the key has {} bytes, at most {} are allowed; put what is long into the value",
            key.len(),
            MAX_KEY_BYTES
        ));
    }
    if value_bytes > MAX_VALUE_BYTES {
        return Err(format!(
            "the value has {value_bytes} bytes, at most {} are allowed; send tensors by collectives",
            MAX_VALUE_BYTES
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_values_and_their_number_are_bounded() {
        let mut store = Store::default();
        let put = |store: &mut Store, key: String, bytes: usize| store.put(key, vec![0; bytes].into());
        let text = put(&mut store, "k".repeat(MAX_KEY_BYTES + 1), 0).unwrap_err();
        assert!(text.contains("the key has 1025 bytes, at most 1024"), "{text}");
        let text = put(&mut store, "k".to_owned(), MAX_VALUE_BYTES + 1).unwrap_err();
        assert!(text.contains("the value has 1048577 bytes, at most 1048576"), "{text}");
        assert!(store.values.is_empty());
        for key in 0..MAX_KEYS {
            put(&mut store, key.to_string(), 0).unwrap();
        }
        let text = put(&mut store, "one more".to_owned(), 0).unwrap_err();
        assert!(text.contains("has put 131072 keys"), "{text}");
        put(&mut store, "7".to_owned(), 1).unwrap();
        assert_eq!(store.get("7").as_deref(), Some(&[0][..]));
    }

    #[test]
    fn all_values_together_are_bounded() {
        let mut store = Store::default();
        // The same bytes are shared by all values, so that the test needs little memory.
        let largest = Bytes::from(vec![0; MAX_VALUE_BYTES]);
        let full = (0..1000).find(|key| store.put(format!("{key:03}"), largest.clone()).is_err()).unwrap();
        assert_eq!(full, MAX_STORED_BYTES / (MAX_VALUE_BYTES + 3));
        let text = store.put("x".to_owned(), largest.clone()).unwrap_err();
        assert!(text.contains("at most 268435456 are allowed"), "{text}");
        // A value that replaces another reuses its space.
        store.put("000".to_owned(), Bytes::new()).unwrap();
        store.put("x".to_owned(), largest).unwrap();
        assert_eq!(store.bytes, store.values.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>());
    }
}
