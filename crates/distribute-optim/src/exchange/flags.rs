//! The flags that are reduced with a step's gradients.

use distribute_strategy::StepHeader;

/// For each variable whether a replica got a gradient, followed by the step header. After the reduction, the number of
/// replicas with a gradient, and the sums of the headers.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepFlags(Vec<u32>);

impl StepFlags {
    pub(crate) fn new(came: impl Iterator<Item = bool>, header: StepHeader) -> StepFlags {
        StepFlags(came.map(u32::from).chain(header.to_words()).collect())
    }

    /// Returns the number of words for a model with this many variables.
    pub(crate) fn len_for(variables: usize) -> usize {
        variables + StepHeader::LEN
    }

    /// Returns whether a variable got a gradient on some replica.
    pub(crate) fn came(&self, index: usize) -> bool {
        self.0.get(index).is_some_and(|replicas| *replicas > 0)
    }

    pub(crate) fn header(&self) -> StepHeader {
        self.0.last_chunk().map_or_else(StepHeader::default, |words| StepHeader::from_words(*words))
    }

    pub(crate) fn into_words(self) -> Vec<u32> {
        self.0
    }

    /// Creates the flags from the reduced [words](StepFlags::into_words).
    pub(crate) fn from_words(words: Vec<u32>) -> StepFlags {
        StepFlags(words)
    }
}
