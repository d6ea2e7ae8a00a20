//! A shard: some rows of a variable, with the optimizer's slots.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use distribute_device::{DType, HostBuffer};
use distribute_rules::OptimizerDescription;
use distribute_values::Scatter;
use parking_lot::{Mutex, MutexGuard};
use tonic::Status;

use super::answer::Answer;
use super::tokens::Tokens;
use crate::numbers::{self, Float};
use crate::wire::proto::{AssignRequest, CreateShard, Elements, Origin, Wanted};
use crate::wire::{MAX_PAYLOAD_BYTES, Parts};

/// A shard. Its description never changes.
#[derive(Debug)]
pub(super) struct Shard {
    /// The description, without a payload.
    pub(super) about: CreateShard,
    pub(super) dtype: DType,
    /// Number of elements of a row; 1 for a scalar.
    row_len: usize,
    versions: Arc<AtomicU64>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Shared with replies that are still being sent, in which case a change is made to a copy.
    elements: Arc<HostBuffer>,
    /// The previous copy, to be reused.
    spare: Option<Arc<HostBuffer>>,
    /// From the store's counter, so that no other elements of this number ever have it, also if it is created again.
    version: u64,
    slots: Vec<(&'static str, HostBuffer)>,
    tokens: Tokens,
}

/// Keeps elements alive while they are being sent.
struct Sent(Arc<HostBuffer>);

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// A gradient of a shard.
#[derive(Clone, Debug)]
pub(super) struct Gradient {
    pub(super) dtype: DType,
    /// Ascending; `None` for all.
    pub(super) rows: Option<Vec<u64>>,
    pub(super) payload: Bytes,
}

/// The size of a shard, computed from a valid description.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    dtype: DType,
    /// Number of elements of a row; 1 for a scalar.
    row_len: usize,
    pub(crate) len_bytes: usize,
}

impl Extent {
    /// Computes the size of a described shard.
    ///
    /// # Errors
    /// `invalid_argument` for an unknown type, rows outside the variable, or more bytes than can be addressed.
    pub(crate) fn of(about: &CreateShard) -> Result<Extent, Status> {
        let name = &about.variable;
        let dtype = numbers::dtype(about.dtype).ok_or_else(|| invalid(format!("{name}: an unknown data type")))?;
        let variable_rows = about.shape.first().copied().unwrap_or(1);
        if about.first_row.checked_add(about.rows).is_none_or(|end| end > variable_rows) {
            let (first, rows) = (about.first_row, about.rows);
            return Err(invalid(format!("{name}: {rows} rows from row {first} on, where it has {variable_rows}")));
        }
        let product = |numbers: &[u64]| numbers.iter().try_fold(1u64, |product, number| product.checked_mul(*number));
        let row_len = product(about.shape.get(1..).unwrap_or_default());
        let size = |row_len: u64| product(&[about.rows, row_len, dtype.size_bytes() as u64]);
        let sizes = row_len.and_then(|row_len| Some((row_len.try_into().ok()?, isize::try_from(size(row_len)?).ok()?)));
        let (row_len, len_bytes) = sizes.ok_or_else(|| invalid(format!("{name}: it is larger than any memory")))?;
        Ok(Extent { dtype, row_len, len_bytes: len_bytes.unsigned_abs() })
    }

    fn check_payload(&self, name: &str, payload: &Parts) -> Result<(), Status> {
        let (given, expected) = (payload.len(), self.len_bytes);
        if given == expected {
            return Ok(());
        }
        Err(invalid(format!("{name}: {given} bytes arrived, where {expected} are expected")))
    }
}

impl Shard {
    /// Creates the shard from its elements. `versions` is the last version of any shard of the store.
    pub(super) fn new(about: CreateShard, payload: Parts, versions: &Arc<AtomicU64>) -> Result<Shard, Status> {
        let extent = Extent::of(&about)?;
        extent.check_payload(&about.variable, &payload)?;
        // Allocates as many bytes as have arrived.
        let mut elements =
            HostBuffer::zeroed(extent.len_bytes).map_err(|error| Status::resource_exhausted(error.to_string()))?;
        if !payload.copy_to(elements.as_bytes_mut()) {
            return Err(Status::internal("a payload has changed its length"));
        }
        let state = State {
            elements: Arc::new(elements),
            spare: None,
            version: next(versions),
            slots: Vec::new(),
            tokens: Tokens::default(),
        };
        let (dtype, row_len, versions) = (extent.dtype, extent.row_len, versions.clone());
        Ok(Shard { about, dtype, row_len, versions, state: Mutex::new(state) })
    }

    /// Forgets the changes of closures of an earlier coordinator, and keeps those of steps.
    pub(super) fn keep_steps(&self) {
        self.lock().tokens.keep_steps();
    }

    /// Creates the slots of an optimizer that do not exist yet.
    pub(super) fn make_slots(&self, optimizer: &OptimizerDescription) -> Result<(), Status> {
        let mut state = self.lock();
        for slot in optimizer.rule.slots() {
            if state.slots.iter().any(|(name, _)| name == slot) {
                continue;
            }
            let len_bytes = state.elements.len_bytes();
            let mut buffer = HostBuffer::zeroed(len_bytes).map_err(internal)?;
            let initial = optimizer.rule.initial(slot);
            if initial != 0.0 {
                match self.dtype {
                    DType::F64 => buffer.as_mut_slice::<f64>().map_err(internal)?.fill(initial),
                    _ => buffer.as_mut_slice::<f32>().map_err(internal)?.fill(initial as f32),
                }
            }
            state.slots.push((slot, buffer));
        }
        Ok(())
    }

    /// Sets the elements of a slot.
    pub(super) fn set_slot(&self, slot: &str, payload: Parts) -> Result<(), Status> {
        let mut state = self.lock();
        let found = state.slots.iter_mut().find(|(name, _)| *name == slot);
        let (_, buffer) = found.ok_or_else(|| self.no_slot(slot))?;
        let given = payload.len();
        if !payload.copy_to(buffer.as_bytes_mut()) {
            return Err(invalid(format!("{}/{slot}: {given} bytes do not fit", self.about.variable)));
        }
        Ok(())
    }

    /// Returns the size of the requested rows, which are copied for this caller; `None` if it requests all rows.
    pub(super) fn picked_bytes(&self, wanted: &Wanted) -> Option<u64> {
        let rows = (wanted.rows.len() / size_of::<u64>()) as u64;
        (rows > 0).then(|| rows.saturating_mul(self.row_bytes() as u64))
    }

    /// Answers a request; `None` if the caller has this version already.
    pub(super) fn pull(
        &self,
        wanted: &Wanted,
        same_server: bool,
        wire: Option<DType>,
    ) -> Result<Option<Answer>, Status> {
        let rows = if wanted.rows.is_empty() { None } else { Some(self.rows(&wanted.rows)?) };
        let state = self.lock();
        if same_server && wanted.version == state.version && rows.is_none() && wanted.slot.is_empty() {
            return Ok(None);
        }
        let source = match wanted.slot.as_str() {
            "" => Bytes::from_owner(Sent(state.elements.clone())),
            slot => {
                let (_, slot) = state.slots.iter().find(|(name, _)| *name == slot).ok_or_else(|| self.no_slot(slot))?;
                Bytes::copy_from_slice(slot.as_bytes())
            }
        };
        let row_bytes = self.row_bytes();
        let len_bytes = match &rows {
            None => Some(source.len()),
            Some(rows) => rows.len().checked_mul(row_bytes),
        };
        let len_bytes = len_bytes.ok_or_else(|| invalid(format!("{}: too many rows", self.about.variable)))?;
        let (shard, version, slot) = (self.about.shard, state.version, wanted.slot.clone());
        let about = Elements { shard, version, slot, ..Elements::default() };
        Ok(Some(Answer::new(about, (self.dtype, wire), source, rows, (row_bytes, len_bytes))))
    }

    /// Changes elements, unless this change was made before.
    pub(super) fn assign(&self, request: &AssignRequest, payload: &[u8]) -> Result<(), Status> {
        let origin = request.origin.as_ref().ok_or_else(|| invalid("an assignment without origin"))?;
        if request.dtype != u32::from(self.dtype.code()) {
            return Err(invalid(format!("{} holds elements of {}; give the same", self.about.variable, self.dtype)));
        }
        let scatter = scatter_of(request.operation).ok_or_else(|| invalid("an unknown operation"))?;
        let rows = request.rows.as_ref().map(|rows| self.rows(rows)).transpose()?;
        self.check_count(rows.as_deref(), payload.len(), self.dtype)?;
        if scatter == Scatter::Div && numbers::has_integer_zero(payload, self.dtype) {
            let name = &self.about.variable;
            return Err(invalid(format!("{name}: a row of whole numbers to divide by has a zero; give others")));
        }
        let part = request.part;
        // Copied because the payload may be unaligned; allocates as many bytes as have arrived.
        let aligned = HostBuffer::from_slice(payload).map_err(internal)?;
        let mut state = self.lock();
        if state.tokens.find(origin, part).is_some() {
            return Ok(());
        }
        let target = state.owned_elements()?.view_mut(self.dtype).map_err(internal)?;
        let values = aligned.view(self.dtype).map_err(internal)?;
        let outcome = match rows {
            Some(rows) => scatter.apply(target, self.row_len, rows.iter().map(|row| *row as usize), values),
            None => scatter.apply(target, values.len(), [0], values),
        };
        outcome.map_err(internal)?;
        state.version = next(&self.versions);
        state.tokens.note(origin, part, 0);
        Ok(())
    }

    /// Returns the maximum size of a gradient or of values to assign: that of all rows in the widest type, or of one
    /// message.
    pub(super) fn most_bytes(&self) -> usize {
        let elements = (self.about.rows as usize).saturating_mul(self.row_len);
        elements.saturating_mul(size_of::<u64>()).max(MAX_PAYLOAD_BYTES)
    }

    /// Makes one step of an optimizer, unless this change was made before.
    pub(super) fn step(
        &self,
        origin: &Origin,
        optimizer: &OptimizerDescription,
        step: u64,
        gradient: &Gradient,
    ) -> Result<(), Status> {
        let mut state = self.lock();
        if state.tokens.find(origin, 0).is_some() {
            return Ok(());
        }
        match self.dtype {
            DType::F32 => self.step_as::<f32>(&mut state, optimizer, step, gradient)?,
            DType::F64 => self.step_as::<f64>(&mut state, optimizer, step, gradient)?,
            other => return Err(invalid(format!("{} is of {other} and cannot be trained", self.about.variable))),
        }
        state.version = next(&self.versions);
        state.tokens.note(origin, 0, 0);
        Ok(())
    }

    fn step_as<T: Float>(
        &self,
        state: &mut State,
        optimizer: &OptimizerDescription,
        step: u64,
        gradient: &Gradient,
    ) -> Result<(), Status> {
        let values = self.values::<T>(gradient)?;
        let (rule, learning_rate) = (optimizer.rule, optimizer.learning_rate);
        state.owned_elements()?;
        let State { elements, slots, .. } = state;
        // `owned_elements` has made this the only reference.
        let elements = Arc::get_mut(elements).ok_or_else(|| Status::internal("elements are shared"))?;
        let parameter = elements.as_mut_slice::<T>().map_err(internal)?;
        // In the rule's order: another optimizer may have created some of them before.
        let mut memory = BTreeMap::new();
        for (name, slot) in slots {
            if let Some(place) = rule.slots().iter().position(|of_rule| of_rule == name) {
                memory.insert(place, slot.as_mut_slice::<T>().map_err(internal)?);
            }
        }
        let mut memory: Vec<&mut [T]> = memory.into_values().collect();
        if memory.len() != rule.slots().len() {
            return Err(self.no_slot(&rule.slots().join(", ")));
        }
        match &gradient.rows {
            None => rule.update(step, learning_rate, parameter, &values, &mut memory),
            Some(rows) => {
                let len = self.row_len.max(1);
                for (row, values) in rows.iter().zip(values.chunks_exact(len)) {
                    let range = *row as usize * len..(*row as usize + 1) * len;
                    let mut slots: Vec<&mut [T]> = memory.iter_mut().map(|slot| &mut slot[range.clone()]).collect();
                    rule.update(step, learning_rate, &mut parameter[range.clone()], values, &mut slots);
                }
            }
        }
        Ok(())
    }

    /// Returns a gradient's elements, after checking their number.
    pub(super) fn values<'a, T: Float>(&self, gradient: &'a Gradient) -> Result<std::borrow::Cow<'a, [T]>, Status> {
        let (name, rows) = (&self.about.variable, gradient.rows.as_deref());
        if let Some(row) = rows.and_then(<[u64]>::last).filter(|row| **row >= self.about.rows) {
            return Err(self.no_row(*row));
        }
        // Checked before the conversion allocates memory.
        self.check_count(rows, gradient.payload.len(), gradient.dtype)?;
        numbers::read::<T>(&gradient.payload, gradient.dtype).ok_or_else(|| {
            invalid(format!("{name}: a gradient of {} is not a gradient of {}", gradient.dtype, T::DTYPE))
        })
    }

    /// Checks that the number of bytes is that of those rows, or of all rows.
    fn check_count(&self, rows: Option<&[u64]>, given: usize, dtype: DType) -> Result<(), Status> {
        let count = rows.map_or(self.about.rows as usize, <[u64]>::len);
        let expected = count.checked_mul(self.row_len).and_then(|elements| elements.checked_mul(dtype.size_bytes()));
        if expected == Some(given) {
            return Ok(());
        }
        let (name, expected) = (&self.about.variable, expected.unwrap_or(usize::MAX));
        Err(invalid(format!("{name}: {given} bytes are given and {expected} expected, for {count} rows of {dtype}")))
    }

    /// Returns row numbers, which must be ascending and inside the shard.
    pub(super) fn rising_rows(&self, bytes: &[u8]) -> Result<Vec<u64>, Status> {
        let rows = self.rows(bytes)?;
        if rows.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(invalid("rows of a gradient must rise"));
        }
        Ok(rows)
    }

    fn rows(&self, bytes: &[u8]) -> Result<Vec<u64>, Status> {
        let rows = numbers::rows(bytes).ok_or_else(|| invalid("rows are not numbers"))?;
        match rows.iter().find(|row| **row >= self.about.rows) {
            Some(row) => Err(self.no_row(*row)),
            None => Ok(rows),
        }
    }

    pub(super) fn row_len(&self) -> usize {
        self.row_len
    }

    fn row_bytes(&self) -> usize {
        // At most the size of the shard, unless it has no rows.
        self.row_len.saturating_mul(self.dtype.size_bytes())
    }

    fn no_row(&self, row: u64) -> Status {
        invalid(format!("{}: there is no row {row}, for the shard has {}", self.about.variable, self.about.rows))
    }

    fn no_slot(&self, slot: &str) -> Status {
        invalid(format!("{} has no slot {slot:?}", self.about.variable))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    /// Returns the elements, copied first if they are shared.
    fn owned_elements(&mut self) -> Result<&mut HostBuffer, Status> {
        if Arc::get_mut(&mut self.elements).is_none() {
            let mut spare = self.spare.take().filter(|spare| Arc::strong_count(spare) == 1);
            let copy = match spare.as_mut().and_then(Arc::get_mut) {
                Some(memory) => {
                    memory.as_bytes_mut().copy_from_slice(self.elements.as_bytes());
                    None
                }
                None => Some(Arc::new(HostBuffer::from_slice(self.elements.as_bytes()).map_err(internal)?)),
            };
            if let Some(copy) = copy.or(spare) {
                self.spare = Some(std::mem::replace(&mut self.elements, copy));
            }
        }
        Arc::get_mut(&mut self.elements).ok_or_else(|| Status::internal("elements are shared"))
    }
}

/// Returns a version that no shard of the store has had.
fn next(versions: &AtomicU64) -> u64 {
    versions.fetch_add(1, Ordering::Relaxed) + 1
}

/// Returns the operation with a number.
fn scatter_of(operation: u32) -> Option<Scatter> {
    Some(match operation {
        0 => Scatter::Update,
        1 => Scatter::Add,
        2 => Scatter::Sub,
        3 => Scatter::Min,
        4 => Scatter::Max,
        5 => Scatter::Mul,
        6 => Scatter::Div,
        _ => return None,
    })
}

/// Returns the number of an operation.
pub(crate) fn operation_of(scatter: Scatter) -> u32 {
    match scatter {
        Scatter::Update => 0,
        Scatter::Add => 1,
        Scatter::Sub => 2,
        Scatter::Min => 3,
        Scatter::Max => 4,
        Scatter::Mul => 5,
        Scatter::Div => 6,
    }
}

pub(super) fn invalid(problem: impl Into<String>) -> Status {
    Status::invalid_argument(problem)
}

pub(super) fn internal(error: impl std::fmt::Display) -> Status {
    Status::internal(error.to_string())
}
