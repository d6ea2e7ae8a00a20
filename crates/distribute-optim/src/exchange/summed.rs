//! The step whose gradients are sums over all replicas already: only its flags are exchanged.

use distribute_collectives::{ProcessGroup, ReduceOp};

use super::{Exchange, StepFlags, Summed};
use crate::gradient::Reduced;
use crate::{Error, TensorLibrary};

/// Gradients that the program has summed itself.
pub(crate) struct SummedStep<L: TensorLibrary> {
    /// By index of the variable.
    gradients: Vec<Option<L::Tensor>>,
    /// The digest of all gradients, which is equal on all replicas.
    digest: u64,
}

impl<L: TensorLibrary> SummedStep<L> {
    pub(crate) fn new(variables: usize, digest: u64) -> SummedStep<L> {
        SummedStep { gradients: vec![None; variables], digest }
    }
}

impl<L: TensorLibrary> Exchange<L> for SummedStep<L> {
    fn has(&self, index: usize) -> bool {
        self.gradients.get(index).is_some_and(Option::is_some)
    }

    fn push(&mut self, _: &ProcessGroup, index: usize, gradient: L::Tensor) -> Result<(), L::Error> {
        if let Some(place) = self.gradients.get_mut(index) {
            *place = Some(gradient);
        }
        Ok(())
    }

    /// Each replica adds its digest, in parts that no number of replicas overflows, to the flags.
    fn finish(self: Box<Self>, group: &ProcessGroup, flags: StepFlags) -> Result<(Summed<L>, StepFlags), L::Error> {
        let digest = [48, 32, 16, 0].map(|shift| (self.digest >> shift) as u32 & 0xffff);
        let mut words: Vec<u32> = digest.into_iter().chain(flags.into_words()).collect();
        group.all_reduce(&mut words, ReduceOp::Sum)?;
        let flags = words.split_off(digest.len());
        let replicas = group.world_size() as u32;
        if digest.map(|part| part.wrapping_mul(replicas)) != words[..] {
            return Err(Error::UnequalSums.into());
        }
        let flags = StepFlags::from_words(flags);
        let gradients = self.gradients.into_iter().enumerate().filter(|(index, _)| flags.came(*index));
        let gradients = gradients.filter_map(|(index, gradient)| Some(Reduced::new(index, gradient?)));
        Ok((Summed::Whole(gradients.collect::<Result<_, L::Error>>()?), flags))
    }
}
