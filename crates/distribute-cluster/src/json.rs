//! A JSON parser that rejects duplicate keys.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Parses a JSON text.
///
/// # Errors
/// Syntax errors of [`serde_json::from_str`], and an error if an object at any depth has a duplicate key: parsers
/// differ in which of the two values they keep.
pub(crate) fn parse(json: &str) -> serde_json::Result<Value> {
    serde_json::from_str::<Strict>(json).map(|strict| strict.0)
}

struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Strict, D::Error> {
        deserializer.deserialize_any(Reader).map(Strict)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut all = Vec::new();
        while let Some(Strict(item)) = items.next_element()? {
            all.push(item);
        }
        Ok(Value::Array(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut all = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if all.contains_key(&key) {
                return Err(A::Error::custom(format_args!("key {key:?} stands twice in one object")));
            }
            let Strict(value) = entries.next_value()?;
            all.insert(key, value);
        }
        Ok(Value::Object(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_serde_json() {
        for json in [
            r#"{"a": [1, -2, 2.5, "x", null, true, {"b": {}}], "c": 18446744073709551615}"#,
            "[]",
            "null",
            "\"\\u00e9\"",
        ] {
            assert_eq!(parse(json).unwrap(), serde_json::from_str::<Value>(json).unwrap(), "{json}");
        }
        for json in ["", "{", "[1,]", "{\"a\" 1}", "1 2", "1e999"] {
            assert!(parse(json).is_err(), "{json}");
        }
        assert!(parse(&"[".repeat(10_000)).is_err());
    }

    #[test]
    fn repeated_keys_are_errors_at_every_depth() {
        for json in [r#"{"a": 1, "a": 1}"#, r#"[{"b": {"x": 0, "a": 1, "y": 2, "a": {}}}]"#, r#"{"a": 1, "\u0061": 2}"#]
        {
            let text = parse(json).unwrap_err().to_string();
            assert!(text.contains("key \"a\" stands twice in one object at line 1 column"), "{text}");
        }
        assert!(parse(r#"[{"a": 1}, {"a": {"a": 2}}]"#).is_ok());
    }
}
