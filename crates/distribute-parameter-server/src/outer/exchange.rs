//! An island's exchange of a fragment with its server.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use distribute_strategy::{Error as StrategyError, Int8Blocks, LocalReplica, LocalVariable, Wire};
use distribute_types::{ErrorClass, Rank};

use super::decoupled::{DecoupledDilocoStrategy, OUTER, Progress, RESIDUAL};
use super::event::{OuterExchange, OuterOutcome};
use super::island::{Answer, Contribution, Failure, Joined};
use crate::placement::{Placement, Placer};
use crate::wire::proto::OuterVariable;
use crate::{Error, numbers};

/// The change that all replicas of an island make to their copies of a fragment after an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Adoption {
    /// Nothing.
    Keep,
    /// The changes were sent.
    Sent,
    /// The changes were dropped.
    Dropped,
    /// The outer parameters are others, and what has changed since is added to them.
    Moved,
    /// The outer parameters are others, and what has changed since was sent before.
    Replaced,
}

impl Adoption {
    const ALL: [Adoption; 5] = [Adoption::Keep, Adoption::Sent, Adoption::Dropped, Adoption::Moved, Adoption::Replaced];
}

impl DecoupledDilocoStrategy {
    /// Exchanges what is due after a number of steps.
    pub(super) fn exchange_due(&self, replica: &dyn LocalReplica, steps: u64) -> Result<(), StrategyError> {
        let variables = replica.variables()?;
        let bytes: Vec<usize> = variables.iter().map(|variable| variable.len * size_of::<f32>()).collect();
        let ranges = self.schedule.divide(&bytes);
        let mut placer = Placer::new(Placement::ByteBalanced, self.servers);
        let due = self.schedule.due(steps);
        let is_first = !self.has_begun.load(Ordering::Acquire);
        if is_first {
            self.resumed_after.store(steps.saturating_sub(1), Ordering::Release);
        }
        for (index, range) in ranges.into_iter().enumerate() {
            let server = placer.place(bytes[range.clone()].iter().map(|bytes| *bytes as u64).sum());
            if is_first || due == Some(index) {
                let fragment = Fragment::new(index, server, range, &variables);
                self.join(replica, &fragment, steps)?;
                if due == Some(index) {
                    self.exchange(replica, &fragment, steps)?;
                }
            }
        }
        if is_first {
            // All replicas have asked whether an exchange is due before the answer changes.
            replica.group().barrier()?;
            self.has_begun.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Joins a fragment unless its server is known to have it.
    fn join(&self, replica: &dyn LocalReplica, fragment: &Fragment, steps: u64) -> Result<(), StrategyError> {
        let (adoption, values) = self.by_first(replica, fragment, || {
            let progress = self.progress.lock()[fragment.index];
            let incarnation = match self.island.incarnation(fragment.server) {
                Ok(incarnation) => incarnation,
                // The exchange says so.
                Err(Failure::Away(_) | Failure::Unanswered(_)) => return Ok((Adoption::Keep, None)),
                Err(Failure::Error(error)) => return Err(error),
            };
            if progress.known.is_some_and(|(known, _)| known == incarnation) {
                return Ok((Adoption::Keep, None));
            }
            let began = Instant::now();
            let own = || Ok(fragment.read(replica, |slots, _| slots[OUTER].clone())?);
            let joined = match self.island.join(fragment.server, fragment.number(), &fragment.variables, own) {
                Ok(joined) => joined,
                Err(Failure::Away(why) | Failure::Unanswered(why)) => {
                    self.show(fragment, steps, OuterOutcome::Away { why }, began);
                    return Ok((Adoption::Keep, None));
                }
                Err(Failure::Error(error)) => return Err(error),
            };
            Ok(self.joined(fragment, steps, joined, began))
        })?;
        self.adopt(replica, fragment, adoption, values.as_deref(), None)
    }

    fn joined(&self, fragment: &Fragment, steps: u64, joined: Joined, began: Instant) -> (Adoption, Option<Vec<f32>>) {
        let Joined { incarnation, version, sent_after, values } = joined;
        let progress = self.progress.lock()[fragment.index];
        let is_again = progress.known.is_some();
        // This process may have begun with a state that is older than what an earlier one has sent.
        let resumed_after = self.resumed_after.load(Ordering::Acquire);
        let was_sent = !is_again && resumed_after < sent_after;
        if is_again {
            let from = match &values {
                Some(_) => format!("it has the outer parameters of outer step {version}"),
                None => "it has got this island's outer parameters, and its momentum begins at 0".to_owned(),
            };
            let (task, server, index) = (self.place.task, fragment.server, fragment.index);
            distribute_notice::warn!("{task}: ps:{server} was started again; of fragment {index} {from}");
        }
        if was_sent {
            let (task, index) = (self.place.task, fragment.index);
            distribute_notice::warn!(
                "{task} resumed after step {resumed_after}, and its changes of fragment {index} were sent after step \
                 {sent_after} before: it sends none of them again, and begins with the outer parameters"
            );
        }
        // The steps behind what is sent next.
        let sent_after = match (is_again, was_sent) {
            (true, _) => progress.sent_after,
            (false, true) => steps,
            (false, false) if sent_after > 0 => sent_after,
            (false, false) => resumed_after,
        };
        self.progress.lock()[fragment.index] = Progress { known: Some((incarnation, version)), sent_after };
        let received_bytes = values.as_ref().map_or(0, |values| size_of_val(&values[..]) as u64);
        let sent_bytes = if values.is_some() { 0 } else { (fragment.len * size_of::<f32>()) as u64 };
        self.tell(&OuterExchange {
            outer_steps: version,
            is_newer: values.is_some(),
            sent_bytes,
            received_bytes,
            ..self.event(fragment, steps, OuterOutcome::Joined, began)
        });
        (if was_sent { Adoption::Replaced } else { Adoption::Moved }, values)
    }

    /// Sends this island's changes of a fragment, and continues from the newest outer parameters.
    fn exchange(&self, replica: &dyn LocalReplica, fragment: &Fragment, steps: u64) -> Result<(), StrategyError> {
        // The same bits on all replicas, whose copies are equal.
        let mut changes = fragment.read(replica, |slots, inner| {
            let mut changes: Vec<f32> = slots[OUTER].iter().zip(inner).map(|(outer, inner)| outer - inner).collect();
            if let Some(residual) = slots.get(RESIDUAL) {
                changes.iter_mut().zip(residual).for_each(|(change, left)| *change += left);
            }
            changes
        })?;
        let (payload, left) = match self.is_int8() {
            true => (Int8Blocks::new(&fragment.lens).encode(&mut changes), Some(changes)),
            false => (bytemuck::cast_slice(&changes).to_vec(), None),
        };
        let (adoption, values) = self.by_first(replica, fragment, || self.send(fragment, steps, payload))?;
        self.adopt(replica, fragment, adoption, values.as_deref(), left.as_deref())
    }

    /// Sends changes; returns what all replicas do then.
    fn send(&self, fragment: &Fragment, steps: u64, payload: Vec<u8>) -> Result<(Adoption, Option<Vec<f32>>), Error> {
        let began = Instant::now();
        let Progress { known, sent_after } = self.progress.lock()[fragment.index];
        let Some((incarnation, version)) = known else {
            self.show(fragment, steps, OuterOutcome::Away { why: "it was not reached yet".to_owned() }, began);
            return Ok((Adoption::Keep, None));
        };
        let examples = steps.saturating_sub(sent_after).max(1).saturating_mul(self.examples_per_step);
        let (sent_bytes, payload) = (payload.len() as u64, numbers::to_bytes(payload));
        let sent = Contribution { incarnation, version, examples, steps, int8: self.is_int8(), payload };
        let answer = match self.island.exchange(fragment.server, (fragment.number(), fragment.len), &sent) {
            Ok(answer) => answer,
            Err(Failure::Away(why)) => {
                self.show(fragment, steps, OuterOutcome::Away { why }, began);
                return Ok((Adoption::Keep, None));
            }
            Err(Failure::Unanswered(why)) => {
                self.progress.lock()[fragment.index].sent_after = steps;
                self.show(fragment, steps, OuterOutcome::Unanswered { why }, began);
                return Ok((Adoption::Sent, None));
            }
            Err(Failure::Error(error)) => return Err(error),
        };
        let Answer { version: newest, late, refused, refusals, values } = answer;
        let outer_steps = if values.is_some() { newest } else { version };
        self.progress.lock()[fragment.index] = Progress { known: Some((incarnation, outer_steps)), sent_after: steps };
        let outcome = if refused { OuterOutcome::TooLate { late } } else { OuterOutcome::Counted { late } };
        if refused {
            let (task, index, count) = (self.place.task, fragment.index, refusals);
            distribute_notice::warn!(
                "{task}: its changes of fragment {index} were refused, {late} outer steps late ({count} refusals so \
                 far); allow more staleness, or send after fewer inner steps"
            );
        }
        self.tell(&OuterExchange {
            outer_steps,
            is_newer: values.is_some(),
            refusals,
            sent_bytes,
            received_bytes: values.as_ref().map_or(0, |values| size_of_val(&values[..]) as u64),
            ..self.event(fragment, steps, outcome, began)
        });
        Ok((if refused { Adoption::Dropped } else { Adoption::Sent }, values))
    }

    /// Lets the first replica communicate; returns what it has got on all replicas.
    fn by_first(
        &self,
        replica: &dyn LocalReplica,
        fragment: &Fragment,
        communicate: impl FnOnce() -> Result<(Adoption, Option<Vec<f32>>), Error>,
    ) -> Result<(Adoption, Option<Vec<f32>>), StrategyError> {
        let (group, first) = (replica.group(), Rank(0));
        let (mut words, mut values) = ([0u64; 2], None);
        if group.rank() == first {
            let (adoption, got) = communicate().map_err(exchange_error)?;
            words = [Adoption::ALL.iter().position(|one| *one == adoption).unwrap_or(0) as u64, got.is_some().into()];
            values = got;
        }
        group.broadcast(&mut words, first)?;
        if words[1] == 1 {
            let all = values.get_or_insert_with(|| vec![0.0; fragment.len]);
            group.broadcast(all, first)?;
        }
        let adoption = Adoption::ALL.get(words[0] as usize).copied().unwrap_or(Adoption::Keep);
        Ok((adoption, values))
    }

    /// Changes this replica's copy of a fragment: `values` are newer outer parameters, `left` what was not sent.
    fn adopt(
        &self,
        replica: &dyn LocalReplica,
        fragment: &Fragment,
        adoption: Adoption,
        values: Option<&[f32]>,
        left: Option<&[f32]>,
    ) -> Result<(), StrategyError> {
        let has_none = values.is_none();
        if adoption == Adoption::Keep || has_none && adoption != Adoption::Sent {
            return Ok(());
        }
        let mut begin = 0;
        replica.change_slots(fragment.range.clone(), &mut |_, inner, slots| {
            let range = begin..begin + inner.len();
            begin = range.end;
            let values = values.map(|values| &values[range.clone()]);
            let is_over = adoption != Adoption::Moved;
            if let (true, Some(residual)) = (is_over, slots.get_mut(RESIDUAL)) {
                match left.filter(|_| adoption == Adoption::Sent) {
                    Some(left) => residual.copy_from_slice(&left[range]),
                    None => residual.fill(0.0),
                }
            }
            let outer = &mut slots[OUTER];
            match (adoption, values) {
                (Adoption::Keep, _) | (Adoption::Moved | Adoption::Dropped | Adoption::Replaced, None) => {}
                // What this island sends next begins here.
                (Adoption::Sent, None) => outer.copy_from_slice(inner),
                (Adoption::Moved, Some(values)) => {
                    for ((inner, outer), value) in inner.iter_mut().zip(&mut *outer).zip(values) {
                        // Elements that are equal on the server keep their bits.
                        if *outer != *value {
                            *inner = value + (*inner - *outer);
                            *outer = *value;
                        }
                    }
                }
                (Adoption::Replaced, Some(values)) => {
                    outer.copy_from_slice(values);
                    inner.copy_from_slice(values);
                }
                (Adoption::Sent | Adoption::Dropped, Some(values)) => {
                    outer.copy_from_slice(values);
                    let mix = |(inner, outer): (&mut f32, &f32)| *inner = outer + self.mixing * (*inner - outer);
                    match self.mixing == 0.0 {
                        true => inner.copy_from_slice(values),
                        false => inner.iter_mut().zip(values).for_each(mix),
                    }
                }
            }
            Ok(())
        })
    }

    pub(super) fn is_int8(&self) -> bool {
        self.wire == Wire::Int8
    }

    /// Reports an exchange that failed.
    fn show(&self, fragment: &Fragment, steps: u64, outcome: OuterOutcome, began: Instant) {
        let (task, server, index) = (self.place.task, fragment.server, fragment.index);
        match &outcome {
            OuterOutcome::Away { why } => distribute_notice::warn!(
                "{task}: ps:{server} cannot be reached, and fragment {index} is trained here alone: {why}"
            ),
            OuterOutcome::Unanswered { why } => distribute_notice::warn!(
                "{task}: ps:{server} has not answered, and changes of fragment {index} may be lost: {why}"
            ),
            _ => {}
        }
        self.tell(&self.event(fragment, steps, outcome, began));
    }

    fn event(&self, fragment: &Fragment, steps: u64, outcome: OuterOutcome, began: Instant) -> OuterExchange {
        let outer_steps = self.progress.lock()[fragment.index].known.map_or(0, |(_, version)| version);
        OuterExchange {
            fragment: fragment.index,
            steps,
            outcome,
            outer_steps,
            is_newer: false,
            refusals: 0,
            waited: began.elapsed(),
            sent_bytes: 0,
            received_bytes: 0,
        }
    }

    fn tell(&self, exchange: &OuterExchange) {
        if let Some(on_exchange) = &self.on_exchange {
            on_exchange(exchange);
        }
    }
}

/// A fragment of the model.
struct Fragment {
    index: usize,
    server: usize,
    range: Range<usize>,
    variables: Vec<OuterVariable>,
    lens: Vec<usize>,
    /// The number of elements.
    len: usize,
}

impl Fragment {
    fn new(index: usize, server: usize, range: Range<usize>, variables: &[LocalVariable]) -> Fragment {
        let own = &variables[range.clone()];
        let described =
            |variable: &LocalVariable| OuterVariable { name: variable.name.clone(), len: variable.len as u64 };
        let lens: Vec<usize> = own.iter().map(|variable| variable.len).collect();
        Fragment { index, server, range, variables: own.iter().map(described).collect(), len: lens.iter().sum(), lens }
    }

    fn number(&self) -> u32 {
        self.index as u32
    }

    /// Joins what `look` returns of each variable's slots and values.
    fn read(
        &self,
        replica: &dyn LocalReplica,
        look: impl Fn(&[Vec<f32>], &[f32]) -> Vec<f32>,
    ) -> Result<Vec<f32>, StrategyError> {
        let mut all = Vec::with_capacity(self.len);
        replica.read_slots(self.range.clone(), &mut |_, inner, slots| {
            all.extend(look(slots, inner));
            Ok(())
        })?;
        Ok(all)
    }
}

fn exchange_error(error: Error) -> StrategyError {
    match error {
        Error::Strategy(error) => error,
        error => StrategyError::Exchange { class: error.class(), source: Box::new(error) },
    }
}
