//! Texts, for the examples that learn to write.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use distribute::Error;
use distribute::input::Array;

use crate::files;

/// Texts as indices into the list of characters that occur.
pub(crate) struct Text {
    pub(crate) vocabulary: Vec<char>,
    pub(crate) train: Vec<u32>,
    /// The last tenth of each file, for validation.
    pub(crate) validation: Vec<u32>,
}

impl Text {
    /// Reads files, or the project's documentation if there are none.
    pub(crate) fn read(paths: &[PathBuf]) -> distribute::Result<Text> {
        let files = files::read(paths)?;
        let characters: BTreeSet<char> = files.iter().flat_map(|file| file.chars()).chain(['\n']).collect();
        let mut text = Text { vocabulary: characters.into_iter().collect(), train: vec![], validation: vec![] };
        for file in &files {
            let mut indices: Vec<u32> = file.chars().map(|character| text.index(character)).collect();
            text.validation.extend(indices.split_off(indices.len() - indices.len() / 10));
            text.train.extend(indices);
        }
        Ok(text)
    }

    pub(crate) fn index(&self, character: char) -> u32 {
        self.vocabulary.binary_search(&character).unwrap_or(0) as u32
    }

    /// Returns windows, `stride` apart, of one character more than the context: as many as a batch, or more.
    pub(crate) fn windows(
        &self,
        text: &[u32],
        context: usize,
        stride: usize,
        batch: usize,
    ) -> distribute::Result<Array<u32>> {
        let windows: Vec<u32> = text.windows(context + 1).step_by(stride).flatten().copied().collect();
        let (count, length, characters) = (windows.len() / (context + 1), context + 1, text.len());
        if count < batch.max(1) {
            return Err(Error::program(format!(
                "a part of {characters} characters has {count} windows of {length} characters, of which a batch takes \
                 {batch}; give more text, or a smaller --context or --batch"
            )));
        }
        Ok(Array::new([count, length], windows)?)
    }

    /// Computes the cross-entropy of the validation text under the training text's character frequencies, in bits per
    /// character.
    pub(crate) fn unigram_bits(&self) -> f64 {
        let mut counts: BTreeMap<u32, f64> = (0..self.vocabulary.len() as u32).map(|index| (index, 1.0)).collect();
        for index in &self.train {
            *counts.entry(*index).or_default() += 1.0;
        }
        let total: f64 = counts.values().sum();
        let bits: f64 = self.validation.iter().map(|index| -(counts[index] / total).log2()).sum();
        bits / self.validation.len().max(1) as f64
    }
}
