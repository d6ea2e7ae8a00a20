//! The exchange of gradients in the memory of accelerators.

use distribute_collectives::ProcessGroup;

use super::{Exchange, StepFlags, Summed};
use crate::{DeviceExchange, TensorLibrary};

/// The summed gradients in a device's memory.
pub(crate) type SumOnDevice<L> = <<L as TensorLibrary>::Devices as DeviceExchange<L>>::Sum;

/// A device's step, driven by the reducer.
pub(crate) struct OnDevice<L: TensorLibrary>(pub(crate) <L::Devices as DeviceExchange<L>>::Step);

impl<L: TensorLibrary> Exchange<L> for OnDevice<L> {
    fn has(&self, index: usize) -> bool {
        L::Devices::has(&self.0, index)
    }

    fn push(&mut self, _: &ProcessGroup, index: usize, gradient: L::Tensor) -> Result<(), L::Error> {
        L::Devices::push(&mut self.0, index, gradient)
    }

    fn finish(self: Box<Self>, _: &ProcessGroup, flags: StepFlags) -> Result<(Summed<L>, StepFlags), L::Error> {
        let (sum, flags) = L::Devices::finish(self.0, flags.into_words())?;
        Ok((Summed::OnDevice(sum), StepFlags::from_words(flags)))
    }
}
