//! Runs a closure on every replica.

use std::sync::Arc;

use distribute_collectives::ProcessGroup;
use distribute_types::{Class, ErrorClass};
use distribute_values::PerReplica;

use crate::context::{self, Frame};
use crate::merge::Rendezvous;
use crate::raise::catch_raised;
use crate::recovery::Recovery;
use crate::{Error, Examples, ReplicaArgs, ReplicaContext, Result, Strategy};

/// Names the error type of the closures that [`Strategy::run`] takes.
///
/// A program has exactly one implementation, for [`Strategy`] itself: from it the compiler knows what `?` converts to
/// inside the closure. The crate `distribute` has it, for `distribute::Error`; with a second one in a program, closures
/// would have to name their error type again.
#[diagnostic::on_unimplemented(
    message = "`Strategy::run` takes closures that return `distribute::Error`, not `{E}`",
    note = "closures with an error type of their own are for `Strategy::run_with`"
)]
pub trait FailsWith<E> {}

impl Strategy {
    /// Runs `body` once on each replica of this process, all at the same time, and collects what they return: as
    /// [`run_with`](Strategy::run_with), with the one error type that the program [has chosen](FailsWith), so that `?`
    /// works on errors of all libraries in the closure, and its type need not be written.
    ///
    /// Programs that depend on the crate `distribute` have `distribute::Error` here.
    ///
    /// # Errors
    /// The errors of [`run_with`](Strategy::run_with) occur in the same cases.
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::{FailsWith, MirroredStrategy, Strategy};
    ///
    /// // The crate `distribute` does this for its error.
    /// #[derive(Debug, thiserror::Error)]
    /// enum Failure {
    ///     #[error(transparent)]
    ///     Strategy(#[from] distribute_strategy::Error),
    ///     #[error(transparent)]
    ///     Number(#[from] std::num::ParseIntError),
    /// }
    /// impl FailsWith<Failure> for Strategy {}
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let numbers = strategy.run((), |context, ()| Ok("7".parse::<usize>()? + context.replica_id()))?;
    /// assert_eq!(numbers.values(), [7, 8]);
    /// # Ok::<(), Failure>(())
    /// ```
    ///
    /// # Source
    /// `tf.distribute.Strategy.run`.
    pub fn run<A, R, E>(
        &self,
        args: A,
        body: impl Fn(&ReplicaContext, A::Local) -> Result<R, E> + Sync,
    ) -> Result<PerReplica<R>, E>
    where
        Strategy: FailsWith<E>,
        A: ReplicaArgs,
        R: Send,
        E: From<Error> + std::fmt::Display + Send,
    {
        self.run_with(args, body)
    }

    /// Runs `body` once on each replica of this process, all at the same time, and collects what they return; the
    /// closure decides the error type.
    ///
    /// Each replica gets its part of `args`; whatever is the same for all is borrowed by the closure. In a step for
    /// which some replicas have no examples, see [`ReplicaContext::has_examples`].
    ///
    /// # Errors
    /// - The first error of a replica, returned or [raised](crate::raise). The others leave their collectives with an
    ///   error that names it.
    /// - [`Error::ReplicaPanicked`] if a replica panicked.
    /// - [`Error::Collective`] if every replica returned `Ok` although a collective had failed.
    /// - [`Error::Busy`] if a run of another thread does not end in time.
    /// - [`Error::Context`] inside a run.
    /// - [`Error::Arguments`] if an argument does not have one component per replica.
    /// - [`Error::MixedExamples`] if a replica has examples in one of several batches and none in another.
    /// - [`Error::NotTakenBack`] if the changes of a failed run could not be undone.
    ///
    /// After an error all replicas of this process have the same state between two steps, bit for bit: that after the
    /// last step which an optimizer has [committed](ReplicaContext::commit), or, if there is none, that before the run.
    /// This covers parameters, optimizers, running statistics, [random streams](crate::ReplicaRandom), and variables of
    /// [`Strategy::variable`]; other state is covered if it is [`Recoverable`](crate::Recoverable). Several processes
    /// are restarted from a checkpoint; each then has the state before or after the step that failed.
    ///
    /// # Source
    /// `tf.distribute.Strategy.run`, except that replicas run concurrently.
    pub fn run_with<A, R, E>(
        &self,
        args: A,
        body: impl Fn(&ReplicaContext, A::Local) -> Result<R, E> + Sync,
    ) -> Result<PerReplica<R>, E>
    where
        A: ReplicaArgs,
        R: Send,
        E: From<Error> + std::fmt::Display + Send,
    {
        if context::current(|frame| matches!(frame, Some(Frame::Replica(_)))) {
            let remedy = "call it outside of run, or use merge_call";
            return Err(Error::Context { what: "run", place: "inside a replica", remedy }.into());
        }
        if context::is_inside_run_of(self) {
            let (place, remedy) = ("in a function that its replicas merge", "call it after run has returned");
            return Err(Error::Context { what: "run", place, remedy }.into());
        }
        let replicas = self.replicas();
        let mut examples = Examples::default();
        args.examples(&mut examples);
        let ranks = replicas.devices.len();
        let examples = examples.of_replicas(|local| replicas.id_of(local))?;
        let parts = args.split(ranks)?;
        let timeout = replicas.groups().first().map(|group| group.options().timeout).unwrap_or_default();
        // Only one run at a time. The groups are looked up afterwards, since a failed run replaces them.
        let running = replicas.running.enter(timeout)?;
        let groups = replicas.groups();
        if replicas.elastic().is_some()
            && let Some(ended) = groups.iter().find_map(ProcessGroup::failure)
        {
            // Before a step, so that none is made which its caller takes for failed.
            drop(groups);
            replicas.renew()?;
            return Err(Error::from(ended).into());
        }
        let rendezvous = Arc::new(Rendezvous::new((0..ranks).map(|local| replicas.id_of(local)).collect()));
        let recovery = Arc::new(Recovery::new(ranks, &replicas.watched));
        for (local, has_examples) in examples.iter().flatten().enumerate().take(ranks) {
            recovery.set_batch(local, *has_examples);
        }
        let first_failure = parking_lot::Mutex::new(None);
        let body = &body;
        replicas.set_idle(&groups, false);
        let closures = parts
            .into_iter()
            .enumerate()
            .map(|(local, part)| {
                let context = ReplicaContext::new(self, local, groups.clone(), rendezvous.clone(), recovery.clone());
                let (rendezvous, first_failure) = (&rendezvous, &first_failure);
                Box::new(move || {
                    // Also dropped if the body panics, so that no peer waits for this replica.
                    let reason = Some("it panicked".to_owned());
                    let mut ending = Ending { context: &context, rendezvous, first_failure, reason };
                    let frame = context::push(Frame::Replica(context.clone()));
                    let outcome = catch_raised(|| context.begin().map_err(E::from).and_then(|()| body(&context, part)));
                    drop(frame);
                    ending.reason = outcome.as_ref().err().map(ToString::to_string);
                    drop(ending);
                    outcome
                }) as Box<dyn FnOnce() -> Result<R, E> + Send + '_>
            })
            .collect();
        let outcomes = replicas.threads.run(closures);
        recovery.drop_left();
        replicas.set_idle(&groups, false);
        let first_failure = first_failure.into_inner();
        let mut values = Vec::with_capacity(outcomes.len());
        let mut failures: Vec<(usize, E)> = Vec::new();
        for (local, outcome) in outcomes.into_iter().enumerate() {
            match outcome {
                Ok(Ok(value)) => values.push(value),
                Ok(Err(error)) => failures.push((local, error)),
                Err(panic) => {
                    let replica = replicas.id_of(local);
                    let message = panic_message(panic.as_ref());
                    failures.push((local, Error::ReplicaPanicked { replica, message }.into()));
                }
            }
        }
        let failure = match failures.iter().position(|(local, _)| Some(*local) == first_failure) {
            _ if failures.is_empty() => self.unheeded(&groups).or_else(|| recovery.end().err()).map(E::from),
            // The others may have failed because of it.
            first => Some(failures.swap_remove(first.unwrap_or(0)).1),
        };
        let Some(failure) = failure else {
            let values = PerReplica::new(values);
            return Ok(examples.iter().fold(values, |values, examples| values.with_examples(examples)));
        };
        let taken_back = recovery.take_back();
        let class = groups.iter().find_map(ProcessGroup::failure).map_or(Class::PERMANENT, |error| error.class());
        drop(groups);
        replicas.renew()?;
        drop(running);
        match taken_back {
            Ok(()) => Err(failure),
            Err(source) => Err(Error::NotTakenBack { failure: failure.to_string(), class, source }.into()),
        }
    }

    /// Returns why the group of a single process was aborted although no replica returned an error: a closure has
    /// ignored a failure that other replicas may not have seen. Between several processes a peer may just have ended
    /// normally.
    fn unheeded(&self, groups: &[ProcessGroup]) -> Option<Error> {
        // The members of an elastic job may change just after a step is made; the next run finds out.
        let alone = self.topology().workers() == 1 && self.elastic().is_none();
        let tensor = || (0..groups.len()).find_map(|local| self.replicas().tensor_group(local)?.failure());
        let failure = || groups.iter().find_map(ProcessGroup::failure).or_else(tensor);
        if alone { failure().map(Error::from) } else { None }
    }
}

/// Reports to a replica's peers, when dropped, how it ended.
struct Ending<'a> {
    context: &'a ReplicaContext,
    rendezvous: &'a Rendezvous,
    /// The local rank that was the first to fail.
    first_failure: &'a parking_lot::Mutex<Option<usize>>,
    /// Why it failed; `None` if it succeeded.
    reason: Option<String>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        match &self.reason {
            Some(reason) => {
                // Before the others learn of it.
                self.first_failure.lock().get_or_insert(self.context.local_replica_id());
                self.rendezvous.end(self.context.local_replica_id(), "failed");
                let name = self.context.strategy().replicas().name_of(self.context.local_replica_id());
                self.context.abort(&format!("{name} failed: {reason}"));
            }
            None => {
                let local = self.context.local_replica_id();
                self.rendezvous.end(local, "ended its run without this merge_call");
                // Peers that wait for a call of this replica learn that none will come.
                self.context.set_idle();
            }
        }
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::{CommunicationOptions, MirroredStrategy, Recoverable, RecoveryError};

    fn strategy(timeout: Duration) -> Strategy {
        let communication = CommunicationOptions { timeout: Some(timeout), ..CommunicationOptions::default() };
        MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).communication(communication).build().unwrap()
    }

    #[test]
    fn a_run_in_a_merged_function_is_an_error_at_once() {
        let strategy = strategy(Duration::from_secs(300));
        let began = Instant::now();
        let told = strategy.run_with((), |context, ()| {
            context.merge_call((), |strategy, _| {
                let nested = strategy.run_with((), |_, ()| Ok::<(), Error>(()));
                Ok(nested.map(drop).map_err(|error| error.to_string()))
            })
        });
        let told = told.unwrap().values()[0].clone().unwrap_err();
        assert!(told.contains("in a function that its replicas merge"), "{told}");
        assert!(began.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_run_that_a_replica_waits_for_ends_by_its_deadline() {
        let strategy = strategy(Duration::from_millis(100));
        // On a thread outside all replicas.
        let nested = || strategy.run_with((), |_, ()| Ok::<(), Error>(())).map(drop).map_err(|error| error.to_string());
        let told = strategy
            .run_with((), |_, ()| Ok::<_, Error>(std::thread::scope(|scope| scope.spawn(nested).join().unwrap())));
        for told in told.unwrap().values() {
            let told = told.as_ref().unwrap_err();
            assert!(told.contains("waited 100.0ms for another run of this strategy"), "{told}");
        }
    }

    #[test]
    fn the_first_failure_is_told_also_if_another_replica_panics_because_of_it() {
        let strategy = strategy(Duration::from_secs(20));
        let outcome = strategy.run_with((), |context, ()| {
            if context.replica_id() == 0 {
                return Err(Error::NoData);
            }
            // Fails because the other replica has.
            context.barrier().unwrap();
            Ok(())
        });
        assert!(matches!(outcome, Err(Error::NoData)), "{outcome:?}");
    }

    #[test]
    fn what_merged_functions_wrote_is_undone_with_their_run() {
        use distribute_values::{
            Aggregation, Assignment, CallContext, DistributedVariable, HostTensor, Synchronization, TensorStorage,
            VariableOptions,
        };

        let strategy = strategy(Duration::from_secs(20));
        let on_write = strategy.variable("w", &HostTensor::scalar(0.0), VariableOptions::default()).unwrap();
        let options =
            VariableOptions::default().synchronization(Synchronization::OnRead).aggregation(Aggregation::Mean);
        let on_read = strategy.variable("r", &HostTensor::scalar(0.0), options).unwrap();
        let one = HostTensor::scalar(1.0);
        let add = |context: CallContext<'_>, variable: &DistributedVariable<HostTensor>| {
            variable.assign(context, Assignment::Add, &one).map_err(Error::from)
        };
        let values = || {
            let all = on_write.components().iter().chain(on_read.components());
            all.map(|component| component.to_elements::<f64>().unwrap()[0]).collect::<Vec<f64>>()
        };
        let run = |fails: bool| {
            strategy.run_with((), |context, ()| {
                context.merge_call((), |strategy, _| {
                    strategy.update(&on_write, add)?;
                    strategy.with_call_context(|context| add(context, &on_read))
                })?;
                if fails && context.replica_id() == 1 { Err(Error::NoData) } else { Ok(()) }
            })
        };
        assert!(run(true).is_err());
        assert_eq!(values(), [0.0; 4]);
        run(false).unwrap();
        assert_eq!(values(), [1.0; 4]);
        // Outside of runs nothing is kept.
        strategy.update(&on_write, add).unwrap();
        assert!(run(true).is_err());
        assert_eq!(values(), [2.0, 2.0, 1.0, 1.0]);
    }

    #[test]
    fn a_batch_without_examples_changes_nothing_between_others_of_its_run() {
        use distribute_values::{Aggregation, Assignment, HostTensor, Synchronization, TensorStorage, VariableOptions};

        let strategy = strategy(Duration::from_secs(20));
        let options = VariableOptions::default().synchronization(Synchronization::OnRead).aggregation(Aggregation::Sum);
        let seen = strategy.variable("seen", &HostTensor::scalar(0.0), options).unwrap();
        for batches in [vec![(true, 1.0), (false, 100.0)], vec![(false, 100.0), (true, 2.0), (true, 4.0)]] {
            let outcome = strategy.run_with((), |context, ()| {
                for (has_examples, value) in &batches {
                    context.begin_batch(*has_examples)?;
                    seen.assign(context.call_context(), Assignment::Add, &HostTensor::scalar(*value))?;
                }
                Ok::<(), Error>(())
            });
            outcome.unwrap();
        }
        let values = seen.components().iter().map(|component| component.to_elements::<f64>().unwrap()[0]);
        assert_eq!(values.collect::<Vec<f64>>(), [7.0; 2]);
    }

    /// State whose copies cannot be made equal again.
    struct Torn;

    impl Recoverable for Torn {
        fn note(&self, _: usize) -> Result<(), RecoveryError> {
            Ok(())
        }

        fn take_back(&self, _: usize) -> Result<(), RecoveryError> {
            Err("half of it is new".into())
        }
    }

    #[test]
    fn a_failure_that_leaves_torn_state_keeps_its_class() {
        let torn: Arc<dyn Recoverable> = Arc::new(Torn);
        let class = |last_fails: bool| {
            let outcome = strategy(Duration::from_millis(100)).run_with((), |context, ()| {
                context.recover(&torn)?;
                match (context.replica_id(), last_fails) {
                    (0, _) => context.barrier(),
                    (_, true) => Err(Error::NoData),
                    (_, false) => {
                        // A peer that calls too late: a restart may help.
                        while context.group().failure().is_none() {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        context.barrier()
                    }
                }
            });
            let error = outcome.unwrap_err();
            assert!(matches!(error, Error::NotTakenBack { .. }), "{error}");
            error.exit_code()
        };
        assert_eq!((class(false), class(true)), (138, 1));
    }

    #[test]
    fn runs_of_two_threads_follow_each_other() {
        let strategy = strategy(Duration::from_secs(60));
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..20 {
                            strategy.run_with((), |context, ()| context.barrier()).unwrap();
                        }
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}
