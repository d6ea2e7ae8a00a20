//! Some rows of a variable, with what optimizers keep for them.

use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use distribute_device::{BufferRef, DType, HostBuffer};
use distribute_values::{OptimizerDescription, Scatter};
use tonic::Status;

use super::tokens::Tokens;
use crate::lock::lock;
use crate::numbers::{self, Float};
use crate::wire::proto::{AssignRequest, CreateShard, Elements, Origin, Wanted};

/// A shard. Its description never changes.
#[derive(Debug)]
pub(super) struct Shard {
    /// Without its payload.
    pub(super) about: CreateShard,
    pub(super) dtype: DType,
    /// Elements of a row; of a scalar, its one.
    row_len: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Shared with replies that are still being sent: a change then goes to a copy.
    elements: Arc<HostBuffer>,
    /// The copy before this one, to be used again.
    spare: Option<Arc<HostBuffer>>,
    /// Counts changes, from 1.
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
    /// Rising; absent: all.
    pub(super) rows: Option<Vec<u64>>,
    pub(super) payload: Bytes,
}

impl Shard {
    /// Makes it, from the elements in the payload, or zeroed.
    pub(super) fn new(mut about: CreateShard) -> Result<Shard, Status> {
        let payload = std::mem::take(&mut about.payload);
        let dtype = numbers::dtype(about.dtype).ok_or_else(|| invalid("an unknown data type"))?;
        let row_len: u64 = about.shape.iter().skip(1).product();
        let len_bytes = about.rows.saturating_mul(row_len).saturating_mul(dtype.size_bytes() as u64) as usize;
        let mut elements =
            HostBuffer::zeroed(len_bytes).map_err(|error| Status::resource_exhausted(error.to_string()))?;
        if !payload.is_empty() && !numbers::copy_into(&payload, dtype, elements.as_bytes_mut(), dtype) {
            let name = &about.variable;
            return Err(invalid(format!("{name}: {} bytes, where {len_bytes} are expected", payload.len())));
        }
        let state = State {
            elements: Arc::new(elements),
            spare: None,
            version: 1,
            slots: Vec::new(),
            tokens: Tokens::default(),
        };
        Ok(Shard { about, dtype, row_len: row_len as usize, state: Mutex::new(state) })
    }

    /// Makes the slots of an optimizer that it does not have yet.
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
    pub(super) fn set_slot(&self, slot: &str, payload: &[u8]) -> Result<(), Status> {
        let mut state = self.lock();
        let found = state.slots.iter_mut().find(|(name, _)| *name == slot);
        let (_, buffer) = found.ok_or_else(|| self.no_slot(slot))?;
        if !numbers::copy_into(payload, self.dtype, buffer.as_bytes_mut(), self.dtype) {
            return Err(invalid(format!("{}/{slot}: {} bytes do not fit", self.about.variable, payload.len())));
        }
        Ok(())
    }

    /// What a caller wants of it; `None` where it has that version already.
    pub(super) fn pull(
        &self,
        wanted: &Wanted,
        same_server: bool,
        wire: Option<DType>,
    ) -> Result<Option<Elements>, Status> {
        let state = self.lock();
        if same_server && wanted.version == state.version && wanted.rows.is_empty() && wanted.slot.is_empty() {
            return Ok(None);
        }
        let source = match wanted.slot.as_str() {
            "" => &*state.elements,
            slot => &state.slots.iter().find(|(name, _)| *name == slot).ok_or_else(|| self.no_slot(slot))?.1,
        };
        let rows = if wanted.rows.is_empty() { None } else { Some(self.rows(&wanted.rows)?) };
        let (dtype, payload) = match rows {
            Some(rows) => {
                let row_bytes = self.row_len * self.dtype.size_bytes();
                let bytes = source.as_bytes();
                let mut picked = Vec::with_capacity(rows.len() * row_bytes);
                rows.iter().for_each(|row| {
                    let start = *row as usize * row_bytes;
                    picked.extend_from_slice(&bytes[start..start + row_bytes]);
                });
                self.on_wire(&picked, wire).unwrap_or_else(|| (self.dtype, Bytes::from(picked)))
            }
            None => match self.on_wire(source.as_bytes(), wire) {
                Some(converted) => converted,
                None if wanted.slot.is_empty() => (self.dtype, Bytes::from_owner(Sent(state.elements.clone()))),
                None => (self.dtype, Bytes::copy_from_slice(source.as_bytes())),
            },
        };
        let (version, dtype, slot) = (state.version, u32::from(dtype.code()), wanted.slot.clone());
        Ok(Some(Elements { shard: self.about.shard, version, dtype, slot, payload, incarnation: 0 }))
    }

    /// Changes elements as asked for, unless that was done before.
    pub(super) fn assign(&self, origin: &Origin, request: &AssignRequest) -> Result<(), Status> {
        if request.dtype != u32::from(self.dtype.code()) {
            return Err(invalid(format!("{} holds elements of {}; give the same", self.about.variable, self.dtype)));
        }
        let scatter = scatter_of(request.operation).ok_or_else(|| invalid("an unknown operation"))?;
        let rows = request.rows.as_ref().map(|rows| self.rows(rows)).transpose()?;
        let row_bytes = self.row_len * self.dtype.size_bytes();
        let count = rows.as_ref().map_or(self.about.rows as usize, Vec::len);
        if request.payload.len() != count * row_bytes {
            let (name, given, expected) = (&self.about.variable, request.payload.len(), count * row_bytes);
            return Err(invalid(format!("{name}: {given} bytes are given and {expected} expected")));
        }
        let mut aligned = HostBuffer::zeroed(request.payload.len()).map_err(internal)?;
        aligned.as_bytes_mut().copy_from_slice(&request.payload);
        let mut state = self.lock();
        if state.tokens.find(origin).is_some() {
            return Ok(());
        }
        let target = state.owned_elements()?.view_mut(self.dtype).map_err(internal)?;
        let values = aligned.view(self.dtype).map_err(internal)?;
        let outcome = match rows {
            Some(rows) => scatter.apply(target, self.row_len, rows.iter().map(|row| *row as usize), values),
            None => scatter.apply(target, values.len(), [0], values),
        };
        outcome.map_err(internal)?;
        state.version += 1;
        state.tokens.note(origin, 0);
        Ok(())
    }

    /// One step of an optimizer, unless this change was made before.
    pub(super) fn step(
        &self,
        origin: &Origin,
        optimizer: &OptimizerDescription,
        step: u64,
        gradient: &Gradient,
    ) -> Result<(), Status> {
        let mut state = self.lock();
        if state.tokens.find(origin).is_some() {
            return Ok(());
        }
        match self.dtype {
            DType::F32 => self.step_as::<f32>(&mut state, optimizer, step, gradient)?,
            DType::F64 => self.step_as::<f64>(&mut state, optimizer, step, gradient)?,
            other => return Err(invalid(format!("{} is of {other} and cannot be trained", self.about.variable))),
        }
        state.version += 1;
        state.tokens.note(origin, 0);
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
        // `owned_elements` has made it this shard's alone.
        let elements = Arc::get_mut(elements).ok_or_else(|| Status::internal("elements are shared"))?;
        let parameter = elements.as_mut_slice::<T>().map_err(internal)?;
        // In the order in which the rule names them, which is that in which they were made.
        let named = slots.iter_mut().filter(|(name, _)| rule.slots().contains(name));
        let mut memory: Vec<&mut [T]> =
            named.map(|(_, slot)| slot.as_mut_slice::<T>()).collect::<Result<_, _>>().map_err(internal)?;
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

    /// A gradient's elements, once their number is as it should be.
    pub(super) fn values<'a, T: Float>(&self, gradient: &'a Gradient) -> Result<std::borrow::Cow<'a, [T]>, Status> {
        let name = &self.about.variable;
        let values = numbers::read::<T>(&gradient.payload, gradient.dtype).ok_or_else(|| {
            invalid(format!("{name}: a gradient of {} is no gradient of {}", gradient.dtype, T::DTYPE))
        })?;
        let count = gradient.rows.as_ref().map_or(self.about.rows as usize, Vec::len);
        if values.len() != count * self.row_len {
            let (given, expected) = (values.len(), count * self.row_len);
            return Err(invalid(format!("{name}: a gradient of {given} elements, where {expected} are expected")));
        }
        Ok(values)
    }

    /// Row numbers, once they are rising and inside the shard.
    pub(super) fn rising_rows(&self, bytes: &[u8]) -> Result<Vec<u64>, Status> {
        let rows = self.rows(bytes)?;
        if rows.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(invalid("rows of a gradient must rise"));
        }
        Ok(rows)
    }

    fn rows(&self, bytes: &[u8]) -> Result<Vec<u64>, Status> {
        let rows = numbers::rows(bytes).ok_or_else(|| invalid("rows are no numbers"))?;
        match rows.iter().find(|row| **row >= self.about.rows) {
            Some(row) => Err(invalid(format!("{}: there is no row {row}", self.about.variable))),
            None => Ok(rows),
        }
    }

    pub(super) fn row_len(&self) -> usize {
        self.row_len
    }

    fn on_wire(&self, bytes: &[u8], wire: Option<DType>) -> Option<(DType, Bytes)> {
        wire?;
        match BufferRef::from_bytes(self.dtype, bytes) {
            Ok(elements) => numbers::to_wire(elements, wire),
            // Rows that were picked lie at any address.
            Err(_) => numbers::to_wire(HostBuffer::from_slice(bytes).ok()?.view(self.dtype).ok()?, wire),
        }
    }

    fn no_slot(&self, slot: &str) -> Status {
        invalid(format!("{} has no slot {slot:?}", self.about.variable))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    /// The elements, once nobody else has them.
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

/// What an assignment's number means.
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

/// The number of an assignment.
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
