//! The names of a checkpoint's files.

use super::manifest::is_plain_name;
use crate::{Error, Result};

/// The file of the state.
pub(super) const STATE: &str = "state.json";
const TENSORS: &str = ".safetensors";

/// Returns the name of one of a group's files, which are counted from 1.
pub(super) fn file_name(group: &str, index: usize, count: usize) -> String {
    match count {
        1 => format!("{group}.safetensors"),
        _ => format!("{group}-{index:05}-of-{count:05}.safetensors"),
    }
}

/// Checks that a group of tensors can have this name.
pub(super) fn check_group(group: &str) -> Result<()> {
    let name = format!("{group}.safetensors");
    match is_plain_name(&name) && !group.is_empty() && group_of(&name) == Some(group) {
        true => Ok(()),
        false => Err(Error::FileName { name: group.to_owned() }),
    }
}

/// Returns the group that a tensor file is a shard of: `model` for `model-00001-of-00003.safetensors`.
pub(super) fn group_of(name: &str) -> Option<&str> {
    let stem = name.strip_suffix(TENSORS)?;
    let number = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let file = stem
        .rsplit_once("-of-")
        .filter(|(_, count)| number(count))
        .and_then(|(rest, _)| rest.rsplit_once('-'))
        .filter(|(_, index)| number(index));
    Some(file.map_or(stem, |(file, _)| file))
}

#[cfg(test)]
mod tests {
    use super::group_of;

    #[test]
    fn parts_are_told_by_their_whole_ending() {
        assert_eq!(group_of("model.safetensors"), Some("model"));
        assert_eq!(group_of("model-00001-of-00003.safetensors"), Some("model"));
        assert_eq!(group_of("expert-01.safetensors"), Some("expert-01"));
        assert_eq!(group_of("expert-01-00001-of-00002.safetensors"), Some("expert-01"));
        assert_eq!(group_of("state.json"), None);
    }
}
