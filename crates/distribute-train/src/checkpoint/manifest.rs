//! The manifest of a checkpoint, `manifest.json`, which is protected by a checksum.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::disk::Entry;
use super::run::RunId;

pub(super) const MANIFEST: &str = "manifest.json";

/// The format of checkpoints that this version writes and reads.
pub(super) const FORMAT: u64 = 2;

/// Upper bound of a manifest's size: a hundred thousand files make 8 MB.
pub(super) const MANIFEST_BYTES: u64 = 16 << 20;

/// A checkpoint's description of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub(super) format: u64,
    pub(super) run: RunId,
    /// Numbers the checkpoints of the run: the newest has the highest. A step may recur after restoring an earlier one.
    pub(super) sequence: u64,
    pub(super) step: u64,
    /// Whether it is to be removed at the end of the training.
    pub(super) backup: bool,
    /// Whether it is kept for good, whatever the number of newer ones.
    pub(super) stays: bool,
    /// When the newest checkpoint that an interval has kept for good was saved, else when the first interval began, in
    /// milliseconds since 1970; `None` without intervals.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kept_since: Option<u64>,
    pub(super) files: BTreeMap<String, Entry>,
    /// CRC-32C of this document in compact JSON, with this field set to 0.
    pub(super) crc32c: u32,
}

/// Why a text is not a readable manifest.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ManifestError {
    /// The manifest of another version.
    Format(String),
    Damaged(String),
}

impl Manifest {
    /// Returns the text, including the checksum.
    pub(super) fn to_text(&self) -> serde_json::Result<Vec<u8>> {
        let mut text = serde_json::to_vec_pretty(&Manifest { crc32c: self.checksum()?, ..self.clone() })?;
        text.push(b'\n');
        Ok(text)
    }

    pub(super) fn from_text(text: &[u8]) -> Result<Manifest, ManifestError> {
        let damaged = |problem: String| ManifestError::Damaged(problem);
        let value: Value = serde_json::from_slice(text).map_err(|error| damaged(error.to_string()))?;
        match value.get("format") {
            Some(format) if format.as_u64() == Some(FORMAT) => {}
            // A bit of a manifest of this version may have changed.
            _ if is_of_this_format(&value) => {
                return Err(damaged("its format is not the one that was written".to_owned()));
            }
            Some(format) => return Err(ManifestError::Format(format.to_string())),
            None => return Err(ManifestError::Format("1, or none".to_owned())),
        }
        // Parsed from the text again, since a `Value` would keep the last of two fields with the same name.
        let manifest: Manifest = serde_json::from_slice(text).map_err(|error| damaged(error.to_string()))?;
        if manifest.checksum().ok() != Some(manifest.crc32c) {
            return Err(damaged("its checksum is not the one that was written".to_owned()));
        }
        if let Some(name) = manifest.files.keys().find(|name| !is_plain_name(name)) {
            return Err(damaged(format!("it names a file {name:?}, which is not in its folder")));
        }
        Ok(manifest)
    }

    fn checksum(&self) -> serde_json::Result<u32> {
        Ok(crc32c::crc32c(&serde_json::to_vec(&Manifest { crc32c: 0, ..self.clone() })?))
    }
}

/// Returns whether a document is a manifest of this version but for its format: another value, by the checksum, or
/// another name, since the first format had no checksum.
fn is_of_this_format(value: &Value) -> bool {
    let mut value = value.clone();
    let Some(fields) = value.as_object_mut() else { return false };
    if fields.insert("format".to_owned(), FORMAT.into()).is_none() {
        return fields.contains_key("crc32c");
    }
    serde_json::from_value(value).is_ok_and(|manifest: Manifest| manifest.checksum().ok() == Some(manifest.crc32c))
}

/// Returns whether a name is valid for a file of a checkpoint: it lies in the checkpoint's own folder, on any system,
/// and is not hidden.
pub(super) fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let one = matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name);
    one && name != MANIFEST
        && name.len() <= 255
        && !name.starts_with('.')
        && !name.contains(|c: char| c.is_control() || c == '\\' || c == '/' || c == ':')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let files = BTreeMap::from([("state.json".to_owned(), Entry { bytes: 3, crc32c: 4 })]);
        let run = RunId::draw();
        Manifest {
            format: FORMAT,
            run,
            sequence: 1,
            step: 12,
            backup: false,
            stays: false,
            kept_since: Some(7),
            files,
            crc32c: 0,
        }
    }

    #[test]
    fn every_field_is_under_the_checksum() {
        let text = String::from_utf8(manifest().to_text().unwrap()).unwrap();
        let read = Manifest::from_text(text.as_bytes()).unwrap();
        assert_eq!(
            Manifest { crc32c: 0, ..read },
            Manifest { run: Manifest::from_text(text.as_bytes()).unwrap().run, ..manifest() }
        );
        for (field, other) in [
            ("\"step\": 12", "\"step\": 13"),
            ("\"sequence\": 1", "\"sequence\": 2"),
            ("\"backup\": false", "\"backup\": true"),
            ("\"stays\": false", "\"stays\": true"),
            ("\"kept_since\": 7", "\"kept_since\": 8"),
            ("\"run\": \"", "\"run\": \"0000000000000000\", \"other\": \""),
            ("\"state.json\"", "\"model.json\""),
            ("\"bytes\": 3", "\"bytes\": 5"),
            ("\"crc32c\": 4", "\"crc32c\": 5"),
            ("\"step\": 12", "\"step\": 12, \"step\": 12"),
        ] {
            assert!(text.contains(field), "{text}");
            let changed = text.replacen(field, other, 1);
            assert!(matches!(Manifest::from_text(changed.as_bytes()), Err(ManifestError::Damaged(_))), "{changed}");
        }
        for length in 0..text.trim_end().len() {
            assert!(Manifest::from_text(&text.as_bytes()[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn another_format_is_told_from_damage() {
        let text = String::from_utf8(manifest().to_text().unwrap()).unwrap();
        let newer = text.replace("\"format\": 2", "\"format\": 3, \"more\": 1");
        assert_eq!(Manifest::from_text(newer.as_bytes()), Err(ManifestError::Format("3".to_owned())));
        let older = br#"{"step": 1, "files": {}}"#;
        assert!(matches!(Manifest::from_text(older), Err(ManifestError::Format(_))));
    }

    #[test]
    fn a_bit_that_has_changed_is_no_other_format() {
        let text = manifest().to_text().unwrap();
        for place in 0..text.len() * 8 {
            let mut changed = text.clone();
            changed[place / 8] ^= 1 << (place % 8);
            match Manifest::from_text(&changed) {
                Err(ManifestError::Damaged(_)) => {}
                // White space between the fields.
                Ok(read) => {
                    assert_eq!(Manifest { crc32c: 0, ..read.clone() }, Manifest { run: read.run, ..manifest() })
                }
                Err(other) => panic!("bit {place}: {other:?}"),
            }
        }
    }

    #[test]
    fn names_stay_in_the_folder() {
        for name in [
            "",
            ".",
            "..",
            "/etc/passwd",
            "a/b",
            "../a",
            "a/..",
            "./a",
            "a/",
            "a\\b",
            "c:a",
            ".a",
            "a\0",
            "manifest.json",
        ] {
            assert!(!is_plain_name(name), "{name:?}");
            let mut bad = manifest();
            bad.files.insert(name.to_owned(), Entry { bytes: 0, crc32c: 0 });
            assert!(matches!(Manifest::from_text(&bad.to_text().unwrap()), Err(ManifestError::Damaged(_))), "{name:?}");
        }
        assert!(is_plain_name("model-00001-of-00003.safetensors"));
    }
}
