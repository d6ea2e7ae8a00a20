//! Notification during backward that a variable's gradient is complete.
//!
//! candle has no backward hook, but it calls [`CustomOp1::bwd`] exactly when all uses of an operation's result have
//! contributed. So models get, instead of a variable, the result of an operation on a dummy. This result holds the
//! variable's elements, and its `bwd` is the hook.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Shape, Storage, Tensor, Var};
use distribute_optim::backend::Tape;
use parking_lot::Mutex;

use crate::table::Gate;

/// A callback after a variable's gradient was reported.
type Fired = Box<dyn Fn() -> candle_core::Result<()> + Send + Sync>;

/// Returns a tensor of this type and shape, on this device, that has no elements in memory and reports its gradient to
/// `tape` as variable `index`; then it calls `fired`.
pub(crate) fn hooked_at_rest(
    (dtype, shape, device): (DType, &Shape, &Device),
    index: usize,
    tape: &Arc<Tape<Tensor>>,
    fired: Fired,
) -> candle_core::Result<Tensor> {
    // The storage decides the type of the result.
    let element = Tensor::zeros(1, dtype, device)?;
    let storage = {
        let (storage, layout) = element.storage_and_layout();
        owned(&storage, layout)?
    };
    let initial = Mutex::new(Some((storage, shape.clone())));
    let dummy = Var::zeros((), DType::F32, device)?;
    let to = Receiver::Tape { index, tape: tape.clone(), fired: Some(fired) };
    dummy.as_tensor().apply_op1(Hook { initial, to })
}

/// Returns a tensor with these elements that reports its gradient to `tape` as variable `index`, or to its gate.
pub(crate) fn hooked(
    elements: &Tensor,
    index: usize,
    tape: &Arc<Tape<Tensor>>,
    gate: Option<&Arc<Gate>>,
) -> candle_core::Result<Tensor> {
    let (storage, layout) = elements.storage_and_layout();
    let storage = owned(&storage, layout)?;
    let initial = Mutex::new(Some((storage, elements.shape().clone())));
    if let Some(gate) = gate {
        return gate.scalar().apply_op1(Hook { initial, to: Receiver::Gate(gate.clone()) });
    }
    // Only a variable, or a tensor computed from one, takes part in backward. The dummy's own gradient is never
    // computed.
    let dummy = Var::zeros((), DType::F32, elements.device())?;
    dummy.as_tensor().apply_op1(Hook { initial, to: Receiver::Tape { index, tape: tape.clone(), fired: None } })
}

fn owned(storage: &Storage, layout: &Layout) -> candle_core::Result<Storage> {
    match storage {
        Storage::Cpu(storage) => Ok(Storage::Cpu(storage.clone())),
        Storage::Cuda(storage) => Ok(Storage::Cuda(storage.try_clone(layout)?)),
        Storage::Metal(_) => Err(candle_core::Error::Msg("variables on Metal devices are not supported".to_owned())),
    }
}

struct Hook {
    /// The variable's storage, until the forward pass moves it to the result.
    initial: Mutex<Option<(Storage, Shape)>>,
    to: Receiver,
}

/// The receiver of the gradient.
enum Receiver {
    Tape { index: usize, tape: Arc<Tape<Tensor>>, fired: Option<Fired> },
    Gate(Arc<Gate>),
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
        match &self.to {
            Receiver::Tape { index, tape, fired } => {
                tape.gradient(*index, gradient.clone());
                fired.as_ref().map_or(Ok(()), |fired| fired())?;
                Ok(None)
            }
            Receiver::Gate(gate) => gate.add_whole(gradient),
        }
    }
}

/// Returns the error of an impossible case: the dummy is on the same device as the values.
fn elsewhere() -> candle_core::Error {
    candle_core::Error::Msg("a variable's values are on another device than the variable".to_owned())
}
