//! Running statistics of a model's layers, which write them in the middle of a forward pass.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use candle_core::{Tensor, TensorId};
use distribute_device::{BufferRef, DType, Element};
use distribute_strategy::{Recoverable, RecoveryError};
use distribute_values::TensorStorage;

use crate::{Candle, Variable};

/// The statistics of all replicas of this process, and what they were when they were last noted.
pub(crate) struct Statistics {
    variables: Vec<Statistic>,
    /// Of each replica, by variable.
    noted: Vec<Mutex<Vec<Vec<u8>>>>,
    /// Whether it was said that one was no number.
    warned: AtomicBool,
}

struct Statistic {
    name: String,
    components: Vec<Tensor>,
    /// Whether it is of the examples of all replicas together, so that one without examples has it, too.
    is_common: bool,
}

thread_local! {
    /// What layers that are being built on this thread keep of the examples of all replicas.
    static COMMON: RefCell<Vec<TensorId>> = const { RefCell::new(Vec::new()) };
}

/// Says that a layer which is being built computes these from the examples of all replicas.
pub(crate) fn keeps_common(statistics: [&Tensor; 2]) {
    COMMON.with_borrow_mut(|common| common.extend(statistics.map(Tensor::id)));
}

/// Builds a model; the statistics that its layers keep of the examples of all replicas.
pub(crate) fn building<R>(build: impl FnOnce() -> R) -> (R, Vec<TensorId>) {
    let outer = COMMON.take();
    let built = build();
    (built, COMMON.replace(outer))
}

impl Statistics {
    /// Those among a model's variables; `None` where there are none.
    pub(crate) fn of(variables: &[Variable], common: &[TensorId], replicas: usize) -> Option<Statistics> {
        let held = |variable: &Variable| Statistic {
            name: variable.name.clone(),
            components: variable.components.iter().map(Tensor::detach).collect(),
            is_common: variable.components.iter().any(|component| common.contains(&component.id())),
        };
        let variables: Vec<_> = variables.iter().filter(|variable| variable.statistic).map(held).collect();
        let noted = (0..replicas).map(|_| Mutex::default()).collect();
        (!variables.is_empty()).then(|| Statistics { variables, noted, warned: AtomicBool::new(false) })
    }

    fn lock(&self, local: usize) -> std::sync::MutexGuard<'_, Vec<Vec<u8>>> {
        self.noted[local].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(component: &Tensor, bytes: &[u8]) -> Result<(), RecoveryError> {
        TensorStorage::<Candle>::write(component, &mut |mut buffer| {
            let target = buffer.as_bytes_mut();
            if target.len() == bytes.len() {
                target.copy_from_slice(bytes);
            }
        })?;
        Ok(())
    }
}

impl Recoverable for Statistics {
    fn note(&self, local: usize) -> Result<(), RecoveryError> {
        let mut noted = self.lock(local);
        noted.resize(self.variables.len(), Vec::new());
        for (statistic, noted) in self.variables.iter().zip(noted.iter_mut()) {
            noted.clear();
            TensorStorage::<Candle>::read(&statistic.components[local], &mut |buffer| {
                noted.extend_from_slice(buffer.as_bytes())
            })?;
        }
        Ok(())
    }

    fn take_back(&self, local: usize) -> Result<(), RecoveryError> {
        let noted = self.lock(local);
        self.variables
            .iter()
            .zip(noted.iter())
            .try_for_each(|(statistic, noted)| Statistics::write(&statistic.components[local], noted))
    }

    /// A statistic that a batch has left without a finite value keeps the one before: candle's `batch_norm` divides by the
    /// number of rows less one.
    fn commit(&self, local: usize, has_examples: bool) -> Result<(), RecoveryError> {
        let mut noted = self.lock(local);
        for (Statistic { name, components, is_common }, noted) in self.variables.iter().zip(noted.iter_mut()) {
            if !has_examples && !is_common {
                Statistics::write(&components[local], noted)?;
                continue;
            }
            let mut before = std::mem::take(noted);
            let mut is_finite = true;
            TensorStorage::<Candle>::read(&components[local], &mut |buffer| {
                is_finite = finite(&buffer);
                noted.extend_from_slice(buffer.as_bytes());
            })?;
            if is_finite || before.len() != noted.len() {
                continue;
            }
            Statistics::write(&components[local], &before)?;
            std::mem::swap(noted, &mut before);
            if !self.warned.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    "{name} of a replica became NaN or infinite and keeps its value before: candle's batch_norm has no \
                     variance for a batch of one row; make batches that leave every replica two rows, or use \
                     sync_batch_norm"
                );
            }
        }
        Ok(())
    }
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
