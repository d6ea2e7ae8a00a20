//! Running statistics of a model's layers, which write them during the forward pass.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Tensor, TensorId};
use distribute_device::{BufferRef, DType, Element};
use distribute_strategy::{Recoverable, RecoveryError};
use distribute_values::{TensorStorage, with_storage};
use parking_lot::Mutex;

use crate::{Candle, Variable};

/// The statistics of all replicas of this process, and a snapshot of them for failed runs.
pub(crate) struct Statistics {
    variables: Vec<Statistic>,
    /// Each replica's snapshots.
    saved: Vec<Mutex<Saved>>,
    /// Whether a warning has reported a statistic that is not finite.
    warned: AtomicBool,
}

struct Statistic {
    name: String,
    components: Vec<Tensor>,
    /// Whether it is computed from all replicas' examples, so that replicas without examples have it too.
    is_common: bool,
}

/// A replica's snapshots, by variable.
#[derive(Default)]
struct Saved {
    /// The values that a failure restores; empty before the first run.
    before: Vec<Noted>,
    /// The values before a batch without examples that began within a run; empty if there is none.
    before_batch: Vec<Noted>,
}

/// The saved value of a statistic.
#[derive(Clone)]
enum Noted {
    /// A value on the CPU.
    Bytes(Vec<u8>),
    /// A value on another device, where a copy does not block and a read would.
    Copy(Tensor),
}

impl Noted {
    fn of(component: &Tensor) -> Result<Noted, RecoveryError> {
        if !component.device().is_cpu() {
            return Ok(Noted::Copy(component.copy()?));
        }
        let mut bytes = Vec::new();
        TensorStorage::<Candle>::read(component, &mut |buffer| bytes.extend_from_slice(buffer.as_bytes()))?;
        Ok(Noted::Bytes(bytes))
    }

    fn put_back(&self, component: &Tensor) -> Result<(), RecoveryError> {
        match self {
            Noted::Bytes(bytes) => TensorStorage::<Candle>::write(component, &mut |mut buffer| {
                let target = buffer.as_bytes_mut();
                if target.len() == bytes.len() {
                    target.copy_from_slice(bytes);
                }
            })?,
            Noted::Copy(copy) => {
                with_storage::<Candle, Tensor>(&[component.clone(), copy.clone()], &mut |buffers| {
                    if let [component, copy] = buffers {
                        component.as_bytes_mut().copy_from_slice(copy.as_bytes());
                    }
                })?;
            }
        }
        Ok(())
    }
}

thread_local! {
    /// The statistics over all replicas' examples of the layers that are being built on this thread.
    static COMMON: RefCell<Vec<TensorId>> = const { RefCell::new(Vec::new()) };
}

/// Registers statistics that a layer under construction computes from all replicas' examples.
pub(crate) fn keeps_common(statistics: [&Tensor; 2]) {
    COMMON.with_borrow_mut(|common| common.extend(statistics.map(Tensor::id)));
}

/// Builds a model. Also returns the statistics that its layers compute from all replicas' examples.
pub(crate) fn building<R>(build: impl FnOnce() -> R) -> (R, Vec<TensorId>) {
    let outer = COMMON.take();
    let built = build();
    (built, COMMON.replace(outer))
}

impl Statistics {
    /// Collects the statistics among a model's variables; `None` if it has none.
    pub(crate) fn of(variables: &[Variable], common: &[TensorId], replicas: usize) -> Option<Statistics> {
        let held = |variable: &Variable| Statistic {
            name: variable.name().to_owned(),
            components: variable.components().iter().map(Tensor::detach).collect(),
            is_common: variable.components().iter().any(|component| common.contains(&component.id())),
        };
        let variables: Vec<_> = variables.iter().filter(|variable| variable.is_statistic()).map(held).collect();
        let saved = (0..replicas).map(|_| Mutex::default()).collect();
        (!variables.is_empty()).then(|| Statistics { variables, saved, warned: AtomicBool::new(false) })
    }

    /// Copies a replica's present statistics.
    fn noted(&self, local: usize) -> Result<Vec<Noted>, RecoveryError> {
        self.variables.iter().map(|statistic| Noted::of(&statistic.components[local])).collect()
    }

    fn lock(&self, local: usize) -> parking_lot::MutexGuard<'_, Saved> {
        self.saved[local].lock()
    }

    fn warn(&self, name: &str) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{name} of a replica became NaN or infinite and keeps its value before: candle's batch_norm has no \
                 variance for a batch of one row; make batches that leave every replica two rows, or use \
                 sync_batch_norm"
            );
        }
    }
}

impl Saved {
    /// Undoes what a batch without examples has changed in the statistics of a replica's own examples.
    fn undo_batch(&mut self, variables: &[Statistic], local: usize) -> Result<(), RecoveryError> {
        let batch = std::mem::take(&mut self.before_batch);
        let before = if batch.is_empty() { &self.before } else { &batch };
        let own = variables.iter().zip(before).filter(|(statistic, _)| !statistic.is_common);
        own.into_iter().try_for_each(|(statistic, noted)| noted.put_back(&statistic.components[local]))
    }
}

impl Recoverable for Statistics {
    fn note(&self, local: usize) -> Result<(), RecoveryError> {
        *self.lock(local) = Saved { before: self.noted(local)?, before_batch: Vec::new() };
        Ok(())
    }

    fn take_back(&self, local: usize) -> Result<(), RecoveryError> {
        let saved = self.lock(local);
        self.variables
            .iter()
            .zip(&saved.before)
            .try_for_each(|(statistic, noted)| noted.put_back(&statistic.components[local]))
    }

    fn begin_batch(&self, local: usize, had_examples: bool, has_examples: bool) -> Result<(), RecoveryError> {
        let mut saved = self.lock(local);
        if !had_examples {
            saved.undo_batch(&self.variables, local)?;
        }
        saved.before_batch = if has_examples { Vec::new() } else { self.noted(local)? };
        Ok(())
    }

    /// Restores a statistic that a batch has made NaN or infinite: candle's `batch_norm` divides by the number of rows
    /// minus one.
    fn commit(&self, local: usize, has_examples: bool) -> Result<(), RecoveryError> {
        let mut saved = self.lock(local);
        if !has_examples {
            saved.undo_batch(&self.variables, local)?;
        }
        saved.before_batch.clear();
        for (Statistic { name, components, .. }, noted) in self.variables.iter().zip(&mut saved.before) {
            let component = &components[local];
            if component.device().is_cpu() && !is_finite(component)? {
                noted.put_back(component)?;
                self.warn(name);
            } else {
                *noted = Noted::of(component)?;
            }
        }
        Ok(())
    }
}

fn is_finite(component: &Tensor) -> Result<bool, RecoveryError> {
    let mut all_finite = true;
    TensorStorage::<Candle>::read(component, &mut |buffer| all_finite = finite(&buffer))?;
    Ok(all_finite)
}

fn finite(buffer: &BufferRef<'_>) -> bool {
    fn all<T: Element>(buffer: &BufferRef<'_>, is_finite: impl Fn(T) -> bool) -> bool {
        buffer.as_slice::<T>().map_or(true, |all| all.iter().all(|value| is_finite(*value)))
    }
    match buffer.dtype() {
        DType::F32 => all(buffer, f32::is_finite),
        DType::F64 => all(buffer, f64::is_finite),
        DType::F16 => all(buffer, distribute_device::f16::is_finite),
        DType::BF16 => all(buffer, distribute_device::bf16::is_finite),
        _ => true,
    }
}
