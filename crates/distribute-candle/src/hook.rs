//! Notification during backward that a variable's gradient is complete.
//!
//! candle has no backward hook, but it calls [`CustomOp1::bwd`] exactly when all uses of an operation's result have
//! contributed. So models get, instead of a variable, the result of an operation on a dummy. This result holds the
//! variable's elements, and its `bwd` is the hook.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Shape, Storage, Tensor, Var};
use distribute_optim::backend::Tape;
use parking_lot::Mutex;

/// Returns a tensor with these elements that reports its gradient to `tape` as variable `index`.
pub(crate) fn hooked(elements: &Tensor, index: usize, tape: &Arc<Tape<Tensor>>) -> candle_core::Result<Tensor> {
    let (storage, layout) = elements.storage_and_layout();
    let storage = match &*storage {
        Storage::Cpu(storage) => Storage::Cpu(storage.clone()),
        Storage::Cuda(storage) => Storage::Cuda(storage.try_clone(layout)?),
        Storage::Metal(_) => {
            return Err(candle_core::Error::Msg("variables on Metal devices are not supported".to_owned()));
        }
    };
    let initial = Mutex::new(Some((storage, elements.shape().clone())));
    // Only a variable, or a tensor computed from one, takes part in backward. The dummy's own gradient is never
    // computed.
    let dummy = Var::zeros((), DType::F32, elements.device())?;
    dummy.as_tensor().apply_op1(Hook { index, tape: tape.clone(), initial })
}

struct Hook {
    index: usize,
    tape: Arc<Tape<Tensor>>,
    /// The variable's storage, until the forward pass moves it to the result.
    initial: Mutex<Option<(Storage, Shape)>>,
}

impl Hook {
    fn initial(&self) -> candle_core::Result<(Storage, Shape)> {
        let initial = self.initial.lock().take();
        initial.ok_or_else(|| candle_core::Error::Msg("a variable was made twice".to_owned()))
    }
}

impl CustomOp1 for Hook {
    fn name(&self) -> &'static str {
        "distribute-variable"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        match self.initial()? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            _ => Err(elsewhere()),
        }
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        match self.initial()? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            _ => Err(elsewhere()),
        }
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        self.tape.gradient(self.index, gradient.clone());
        Ok(None)
    }
}

/// Returns the error of an impossible case: the dummy is on the same device as the values.
fn elsewhere() -> candle_core::Error {
    candle_core::Error::Msg("a variable's values are on another device than the variable".to_owned())
}
