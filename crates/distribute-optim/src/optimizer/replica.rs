//! The operations of a replica on an optimizer.

use distribute_strategy::{ReplicaArgs, ReplicaContext, counted};

use super::Optimizer;
use crate::exchange::StepGradients;
use crate::gradient::Scaling;
use crate::tape::Sink;
use crate::{Error, TensorLibrary};

/// One replica's view of an [`Optimizer`].
pub struct ReplicaOptimizer<'a, L: TensorLibrary> {
    pub(super) optimizer: &'a Optimizer<L>,
    pub(super) local: usize,
}

impl<L: TensorLibrary> Clone for ReplicaOptimizer<'_, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L: TensorLibrary> Copy for ReplicaOptimizer<'_, L> {}

impl<L: TensorLibrary> ReplicaOptimizer<'_, L> {
    /// Makes one step: runs backward from `loss`, sums the gradients over all replicas, and updates every replica's
    /// copy in place.
    ///
    /// Every replica must call this. The loss is this replica's share of the global loss, as computed by `average_loss`
    /// of the library's adapter.
    ///
    /// A step is applied on all replicas of this process or on none: after an error, a panic or an early return of any
    /// replica before the update, everything is unchanged. Once `minimize` has returned `Ok`, the step is final, even
    /// if the run fails later.
    ///
    /// # Errors
    /// - [`Error::NoGradient`] if no variable got a gradient, and [`Error::UntrainableType`] if a variable's type
    ///   cannot be trained.
    /// - [`Unweighed`](distribute_strategy::Error::Unweighed) on a replica without examples whose loss was not
    ///   multiplied by its weight.
    /// - [`Error::Torn`] if an earlier failure has left no replica with complete parameters, until a checkpoint is
    ///   restored.
    /// - [`Error::Diverged`] if copies of a parameter differ ([`Optimizer::audit_every`]).
    /// - The library's error if backward or an update fails, and the collective's if a replica is missing or fails.
    pub fn minimize(&self, context: &ReplicaContext, loss: &L::Loss) -> Result<(), L::Error> {
        self.check(context)?;
        #[cfg(feature = "hlo")]
        if let Some(recorded) = L::record(loss, &|| Ok(Box::new(self.optimizer.for_program()?))) {
            recorded?;
            return Ok(context.check_weighed()?);
        }
        self.optimizer.step(context, self.local, StepGradients::Own, |scaling, sink| self.backward(loss, scaling, sink))
    }

    /// Makes one step like [`minimize`](ReplicaOptimizer::minimize), with the gradients that variables report to their
    /// replica's [`Tape`](crate::backend::Tape) while `backward` runs: for programs whose backward is run by other
    /// code. `backward` may report none, on a replica that has nothing to contribute.
    ///
    /// # Errors
    /// [`Error::Combination`] if the optimizer scales losses, which this cannot, or in a step that is compiled;
    /// otherwise as [`minimize`](ReplicaOptimizer::minimize), and the error that `backward` returns.
    pub fn minimize_by(
        &self,
        context: &ReplicaContext,
        backward: impl FnOnce() -> Result<(), L::Error>,
    ) -> Result<(), L::Error> {
        self.check(context)?;
        Self::refuse_recording("minimize_by", "backward is recorded with the step; use minimize")?;
        let reported = |scaling, sink: Sink<L::Tensor>| self.reported(scaling, sink, backward);
        self.optimizer.step(context, self.local, StepGradients::Own, reported)
    }

    /// Runs backward from `loss` and keeps the gradients, which are added, unreduced, to those of the next
    /// [`minimize`](ReplicaOptimizer::minimize). A global batch can thus be several times larger than memory allows,
    /// with one reduction: scale each loss by the number of examples of all parts together.
    ///
    /// It does not communicate, so it may be called conditionally, and a different number of times on each replica.
    ///
    /// After a change of members of an elastic job, the gradients since the last step are dropped on all of them, whose
    /// examples are divided anew: begin again with the first part after that step.
    ///
    /// # Errors
    /// The library's error if backward fails, and [`Error::Combination`] in a step that is compiled.
    ///
    /// # Examples
    /// ```
    /// use distribute_optim::{HostError, HostLoss, HostModel, Sgd};
    /// use distribute_strategy::MirroredStrategy;
    /// use distribute_values::HostTensor;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = HostModel::new(&strategy, [("w", HostTensor::new(&[1], vec![0.0])?)])?;
    /// let optimizer = Sgd::new(0.1).build(&model)?;
    /// strategy.run_with(&optimizer, |context, optimizer| {
    ///     for part in 0..4 {
    ///         // One part's share of the mean over two replicas and four parts.
    ///         let loss = HostLoss(vec![Some(HostTensor::new(&[1], vec![-10.0 / 8.0])?)]);
    ///         if part < 3 { optimizer.accumulate(context, &loss)? } else { optimizer.minimize(context, &loss)? }
    ///     }
    ///     Ok::<_, HostError>(())
    /// })?;
    /// assert_eq!(model.values()?, [[1.0]]);
    /// # Ok::<(), HostError>(())
    /// ```
    ///
    /// # Source
    /// `DistributedDataParallel.no_sync` of PyTorch.
    pub fn accumulate(&self, context: &ReplicaContext, loss: &L::Loss) -> Result<(), L::Error> {
        self.check(context)?;
        Self::refuse_recording(
            "accumulate",
            "gradients are not kept between programs; use minimize on larger batches",
        )?;
        self.optimizer.accumulate(context, self.local, |scaling, sink| self.backward(loss, scaling, sink))
    }

    /// Keeps gradients like [`accumulate`](ReplicaOptimizer::accumulate), those that variables report to their
    /// replica's [`Tape`](crate::backend::Tape) while `backward` runs.
    ///
    /// # Errors
    /// [`Error::Combination`] if the optimizer scales losses, or in a step that is compiled, and the error that
    /// `backward` returns.
    pub fn accumulate_by(
        &self,
        context: &ReplicaContext,
        backward: impl FnOnce() -> Result<(), L::Error>,
    ) -> Result<(), L::Error> {
        self.check(context)?;
        Self::refuse_recording(
            "accumulate",
            "gradients are not kept between programs; use minimize on larger batches",
        )?;
        self.optimizer.accumulate(context, self.local, |scaling, sink| self.reported(scaling, sink, backward))
    }

    /// Runs backward from a loss, times the scale.
    fn backward(&self, loss: &L::Loss, scaling: Option<Scaling>, sink: Sink<L::Tensor>) -> Result<(), L::Error> {
        let scaled = scaling.map(|scaling| L::scale(loss, scaling.scale)).transpose()?;
        self.optimizer.parameters.backward(self.local, sink, scaled.as_ref().unwrap_or(loss))
    }

    fn reported(
        &self,
        scaling: Option<Scaling>,
        sink: Sink<L::Tensor>,
        backward: impl FnOnce() -> Result<(), L::Error>,
    ) -> Result<(), L::Error> {
        if scaling.is_some() {
            let why = "it has no loss to multiply; leave scale_losses out, or call minimize and accumulate";
            let (what, other) = ("scale_losses", "minimize_by and accumulate_by");
            return Err(Error::Combination { what, other, why }.into());
        }
        self.optimizer.parameters.reported(self.local, sink, backward)
    }

    /// Returns an error for a call that a program which is being recorded cannot make.
    pub(super) fn refuse_recording(what: &'static str, why: &'static str) -> Result<(), Error> {
        match L::is_recording() {
            true => Err(Error::Combination { what, other: "a step in one compiled program", why }),
            false => Ok(()),
        }
    }

    pub(super) fn check(&self, context: &ReplicaContext) -> Result<(), Error> {
        self.optimizer.parameters.check_strategy(context.strategy())
    }

    /// Returns the learning rate of the next step.
    pub fn learning_rate(&self) -> f64 {
        self.optimizer.learning_rate()
    }
}

impl<'a, L: TensorLibrary> ReplicaArgs for &'a Optimizer<L> {
    type Local = ReplicaOptimizer<'a, L>;

    fn split(self, replicas: usize) -> distribute_strategy::Result<Vec<ReplicaOptimizer<'a, L>>> {
        let views = (0..self.states.each.len()).map(|local| ReplicaOptimizer { optimizer: self, local }).collect();
        counted(views, replicas)
    }
}

#[cfg(test)]
mod tests {
    use distribute_strategy::MirroredStrategy;
    use distribute_values::HostTensor;

    use crate::{Adam, HostError, HostLoss, HostModel, LossScale, Trainable};

    #[test]
    fn gradients_that_variables_report_make_the_step_of_a_loss() {
        let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap();
        let values = || HostTensor::new(&[2], vec![0.5, -1.0]).unwrap();
        let model = || HostModel::new(&strategy, [("w", values()), ("b", values())]).unwrap();
        let gradient = |index: usize, step: usize, replica: usize| {
            let value = |at: usize| (1 + index + 2 * replica + at) as f32 * 0.25 - step as f32;
            HostTensor::new(&[2], vec![value(0), value(5)]).unwrap()
        };
        let (by_loss, by_report) = (model(), model());
        let (optimizer, other) = (Adam::new(0.1).build(&by_loss).unwrap(), Adam::new(0.1).build(&by_report).unwrap());
        for step in 0..4 {
            let run = strategy.run_with((&optimizer, &other), |context, (optimizer, other)| {
                let (replica, local) = (context.replica_id(), context.local_replica_id());
                // The second replica has nothing to report in the third step.
                let has_any = step != 2 || replica == 0;
                let loss = HostLoss((0..2).map(|index| has_any.then(|| gradient(index, step, replica))).collect());
                let tape = &by_report.parameters().tapes[local];
                let report = || {
                    let indices = (0..2).rev().filter(|_| has_any);
                    indices.for_each(|index| tape.gradient(index, gradient(index, step, replica)));
                    Ok(())
                };
                if step % 2 == 0 {
                    optimizer.accumulate(context, &loss)?;
                    other.accumulate_by(context, report)?;
                }
                optimizer.minimize(context, &loss)?;
                other.minimize_by(context, report)
            });
            run.unwrap();
            assert_eq!(by_loss.values().unwrap(), by_report.values().unwrap(), "step {step}");
        }
        assert_ne!(by_loss.values().unwrap(), model().values().unwrap());
        // The error of the backward is the step's.
        let run = strategy.run_with(&other, |context, other| {
            other.minimize_by(context, || Err(HostError::Optim(crate::Error::NoGradient)))
        });
        assert!(matches!(run, Err(HostError::Optim(crate::Error::NoGradient))), "{run:?}");
    }

    #[test]
    fn a_second_gradient_of_a_variable_does_not_replace_the_first() {
        let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap();
        let tensor = |value: f32| HostTensor::new(&[1], vec![value]).unwrap();
        for is_sharded in [false, true] {
            let model = HostModel::new(&strategy, [("w", tensor(0.5)), ("b", tensor(0.5))]).unwrap();
            let optimizer = Adam::new(0.1).build(&model).unwrap();
            let optimizer = if is_sharded { optimizer.zero1().unwrap() } else { optimizer };
            let step = |times: usize| {
                strategy.run_with(&optimizer, |context, optimizer| {
                    let tape = &model.parameters().tapes[context.local_replica_id()];
                    optimizer.minimize_by(context, || {
                        (0..times).for_each(|_| tape.gradient(0, tensor(1.0)));
                        tape.gradient(1, tensor(1.0));
                        Ok(())
                    })
                })
            };
            // The first step decides on the order of later ones.
            step(1).unwrap();
            let before = model.values().unwrap();
            let told = step(2).unwrap_err().to_string();
            assert!(told.contains("variable w got two gradients in one step"), "{told}");
            assert_eq!(model.values().unwrap(), before);
        }
    }

    #[test]
    fn a_rate_that_no_step_can_have_is_refused_and_changes_nothing() {
        let strategy = MirroredStrategy::builder().build().unwrap();
        let one = || HostTensor::new(&[1], vec![0.5]).unwrap();
        let model = HostModel::new(&strategy, [("w", one())]).unwrap();
        let optimizer = Adam::new(0.1).build(&model).unwrap();
        for (rate, shown) in [(f64::NAN, "NaN"), (-0.1, "-0.1"), (f64::INFINITY, "inf")] {
            optimizer.set_learning_rate(rate);
            let loss = HostLoss(vec![Some(one())]);
            let run = strategy.run_with(&optimizer, |context, optimizer| optimizer.minimize(context, &loss));
            let told = run.unwrap_err().to_string();
            assert!(told.starts_with(&format!("the learning rate is {shown}; expected 0 or more")), "{told}");
            assert_eq!(model.values().unwrap(), [[0.5]]);
        }
    }

    #[test]
    fn loss_scales_that_grow_otherwise_are_other_settings() {
        let strategy = MirroredStrategy::builder().build().unwrap();
        let digest = |scale: LossScale| {
            let model = HostModel::new(&strategy, [("w", HostTensor::new(&[1], vec![0.5]).unwrap())]).unwrap();
            Adam::new(0.1).build(&model).unwrap().scale_losses(scale).unwrap().settings(None).digest()
        };
        let dynamic = || LossScale::dynamic().initial(8.0);
        assert_eq!(digest(dynamic()), digest(dynamic()));
        assert_ne!(digest(dynamic()), digest(dynamic().interval(500)));
        assert_ne!(digest(dynamic()), digest(LossScale::fixed(8.0)));
    }

    #[test]
    fn reported_gradients_are_not_scaled() {
        let strategy = MirroredStrategy::builder().build().unwrap();
        let model = HostModel::new(&strategy, [("w", HostTensor::new(&[1], vec![0.5]).unwrap())]).unwrap();
        let optimizer = Adam::new(0.1).build(&model).unwrap().scale_losses(LossScale::fixed(8.0)).unwrap();
        for is_accumulated in [true, false] {
            let run = strategy.run_with(&optimizer, |context, optimizer| match is_accumulated {
                true => optimizer.accumulate_by(context, || Ok(())),
                false => optimizer.minimize_by(context, || Ok(())),
            });
            let told = run.unwrap_err().to_string();
            assert!(told.starts_with("scale_losses does not go with minimize_by"), "{told}");
        }
    }
}
