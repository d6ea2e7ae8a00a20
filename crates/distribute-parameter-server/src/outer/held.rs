//! A fragment as islands send and get it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use distribute_cluster::{Task, printable};
use distribute_device::DType;
use distribute_strategy::Int8Blocks;
use parking_lot::Mutex;
use tonic::Status;

use super::fragment::{OuterFragment, Rules, Unfit};
use crate::numbers;
use crate::wire::Parts;
use crate::wire::proto::{Changes, OuterVariable};

/// A fragment of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Kept {
    pub(crate) variables: Vec<(String, u64)>,
    pub(crate) values: Vec<f32>,
    /// Empty if there is none.
    pub(crate) momentum: Vec<f32>,
    pub(crate) version: u64,
    /// For each island its inner steps at the last changes that the values contain, or that were refused.
    pub(crate) sent_after: BTreeMap<Task, u64>,
}

/// A fragment that islands have joined.
#[derive(Debug)]
pub(crate) struct Held {
    pub(super) variables: Vec<OuterVariable>,
    blocks: Int8Blocks,
    pub(super) rules: Rules,
    pub(super) state: Mutex<OuterFragment>,
}

impl Kept {
    pub(super) fn known(&self) -> Vec<OuterVariable> {
        let variable = |(name, len): &(String, u64)| OuterVariable { name: name.clone(), len: *len };
        self.variables.iter().map(variable).collect()
    }
}

impl Held {
    pub(super) fn new(variables: Vec<OuterVariable>, rules: Rules, fragment: OuterFragment) -> Held {
        // The fragment has as many elements in memory.
        let lens: Vec<usize> = variables.iter().map(|variable| variable.len as usize).collect();
        Held { variables, blocks: Int8Blocks::new(&lens), rules, state: Mutex::new(fragment) }
    }

    /// Returns how long an island's changes are waited for once the quorum is reached, and how long for the quorum.
    pub(crate) fn grace(&self) -> Duration {
        self.rules.grace
    }

    /// Returns the number of outer steps, and when the grace window closes, if it is open.
    pub(crate) fn state(&self) -> (u64, Option<Instant>) {
        let fragment = self.state.lock();
        (fragment.version(), fragment.closes_at(&self.rules))
    }

    /// Returns the number of outer steps, and the values unless the caller has those of this step.
    pub(crate) fn newest(&self, version: Option<u64>) -> (u64, Option<Bytes>) {
        let fragment = self.state.lock();
        let newest = fragment.version();
        let values = (version != Some(newest)).then(|| numbers::to_bytes(fragment.values().to_vec()));
        (newest, values)
    }

    pub(super) fn kept(&self) -> Kept {
        let variables = self.variables.iter().map(|variable| (variable.name.clone(), variable.len)).collect();
        let fragment = self.state.lock();
        let (values, momentum) = (fragment.values().to_vec(), fragment.momentum().to_vec());
        let sent_after = fragment.contained().clone();
        Kept { variables, values, momentum, version: fragment.version(), sent_after }
    }

    fn len(&self) -> usize {
        self.variables.iter().map(|variable| variable.len as usize).sum()
    }

    pub(super) fn expected_bytes(&self, about: &Changes) -> usize {
        match (about.examples, about.int8) {
            (0, _) => 0,
            (_, true) => self.blocks.message_bytes(),
            (_, false) => self.len() * size_of::<f32>(),
        }
    }

    pub(super) fn decode(&self, about: &Changes, payload: Parts) -> Result<Vec<f32>, Status> {
        if !about.int8 {
            return read_values(payload, self.len() * size_of::<f32>());
        }
        let mut changes = vec![0.0; self.len()];
        let decoded = self.blocks.add_decoded(&payload.join(), &mut changes);
        decoded.map_err(|error| invalid(error.to_string()))?;
        Ok(changes)
    }

    pub(super) fn describe(&self, fragment: u32, island: Task, unfit: Unfit) -> Status {
        invalid(match unfit {
            Unfit::FromTheFuture { version } => format!(
                "changes of fragment {fragment} by {island} begin at an outer step that was not made; {version} were"
            ),
            Unfit::NotFinite { at } => not_finite(island, "changes", &self.variables, at),
            Unfit::OtherLength => format!("changes of fragment {fragment} by {island} have another length than it"),
        })
    }
}

/// Returns the bytes of these variables' values.
pub(super) fn len_bytes(variables: &[OuterVariable]) -> Result<usize, Status> {
    let len = variables.iter().try_fold(0u64, |sum, variable| sum.checked_add(variable.len));
    let bytes = len.and_then(|len| isize::try_from(len.checked_mul(size_of::<f32>() as u64)?).ok());
    bytes.map(isize::unsigned_abs).ok_or_else(|| invalid("a fragment of more elements than memory can have"))
}

/// Reads the values of a payload of this length.
pub(super) fn read_values(parts: Parts, expected_bytes: usize) -> Result<Vec<f32>, Status> {
    let given = parts.len();
    if given != expected_bytes {
        return Err(invalid(format!("{given} bytes of values were given, and {expected_bytes} are expected")));
    }
    let mut values = Vec::new();
    let no_room = |_| Status::resource_exhausted(format!("there is no room here for {expected_bytes} bytes"));
    values.try_reserve_exact(expected_bytes / DType::F32.size_bytes()).map_err(no_room)?;
    values.resize(expected_bytes / DType::F32.size_bytes(), 0.0f32);
    // The lengths are equal.
    parts.copy_to(bytemuck::cast_slice_mut(&mut values));
    Ok(values)
}

pub(super) fn check_variables(
    fragment: u32,
    island: Task,
    here: &[OuterVariable],
    given: &[OuterVariable],
) -> Result<(), Status> {
    if here == given {
        return Ok(());
    }
    let told = |variable: Option<&OuterVariable>| match variable {
        Some(variable) => format!("{} of {} elements", printable(&variable.name, 80), variable.len),
        None => "nothing".to_owned(),
    };
    let at = here.iter().zip(given).position(|(here, given)| here != given).unwrap_or(here.len().min(given.len()));
    let (here, given) = (told(here.get(at)), told(given.get(at)));
    Err(Status::permission_denied(format!(
        "variable {at} of fragment {fragment} is {here} here, and {given} on {island}; build the same model on every \
         island, or give the server an empty folder of checkpoints"
    )))
}

pub(super) fn not_finite(island: Task, what: &str, variables: &[OuterVariable], at: usize) -> String {
    let mut rest = at as u64;
    let variable = variables.iter().find(|variable| {
        let is_inside = rest < variable.len;
        rest = if is_inside { rest } else { rest - variable.len };
        is_inside
    });
    let name = variable.map_or_else(String::new, |variable| printable(&variable.name, 80).to_string());
    format!(
        "{what} of {island} are not finite, first those of variable {name:?}; lower its learning rate, clip its \
         gradients, or restore a checkpoint"
    )
}

pub(super) fn invalid(problem: impl Into<String>) -> Status {
    Status::invalid_argument(problem)
}
