//! Dropout whose random streams differ between replicas.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{CpuStorage, DType, Error, ModuleT, Shape, Tensor, bail};
use candle_nn::VarBuilder;
use distribute_rows::pairs;
use distribute_strategy::{RandomState, Recoverable, RecoveryError, get_replica_context};
use rand_chacha::rand_core::Rng;

use crate::host::{Element, Kept, Stored, elements, is_fused, tensor, with};
use crate::initial::hash;
use crate::relay::{Operation, apply};

/// Dropout: in training, replaces elements by 0 with a given probability, and divides the others by that of keeping
/// them. candle's own cannot be seeded in host memory.
///
/// The elements that are dropped depend only on the seed of the scope, the layer's path, the replica's id and the
/// number of previous calls in training. Replicas therefore drop different elements, and a program that is run again
/// drops the same. Checkpoints of the [`Model`](crate::Model) have the number of calls, so that a run that resumes
/// drops what it would have dropped without the interruption; calls in a step that failed do not count.
///
/// The ranks of a tensor group drop the same elements. Outside replicas the layer draws from the stream of replica 0. A
/// block that [recomputes](crate::Sharded::recompute) drops the same elements again. On parameter servers each worker
/// process has a seed of its own, which another run does not repeat.
///
/// # Shapes
/// The result has the shape of the input.
///
/// # Cost
/// Four random bytes for each element, and a product with a mask of the input's size, which is drawn in host memory.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, ModuleT, Tensor};
/// use distribute_candle::{CandleStrategy, Error, dropout};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let model = strategy.scope(|vb| dropout(0.5, vb.pp("dropout")))?;
/// let x = Tensor::ones(64, DType::F32, &Device::Cpu)?;
/// let kept = strategy.run_with(&model, |_, dropout| Ok::<_, Error>(dropout.forward_t(&x, true)?.to_vec1::<f32>()?))?;
/// assert!(kept.values()[0].iter().all(|x| [0.0, 2.0].contains(x)));
/// assert_ne!(kept.values()[0], kept.values()[1]);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// Srivastava and others, "Dropout: a simple way to prevent neural networks from overfitting", 2014; the name and the
/// mode are those of [`candle_nn::Dropout`].
#[derive(Clone, Debug)]
pub struct Dropout {
    probability: f64,
    stream: Arc<Stream>,
}

/// Creates a [`Dropout`] layer that drops elements with a probability, at the path of `vb`.
///
/// # Errors
/// [`candle_core::Error`] if the probability is not in 0..1, or if the model has a dropout layer at this path.
pub fn dropout(probability: f64, vb: VarBuilder<'_>) -> candle_core::Result<Dropout> {
    if !(0.0..1.0).contains(&probability) {
        bail!(
            "dropout {:?}: the probability is {probability}; give one from 0 up to, but not including, 1",
            vb.prefix()
        );
    }
    let stream = BUILDING.with_borrow_mut(|building| {
        let seed = building.as_ref().map_or(0, |building| building.seed);
        let name = vb.prefix();
        if building.as_ref().is_some_and(|building| building.streams.iter().any(|stream| stream.name == name)) {
            bail!(
                "dropout {name:?}: the model has another dropout layer at this path, and both would drop the same \
                 elements; give each a path of its own, as by vb.pp(\"dropout2\")"
            );
        }
        let stream = Arc::new(Stream { seed: seed ^ hash(&name), name, uses: 0.into(), noted: 0.into() });
        if let Some(building) = building {
            building.streams.push(stream.clone());
        }
        Ok(stream)
    })?;
    crate::sharded::note_stream(&stream);
    Ok(Dropout { probability, stream })
}

impl ModuleT for Dropout {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        if !train || self.probability == 0.0 {
            return Ok(x.clone());
        }
        if !x.dtype().is_float() {
            bail!("dropout {:?}: the input is of {:?}; give floats", self.stream.name, x.dtype());
        }
        let mut random = self.stream.next()?;
        // A number of 32 bits is below this with the probability of being dropped.
        let bound = (self.probability * 2f64.powi(32)) as u32;
        let kept = 1.0 / (1.0 - self.probability);
        let factors = (0..x.elem_count()).map(|_| if random.next_u32() < bound { 0.0 } else { kept });
        // The product is in the type of the input, as are its operands.
        match x.dtype() {
            DType::F64 => dropped::<f64>(x, factors.collect()),
            _ => dropped::<f32>(x, factors.map(|factor| factor as f32).collect()),
        }
    }
}

/// Multiplies each element by its factor.
fn dropped<T: Element>(x: &Tensor, factors: Vec<T>) -> candle_core::Result<Tensor> {
    if is_fused(x) {
        return apply([&x.contiguous()?], Dropped::<T>::new(factors)?);
    }
    x * Tensor::from_vec(factors, x.shape(), x.device())?.to_dtype(x.dtype())?
}

/// The product with a factor for each element: 0 for those that are dropped.
struct Dropped<T>(Kept<T>);

impl<T: Element> Dropped<T> {
    fn new(factors: Vec<T>) -> candle_core::Result<Dropped<T>> {
        let kept = Kept::none();
        kept.set(factors)?;
        Ok(Dropped(kept))
    }
}

impl<T: Element> Operation<1> for Dropped<T> {
    const NAME: &'static str = "dropout";

    fn forward(&self, [(storage, layout)]: [Stored<'_>; 1]) -> candle_core::Result<(CpuStorage, Shape)> {
        let x = elements::<T>(storage, layout)?;
        let y = with([self.0.tensor()?], |[factors]: [&[T]; 1]| pairs::multiply(x, factors))?;
        Ok((T::to_cpu_storage_owned(y), layout.shape().clone()))
    }

    fn backward(&self, [x]: [&Tensor; 1], _: &Tensor, gradient: &Tensor) -> candle_core::Result<[Option<Tensor>; 1]> {
        let arguments = [gradient, self.0.tensor()?];
        let change = with(arguments, |[gradient, factors]: [&[T]; 2]| pairs::multiply(gradient, factors))?;
        Ok([Some(tensor(change, x)?)])
    }

    fn kept(&self) -> Option<&Tensor> {
        self.0.get()
    }
}

/// The random stream of one replica's copy of a layer.
#[derive(Debug)]
pub(crate) struct Stream {
    name: String,
    seed: u64,
    uses: AtomicU64,
    noted: AtomicU64,
}

impl Stream {
    fn next(self: &Arc<Stream>) -> candle_core::Result<impl Rng> {
        let context = get_replica_context();
        if let Some(context) = &context {
            let state: Arc<dyn Recoverable> = self.clone();
            context.recover(&state).map_err(Error::wrap)?;
        }
        let state = RandomState { seed: self.seed, uses: self.uses.fetch_add(1, Ordering::Relaxed) };
        Ok(state.generator(context.map_or(0, |context| context.replica_id())))
    }

    /// Returns the number of uses.
    pub(crate) fn uses(&self) -> u64 {
        self.uses.load(Ordering::Relaxed)
    }

    /// Continues after a number of uses.
    pub(crate) fn set_uses(&self, uses: u64) {
        self.uses.store(uses, Ordering::Relaxed);
    }
}

impl Recoverable for Stream {
    fn note(&self, _: usize) -> Result<(), RecoveryError> {
        self.noted.store(self.uses(), Ordering::Relaxed);
        Ok(())
    }

    fn take_back(&self, _: usize) -> Result<(), RecoveryError> {
        self.set_uses(self.noted.load(Ordering::Relaxed));
        Ok(())
    }
}

/// The streams of a model's layers, of all replicas of this process.
#[derive(Debug, Default)]
pub(crate) struct Streams(Vec<Arc<Stream>>);

impl Streams {
    /// Adds those of another replica.
    pub(crate) fn add(&mut self, of_replica: Vec<Arc<Stream>>) {
        self.0.extend(of_replica);
    }

    /// Returns the number of uses of each layer, by its path: equal on all replicas after a step.
    pub(crate) fn uses(&self) -> BTreeMap<&str, u64> {
        self.0.iter().map(|stream| (stream.name.as_str(), stream.uses())).collect()
    }

    /// Continues a layer after a number of uses, on all replicas.
    pub(crate) fn set_uses(&self, name: &str, uses: u64) {
        self.0.iter().filter(|stream| stream.name == name).for_each(|stream| stream.set_uses(uses));
    }
}

/// The model that is being built on this thread.
struct Building {
    seed: u64,
    streams: Vec<Arc<Stream>>,
}

thread_local! {
    static BUILDING: RefCell<Option<Building>> = const { RefCell::new(None) };
}

/// Builds a replica's model, whose layers draw from streams of this seed. Also returns these.
pub(crate) fn building<R>(seed: u64, build: impl FnOnce() -> R) -> (R, Vec<Arc<Stream>>) {
    let outer = BUILDING.replace(Some(Building { seed, streams: Vec::new() }));
    let built = build();
    (built, BUILDING.replace(outer).map(|building| building.streams).unwrap_or_default())
}
