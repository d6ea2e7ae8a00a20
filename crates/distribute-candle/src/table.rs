//! Tables of which a step looks up few rows, and whose gradients have only these.
//!
//! candle adds every gradient to zeros in the shape of the whole table. So in candle's graph a lookup is an operation
//! on a scalar, the table's gate, of which the table itself is computed as well. When backward reaches the gate, all
//! lookups and all other uses of the table have left their parts of its gradient with it.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, DType, Device, Error, Layout, Result, Shape, Storage, Tensor, Var};
use distribute_collectives::SparseRows;
use distribute_optim::backend::{Gradient, Tape};
use distribute_values::IndexedRows;
use parking_lot::Mutex;

use crate::host::{Element, Stored, by_type, elements, with};
use crate::relay::{Operation, apply};

/// The gate of a replica's copy of a variable.
#[derive(Debug)]
pub(crate) struct Gate {
    /// The scalar that the table and its lookups are computed of.
    scalar: Tensor,
    parts: Arc<Mutex<Parts>>,
    tape: Arc<Tape<Tensor>>,
}

/// The parts of a variable's gradient that a backward pass has computed.
#[derive(Debug, Default)]
struct Parts {
    /// The number of the backward pass. One that has failed may have left some.
    pass: u64,
    /// The gradient of operations on the table itself.
    whole: Option<Tensor>,
    /// The rows that were looked up, and the gradients of the results.
    rows: Vec<(Arc<[usize]>, Tensor)>,
}

thread_local! {
    /// Whether the variable that is being created on this thread needs a gate, and the gate; a `VarBuilder` has no way
    /// to carry them.
    static REQUEST: RefCell<Option<Option<Arc<Gate>>>> = const { RefCell::new(None) };
}

/// Creates a variable by `get`. Returns it with the gate that its backend has given it, if it has.
pub(crate) fn gated(get: impl FnOnce() -> Result<Tensor>) -> Result<(Tensor, Option<Arc<Gate>>)> {
    REQUEST.set(Some(None));
    let table = get();
    let gate = REQUEST.take().flatten();
    Ok((table?, gate))
}

/// Gives the variable that is being created a gate, if it needs one.
pub(crate) fn answer(gate: impl FnOnce() -> Result<Arc<Gate>>) -> Result<Option<Arc<Gate>>> {
    if REQUEST.with_borrow(Option::is_none) {
        return Ok(None);
    }
    let gate = gate()?;
    REQUEST.set(Some(Some(gate.clone())));
    Ok(Some(gate))
}

impl Gate {
    /// Creates a gate that reports the gradient of variable `index` to `tape`.
    pub(crate) fn new(index: usize, tape: &Arc<Tape<Tensor>>) -> Result<Arc<Gate>> {
        let parts: Arc<Mutex<Parts>> = Arc::default();
        let dummy = Var::zeros((), DType::F32, &Device::Cpu)?;
        let scalar = dummy.as_tensor().apply_op1(Report { index, tape: tape.clone(), parts: parts.clone() })?;
        Ok(Arc::new(Gate { scalar, parts, tape: tape.clone() }))
    }

    pub(crate) fn scalar(&self) -> &Tensor {
        &self.scalar
    }

    /// Returns rows of the table.
    pub(crate) fn select(self: &Arc<Gate>, table: &Tensor, rows: Vec<usize>) -> Result<Tensor> {
        apply([&self.scalar], LookUp { gate: self.clone(), table: table.detach(), rows: rows.into() })
    }

    /// Keeps the gradient of the table itself. Returns the scalar's.
    pub(crate) fn add_whole(&self, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.add(|parts| parts.whole = Some(gradient.clone()))
    }

    /// Adds to the parts of the backward pass in progress, if there is one. Returns the gradient of the scalar, without
    /// which candle would pass the gate over.
    fn add(&self, add: impl FnOnce(&mut Parts)) -> Result<Option<Tensor>> {
        if let Some(pass) = self.tape.pass() {
            let mut parts = self.parts.lock();
            if parts.pass != pass {
                *parts = Parts { pass, ..Parts::default() };
            }
            add(&mut parts);
        }
        Tensor::zeros((), DType::F32, &Device::Cpu).map(Some)
    }
}

/// The operation whose result is a gate's scalar, and whose backward reports the gradient.
struct Report {
    index: usize,
    tape: Arc<Tape<Tensor>>,
    parts: Arc<Mutex<Parts>>,
}

impl CustomOp1 for Report {
    fn name(&self) -> &'static str {
        "distribute-table"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        let Parts { pass, whole, rows } = std::mem::take(&mut *self.parts.lock());
        if self.tape.pass() != Some(pass) {
            return Ok(None);
        }
        let gradient = match whole {
            Some(whole) => Some(Gradient::Whole(rows.into_iter().try_fold(whole, add_rows)?)),
            None => sum(&rows)?.map(Gradient::Rows),
        };
        if let Some(gradient) = gradient {
            self.tape.report(self.index, gradient);
        }
        Ok(None)
    }
}

fn add_rows(whole: Tensor, (rows, values): (Arc<[usize]>, Tensor)) -> Result<Tensor> {
    let rows: Vec<i64> = rows.iter().map(|row| *row as i64).collect();
    let indices = Tensor::from_vec(rows, values.dim(0)?, &Device::Cpu)?;
    whole.index_add(&indices, &values.contiguous()?, 0)
}

/// Sums the gradients of each row, in the order in which backward computed them, as candle would; `None` if nothing was
/// looked up.
fn sum(parts: &[(Arc<[usize]>, Tensor)]) -> Result<Option<IndexedRows<Tensor>>> {
    fn run<T: Element + distribute_device::Element>(
        parts: &[(Arc<[usize]>, Tensor)],
        width: usize,
    ) -> Result<IndexedRows<Tensor>> {
        let mut all = SparseRows::<T>::default();
        for (rows, gradients) in parts {
            all.indices.extend(rows.iter().map(|row| *row as i64));
            with([gradients], |[gradients]: [&[T]; 1]| all.values.extend_from_slice(gradients))?;
        }
        let SparseRows { indices, values } = all.coalesced(width).map_err(Error::wrap)?;
        let rows = Tensor::from_vec(values, (indices.len(), width), &Device::Cpu)?;
        Ok(IndexedRows { indices, rows })
    }
    let Some((_, first)) = parts.first() else { return Ok(None) };
    let width = first.dim(1)?;
    by_type!(first.dtype(), run(parts, width)).map(Some)
}

/// The lookup of rows of a table.
struct LookUp {
    gate: Arc<Gate>,
    table: Tensor,
    rows: Arc<[usize]>,
}

impl Operation<1> for LookUp {
    const NAME: &'static str = "distribute-look-up";

    fn forward(&self, _: [Stored<'_>; 1]) -> Result<(CpuStorage, Shape)> {
        fn run<T: Element>((storage, layout): Stored<'_>, rows: &[usize], width: usize) -> Result<CpuStorage> {
            let table = elements::<T>(storage, layout)?;
            let mut out = Vec::with_capacity(rows.len() * width);
            for row in rows {
                let values = table.get(row * width..).and_then(|from| from.get(..width));
                let missing = || Error::Msg(format!("row {row} was looked up in a table that has fewer"));
                out.extend_from_slice(values.ok_or_else(missing)?);
            }
            Ok(T::to_cpu_storage_owned(out))
        }
        let (storage, layout) = self.table.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { candle_core::bail!("a table is not in host memory") };
        let width = self.table.dim(1)?;
        let out = by_type!(self.table.dtype(), run((storage, layout), &self.rows, width))?;
        Ok((out, Shape::from((self.rows.len(), width))))
    }

    fn backward(&self, _: [&Tensor; 1], _: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 1]> {
        Ok([self.gate.add(|parts| parts.rows.push((self.rows.clone(), gradient.clone())))?])
    }
}
