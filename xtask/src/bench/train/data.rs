//! Examples, the same for all libraries and arrangements.

/// Batches that are repeated.
pub(super) const BATCHES: usize = 32;
/// Tokens of the transformer's vocabulary.
pub(super) const VOCABULARY: usize = 96;
/// Words of the embedding, and elements of each.
pub(super) const WORDS: [usize; 2] = [100_000, 64];
/// Tokens of a sequence.
pub(super) const TOKENS: usize = 32;
/// Features of the wide model.
pub(super) const WIDTH: usize = 4096;

/// Returns numbers from 0 to below 1.
pub(super) fn pixels(len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 2_654_435_761) % 1000) as f32 / 1000.0).collect()
}

/// Returns words from all over the vocabulary.
pub(super) fn words(len: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 2_654_435_761) % WORDS[0]) as u32).collect()
}

/// Returns classes from 0 to 9.
pub(super) fn labels(len: usize) -> Vec<u32> {
    (0..len).map(|i| (i * 7 % 10) as u32).collect()
}

/// Returns sequences one after another, and the token that follows each of theirs.
pub(super) fn sequences(count: usize) -> (Vec<u32>, Vec<u32>) {
    let token = |at: usize| ((at * at + 31 * at) % 1009 % VOCABULARY) as u32;
    let tokens = |shift: usize| {
        (0..count).flat_map(|row| (0..TOKENS).map(move |at| token(row * 17 + at + shift))).collect::<Vec<u32>>()
    };
    (tokens(0), tokens(1))
}
