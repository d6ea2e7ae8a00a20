//! Operations whose gradients are handed on, and not added to zeros.
//!
//! candle's backward adds every gradient of a tensor to a sum that begins with zeros: it fills and reads whole tensors
//! on one thread, where most have one gradient only. So in candle's graph an operation of this crate has a scalar for
//! its result, the relay, of which the tensor that the program gets is computed. An operation on such a tensor is one
//! on its relay, with which it leaves the gradient. When backward reaches the relay, all uses have left theirs.

use std::array;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, OnceLock, Weak};

use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, Device, Error, Layout, Result, Shape, Storage, Tensor, TensorId,
};
use parking_lot::Mutex;

use crate::host::{Stored, added};

/// An operation on `N` tensors in host memory.
pub(crate) trait Operation<const N: usize>: Send + Sync {
    const NAME: &'static str;

    fn forward(&self, inputs: [Stored<'_>; N]) -> Result<(CpuStorage, Shape)>;

    /// Computes the gradients of the inputs, from the result `y` and its gradient; `None` for one that is not needed.
    fn backward(&self, inputs: [&Tensor; N], y: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; N]>;

    /// Returns what forward has kept for backward, if it is as large as a tensor. A recomputed block drops it.
    fn kept(&self) -> Option<&Tensor> {
        None
    }
}

/// Computes an operation.
pub(crate) fn apply<const N: usize, O: Operation<N> + 'static>(inputs: [&Tensor; N], operation: O) -> Result<Tensor>
where
    Node<O, N>: InGraph<N>,
{
    let result = {
        let held = inputs.map(Tensor::storage_and_layout);
        let mut stored = Vec::with_capacity(N);
        for (storage, layout) in &held {
            let Storage::Cpu(storage) = &**storage else { candle_core::bail!("{} of no host memory", O::NAME) };
            stored.push((storage, *layout));
        }
        operation.forward(array::from_fn(|at| stored[at]))?
    };
    let opened = |relay| Opened { relay, result: Mutex::new(Some(result)) };
    if !inputs.iter().any(|input| input.track_op()) {
        return scalar(0.0)?.apply_op1_no_bwd(&opened(None));
    }
    let relays = inputs.map(Relay::of);
    let arguments = array::from_fn(|at| relays[at].as_ref().map_or(inputs[at], |relay| &relay.scalar).clone());
    let (inbox, y, kept) = (Arc::<Inbox>::default(), Arc::<OnceLock<Tensor>>::default(), operation.kept().cloned());
    let node = Node {
        operation,
        inputs: inputs.map(Tensor::clone),
        inboxes: relays.map(|relay| relay.map(|relay| relay.inbox.clone())),
        y: y.clone(),
        inbox: inbox.clone(),
    };
    let scalar = node.computed_of(arguments)?;
    let relay = Arc::new(Relay { scalar, inbox, of: OnceLock::new(), y: y.clone(), kept });
    let result = relay.scalar.apply_op1(opened(Some(relay.clone())))?;
    relay.serve(&result);
    // Without its place in the graph, or the graph would contain itself.
    let _ = y.set(result.detach());
    Ok(result)
}

/// The scalar that takes a tensor's place in candle's graph.
struct Relay {
    scalar: Tensor,
    inbox: Arc<Inbox>,
    /// The tensor.
    of: OnceLock<TensorId>,
    /// The tensor without its place in the graph, and what its operation has kept for backward.
    y: Arc<OnceLock<Tensor>>,
    kept: Option<Tensor>,
}

/// The relays of all tensors that have one. candle does not show which operation a tensor is of.
static RELAYS: LazyLock<Mutex<Relays>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Relays {
    of_tensors: HashMap<TensorId, Weak<Relay>>,
    of_scalars: HashMap<TensorId, Weak<Relay>>,
}

/// Returns the tensors that backward reads at `node`, or earlier, and that candle's graph does not
/// show: if the node is a relay, the result of its operation and what that has kept. Nothing else has their memory but
/// views of the result.
pub(crate) fn behind(node: &Tensor) -> impl Iterator<Item = Tensor> {
    let relay = RELAYS.lock().of_scalars.get(&node.id()).and_then(Weak::upgrade);
    relay.into_iter().flat_map(|relay| relay.y.get().cloned().into_iter().chain(relay.kept.clone()))
}

impl Relay {
    fn of(tensor: &Tensor) -> Option<Arc<Relay>> {
        RELAYS.lock().of_tensors.get(&tensor.id())?.upgrade()
    }

    /// Takes the place of a tensor until this is dropped.
    fn serve(self: &Arc<Relay>, tensor: &Tensor) {
        // It is set once, where the relay is made.
        let _ = self.of.set(tensor.id());
        let mut relays = RELAYS.lock();
        relays.of_tensors.insert(tensor.id(), Arc::downgrade(self));
        relays.of_scalars.insert(self.scalar.id(), Arc::downgrade(self));
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(tensor) = self.of.get() {
            let mut relays = RELAYS.lock();
            relays.of_tensors.remove(tensor);
            relays.of_scalars.remove(&self.scalar.id());
        }
    }
}

/// The gradients of a tensor that a backward pass has computed.
#[derive(Default)]
struct Inbox(Mutex<Gradients>);

#[derive(Default)]
struct Gradients {
    sum: Option<Tensor>,
    count: u32,
}

impl Inbox {
    /// Adds a gradient. Returns that of the relay: of all, candle gives it the number that this pass has handed over.
    fn hand(&self, gradient: Tensor) -> Result<Option<Tensor>> {
        let mut gradients = self.0.lock();
        let sum = match gradients.sum.take() {
            Some(sum) => added(&sum, &gradient)?,
            None => gradient,
        };
        *gradients = Gradients { sum: Some(sum), count: gradients.count + 1 };
        scalar(1.0).map(Some)
    }

    /// Takes the sum of as many gradients as this pass has handed over.
    fn take(&self, handed: &Tensor) -> Result<Tensor> {
        let (Gradients { sum, count }, handed) = (std::mem::take(&mut *self.0.lock()), handed.to_scalar::<f32>()?);
        match sum {
            Some(sum) if handed == count as f32 => Ok(sum),
            _ => candle_core::bail!(
                "backward has computed {handed} gradients of a tensor, and there are {count}: an earlier backward \
                 through the same graph has failed, or another one is in progress; compute the loss anew"
            ),
        }
    }
}

fn scalar(number: f32) -> Result<Tensor> {
    Tensor::new(number, &Device::Cpu)
}

/// The operation whose result is a relay's scalar.
pub(crate) struct Node<O, const N: usize> {
    operation: O,
    inputs: [Tensor; N],
    /// Where the gradients of the inputs that have relays go.
    inboxes: [Option<Arc<Inbox>>; N],
    y: Arc<OnceLock<Tensor>>,
    inbox: Arc<Inbox>,
}

impl<O: Operation<N>, const N: usize> Node<O, N> {
    fn forward() -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    /// Returns the gradients of what stands for the inputs in candle's graph.
    fn backward(&self, handed: &Tensor) -> Result<[Option<Tensor>; N]> {
        let gradient = self.inbox.take(handed)?;
        let y = self.y.get().ok_or_else(|| Error::Msg("backward comes before forward".to_owned()))?;
        let mut gradients = self.operation.backward(self.inputs.each_ref(), y, &gradient)?;
        for ((gradient, inbox), input) in gradients.iter_mut().zip(&self.inboxes).zip(&self.inputs) {
            *gradient = match (gradient.take(), inbox) {
                (Some(gradient), Some(inbox)) => inbox.hand(gradient)?,
                (gradient, _) => gradient.filter(|_| input.track_op()),
            };
        }
        Ok(gradients)
    }
}

/// A node that candle has an operation for.
pub(crate) trait InGraph<const N: usize> {
    fn computed_of(self, arguments: [Tensor; N]) -> Result<Tensor>;
}

impl<O: Operation<1> + 'static> InGraph<1> for Node<O, 1> {
    fn computed_of(self, [x]: [Tensor; 1]) -> Result<Tensor> {
        x.apply_op1(self)
    }
}

impl<O: Operation<2> + 'static> InGraph<2> for Node<O, 2> {
    fn computed_of(self, [x, y]: [Tensor; 2]) -> Result<Tensor> {
        x.apply_op2(&y, self)
    }
}

impl<O: Operation<3> + 'static> InGraph<3> for Node<O, 3> {
    fn computed_of(self, [x, y, z]: [Tensor; 3]) -> Result<Tensor> {
        x.apply_op3(&y, &z, self)
    }
}

impl<O: Operation<1>> CustomOp1 for Node<O, 1> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Self::forward()
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, handed: &Tensor) -> Result<Option<Tensor>> {
        let [x] = self.backward(handed)?;
        Ok(x)
    }
}

impl<O: Operation<2>> CustomOp2 for Node<O, 2> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Self::forward()
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor, handed: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.backward(handed).map(Into::into)
    }
}

impl<O: Operation<3>> CustomOp3 for Node<O, 3> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Self::forward()
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        handed: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        self.backward(handed).map(Into::into)
    }
}

/// The operation that makes a result's tensor.
struct Opened {
    /// `None` if backward never comes to the tensor. Else it serves as long as the tensor is there.
    relay: Option<Arc<Relay>>,
    /// The elements, until the forward pass moves them to the tensor.
    result: Mutex<Option<(CpuStorage, Shape)>>,
}

impl CustomOp1 for Opened {
    fn name(&self) -> &'static str {
        "distribute-result"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.result.lock().take().ok_or_else(|| Error::Msg("a result was made twice".to_owned()))
    }

    /// Hands over the gradient of operations that are candle's.
    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.relay.as_ref().map_or(Ok(None), |relay| relay.inbox.hand(gradient.clone()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use candle_core::Var;

    use super::*;
    use crate::{add, gelu, relu};

    fn numbers(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    fn variable() -> Var {
        Var::from_tensor(&Tensor::new(&[[0.5f32, -1.0, 2.0], [0.25, 3.0, -0.75]], &Device::Cpu).unwrap()).unwrap()
    }

    /// Computes a loss in which results are used more than once, by operations of this crate and by candle's.
    fn loss(x: &Tensor, curve: fn(&Tensor) -> Result<Tensor>, plus: fn(&Tensor, &Tensor) -> Result<Tensor>) -> Tensor {
        let run = || -> Result<Tensor> {
            let y = curve(&(x * 2.0)?)?;
            let z = plus(&y, &curve(&y)?)?;
            let both = plus(&plus(&z, &z)?, &y.reshape((3, 2))?.sqr()?.reshape((2, 3))?)?;
            (both.t()?.contiguous()? * curve(&y)?.reshape((3, 2))?)?.sum_all()
        };
        run().unwrap()
    }

    #[test]
    fn gradients_are_those_of_candles_operations() {
        let x = variable();
        let expected = loss(&x, |x| x.gelu(), |x, y| x + y).backward().unwrap();
        let got = loss(&x, gelu, add);
        for _ in 0..2 {
            let gradients = got.backward().unwrap();
            for (a, b) in numbers(gradients.get(&x).unwrap()).iter().zip(numbers(expected.get(&x).unwrap())) {
                assert!((a - b).abs() < 1e-4 * b.abs().max(1.0), "{a} {b}");
            }
        }
    }

    #[test]
    fn a_part_of_a_graph_has_gradients_of_its_own() {
        let x = variable();
        let y = relu(&x).unwrap();
        let (one, other) = (add(&y, &y).unwrap(), gelu(&y).unwrap());
        let of = |loss: &Tensor| numbers(loss.backward().unwrap().get(&x).unwrap());
        assert_eq!(of(&one), [2.0, 0.0, 2.0, 2.0, 2.0, 0.0]);
        assert_eq!(of(&one.sum_all().unwrap()), [2.0, 0.0, 2.0, 2.0, 2.0, 0.0]);
        let both = add(&one, &other).unwrap();
        let sums: Vec<f32> = of(&one).iter().zip(of(&other)).map(|(a, b)| a + b).collect();
        assert_eq!(of(&both), sums);
    }

    #[test]
    fn a_relay_is_there_as_long_as_its_tensor() {
        let x = variable();
        let y = relu(&x).unwrap();
        let (id, reshaped) = (y.id(), y.reshape((3, 2)).unwrap());
        let scalar = Relay::of(&y).unwrap().scalar.id();
        assert!(Relay::of(&y).is_some() && Relay::of(&reshaped).is_none() && Relay::of(&y.detach()).is_none());
        drop(y);
        let are_there = || {
            let relays = RELAYS.lock();
            [relays.of_tensors.contains_key(&id), relays.of_scalars.contains_key(&scalar)]
        };
        assert_eq!(are_there(), [true, true]);
        drop(reshaped);
        assert_eq!(are_there(), [false, false]);
        let untracked = relu(&x.detach()).unwrap();
        assert!(!untracked.track_op() && Relay::of(&untracked).is_none());
    }

    /// Passes gradients on; the first time, it fails.
    struct Failing(AtomicBool);

    impl Operation<1> for Failing {
        const NAME: &'static str = "failing";

        fn forward(&self, [(storage, layout)]: [Stored<'_>; 1]) -> Result<(CpuStorage, Shape)> {
            Ok((storage.clone(), layout.shape().clone()))
        }

        fn backward(&self, _: [&Tensor; 1], _: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 1]> {
            if self.0.swap(false, Ordering::Relaxed) {
                candle_core::bail!("planted");
            }
            Ok([Some(gradient.clone())])
        }
    }

    #[test]
    fn what_a_failed_backward_has_left_is_in_no_gradient() {
        let x = variable();
        let y = relu(&x).unwrap();
        // candle goes through the second use first, so that the first fails when `y` has a gradient.
        let failing = apply([&y], Failing(AtomicBool::new(true))).unwrap();
        let loss = add(&failing, &gelu(&y).unwrap()).unwrap();
        assert!(loss.backward().unwrap_err().to_string().contains("planted"));
        let error = loss.backward().unwrap_err().to_string();
        assert!(error.contains("backward has computed 2 gradients of a tensor, and there are 3"), "{error}");
        let gradients = loss.backward().unwrap();
        assert!(gradients.get(&x).is_some());
    }
}
