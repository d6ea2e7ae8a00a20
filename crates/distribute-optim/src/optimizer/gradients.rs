//! Steps with gradients that the program computes or changes itself.

use distribute_collectives::ReduceOp;
use distribute_strategy::ReplicaContext;
use distribute_types::{FNV64, fnv1a_64};
use distribute_values::TensorStorage;

use super::ReplicaOptimizer;
use crate::agreement::digest;
use crate::exchange::StepGradients;
use crate::library::dtype;
use crate::tape::{Gradient, Sink};
use crate::{Error, TensorLibrary};

/// The index of a variable and its gradient.
type Indexed<L> = Vec<(usize, <L as TensorLibrary>::Tensor)>;

impl<L: TensorLibrary> ReplicaOptimizer<'_, L> {
    /// Runs backward from `loss` and returns this replica's own gradients with the names of their variables, in the
    /// model's order, for [`apply_gradients`](ReplicaOptimizer::apply_gradients). Variables that the loss does not
    /// depend on, and frozen ones, have none.
    ///
    /// It does not communicate.
    ///
    /// # Errors
    /// The library's error if backward fails, and [`Error::Combination`] for models whose variables are sharded, and in
    /// a step that is compiled.
    ///
    /// # Examples
    /// A step whose gradients are clipped by this replica's own measure, before they are summed:
    /// ```
    /// use distribute_optim::{HostError, HostLoss, HostModel, Sgd};
    /// use distribute_strategy::MirroredStrategy;
    /// use distribute_values::{HostTensor, TensorStorage};
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = HostModel::new(&strategy, [("w", HostTensor::new(&[1], vec![0.0])?)])?;
    /// let optimizer = Sgd::new(1.0).build(&model)?;
    /// strategy.run_with(&optimizer, |context, optimizer| {
    ///     let loss = HostLoss(vec![Some(HostTensor::new(&[1], vec![-3.0 * context.replica_id() as f32])?)]);
    ///     let mut gradients = optimizer.gradients(context, &loss)?;
    ///     for (_, gradient) in &mut gradients {
    ///         *gradient = HostTensor::new(&[1], vec![gradient.to_elements::<f32>()?[0].max(-1.0)])?;
    ///     }
    ///     optimizer.apply_gradients(context, gradients)
    /// })?;
    /// assert_eq!(model.values()?, [[1.0]]);      // 0 - (0 - 1)
    /// # Ok::<(), HostError>(())
    /// ```
    ///
    /// # Source
    /// `tf.GradientTape.gradient`.
    pub fn gradients(&self, context: &ReplicaContext, loss: &L::Loss) -> Result<Vec<(String, L::Tensor)>, L::Error> {
        self.check(context)?;
        Self::refuse_recording("gradients", "they are computed when the program runs; use minimize")?;
        self.refuse_sharded("gradients")?;
        let parameters = &self.optimizer.parameters;
        let fired = self.optimizer.record(context, self.local, |sink| parameters.backward(self.local, sink, loss))?;
        let variables = parameters.variables();
        let mut trained: Indexed<L> = fired.into_iter().filter(|(index, _)| variables[*index].is_trainable()).collect();
        // The order in which they became complete may differ between replicas.
        trained.sort_by_key(|(index, _)| *index);
        Ok(trained.into_iter().map(|(index, gradient)| (variables[index].name().to_owned(), gradient)).collect())
    }

    /// Makes one step like [`minimize`](ReplicaOptimizer::minimize), with gradients that the program has computed:
    /// those of this replica, which are summed over all replicas. The tensors given are not changed.
    ///
    /// Every replica must call this. A variable without a gradient on any replica is not updated.
    ///
    /// # Errors
    /// [`Error::Gradient`] if a name is not that of a trained variable or a gradient has another shape or type;
    /// [`Error::Combination`] with loss scales, for models whose variables are sharded, and in a step that is compiled;
    /// otherwise as [`minimize`](ReplicaOptimizer::minimize).
    ///
    /// # Source
    /// `Optimizer.apply_gradients` of Keras.
    pub fn apply_gradients<N: AsRef<str>>(
        &self,
        context: &ReplicaContext,
        gradients: impl IntoIterator<Item = (N, L::Tensor)>,
    ) -> Result<(), L::Error> {
        let gradients = self.indexed(context, gradients)?;
        self.step_with(context, StepGradients::Own, gradients)
    }

    /// Returns the sums of gradients over all replicas, in the model's order, for
    /// [`apply_aggregated_gradients`](ReplicaOptimizer::apply_aggregated_gradients). A variable that has a gradient on
    /// some replica has a sum on all; one without examples, for example, may lack gradients that others have.
    ///
    /// Every replica must call this.
    ///
    /// # Errors
    /// [`Error::Gradient`] if a name is not that of a trained variable or a gradient has another shape or type;
    /// [`Error::Combination`] for models whose variables are sharded, and in a step that is compiled; the collective's
    /// error if a replica is missing or fails.
    pub fn sum_gradients<N: AsRef<str>>(
        &self,
        context: &ReplicaContext,
        gradients: impl IntoIterator<Item = (N, L::Tensor)>,
    ) -> Result<Vec<(String, L::Tensor)>, L::Error> {
        let mut own: Vec<Option<L::Tensor>> = vec![None; self.optimizer.parameters.variables().len()];
        for (index, gradient) in self.indexed(context, gradients)? {
            own[index] = Some(gradient);
        }
        let mut came: Vec<u32> = own.iter().map(|gradient| u32::from(gradient.is_some())).collect();
        context.group().all_reduce(&mut came, ReduceOp::Sum)?;
        let variables = self.optimizer.parameters.variables().iter().zip(own).zip(came).filter(|(_, came)| *came > 0);
        let (names, all): (Vec<String>, Vec<L::Tensor>) = variables
            .map(|((variable, own), _)| {
                let own = own.map_or_else(|| L::zeros_like(&variable.components()[self.local]), Ok)?;
                Ok((variable.name().to_owned(), own))
            })
            .collect::<Result<Vec<_>, L::Error>>()?
            .into_iter()
            .unzip();
        Ok(names.into_iter().zip(context.all_reduce(ReduceOp::Sum, &all)?).collect())
    }

    /// Makes one step like [`apply_gradients`](ReplicaOptimizer::apply_gradients), with gradients that are sums over
    /// all replicas already, such as those of [`sum_gradients`](ReplicaOptimizer::sum_gradients). Only the names and a
    /// digest are exchanged.
    ///
    /// # Errors
    /// [`Error::UnequalSums`] if the gradients are not equal on all replicas, bit for bit; [`Error::Combination`] on
    /// GPUs, with `zero1`, and with gradients that [`accumulate`](ReplicaOptimizer::accumulate) has kept; otherwise as
    /// [`apply_gradients`](ReplicaOptimizer::apply_gradients).
    ///
    /// # Examples
    /// Steps by the signs of the summed gradients:
    /// ```
    /// use distribute_optim::{HostError, HostLoss, HostModel, Sgd};
    /// use distribute_strategy::MirroredStrategy;
    /// use distribute_values::{HostTensor, TensorStorage};
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = HostModel::new(&strategy, [("w", HostTensor::new(&[1], vec![0.0])?)])?;
    /// let optimizer = Sgd::new(0.5).build(&model)?;
    /// strategy.run_with(&optimizer, |context, optimizer| {
    ///     let loss = HostLoss(vec![Some(HostTensor::new(&[1], vec![1.0 - 3.0 * context.replica_id() as f32])?)]);
    ///     let mut sums = optimizer.sum_gradients(context, optimizer.gradients(context, &loss)?)?;
    ///     for (_, sum) in &mut sums {
    ///         *sum = HostTensor::new(&[1], vec![sum.to_elements::<f32>()?[0].signum()])?;
    ///     }
    ///     optimizer.apply_aggregated_gradients(context, sums)
    /// })?;
    /// assert_eq!(model.values()?, [[0.5]]);      // 0 - 0.5 * sign(1 - 2)
    /// # Ok::<(), HostError>(())
    /// ```
    ///
    /// # Source
    /// The argument `skip_gradients_aggregation` of `Optimizer.apply_gradients` of Keras.
    pub fn apply_aggregated_gradients<N: AsRef<str>>(
        &self,
        context: &ReplicaContext,
        gradients: impl IntoIterator<Item = (N, L::Tensor)>,
    ) -> Result<(), L::Error> {
        let what = "apply_aggregated_gradients";
        let refuse = |other, why| Err(Error::Combination { what, other, why }.into());
        if self.optimizer.sharded {
            return refuse("zero1", "each replica gets the sums of its own part only; use apply_gradients");
        }
        if !self.optimizer.states.each[self.local].lock().standing.accumulated.is_empty() {
            return refuse("accumulate", "its gradients are not summed yet; use apply_gradients");
        }
        let gradients = self.indexed(context, gradients)?;
        if gradients.iter().any(|(_, gradient)| !L::is_on_host(gradient)) {
            return refuse("a replica on a GPU", "gradients are summed in its memory; use apply_gradients");
        }
        let mut all = FNV64;
        for (index, gradient) in &gradients {
            let words = [*index as u64, digest::<L>(gradient)?];
            all = fnv1a_64(all, words.into_iter().flat_map(u64::to_le_bytes));
        }
        self.step_with(context, StepGradients::Summed { digest: all }, gradients)
    }

    fn step_with(&self, context: &ReplicaContext, kind: StepGradients, gradients: Indexed<L>) -> Result<(), L::Error> {
        let what = "apply_gradients";
        self.optimizer.step(context, self.local, kind, |scaling, mut sink: Sink<L::Tensor>| {
            if scaling.is_some() {
                let why = "there is no loss to multiply; leave scale_losses out, or call minimize";
                return Err(Error::Combination { what: "scale_losses", other: what, why }.into());
            }
            // Reductions and clipping write in the memory that they are given.
            for (index, gradient) in &gradients {
                sink(*index, Gradient::Whole(gradient.copied()?));
            }
            Ok(())
        })
    }

    /// Returns the gradients with the indices of their variables, the last variable's first, after a check of each.
    fn indexed<N: AsRef<str>>(
        &self,
        context: &ReplicaContext,
        gradients: impl IntoIterator<Item = (N, L::Tensor)>,
    ) -> Result<Indexed<L>, L::Error> {
        self.check(context)?;
        Self::refuse_recording("apply_gradients", "gradients are part of the program; use minimize")?;
        self.refuse_sharded("apply_gradients")?;
        let variables = self.optimizer.parameters.variables();
        let mut all: Vec<Option<L::Tensor>> = vec![None; variables.len()];
        for (name, gradient) in gradients {
            let name = name.as_ref();
            let refuse = |problem: String| Error::Gradient { name: name.to_owned(), problem };
            let index = variables.iter().position(|variable| variable.name() == name);
            let index = index.ok_or_else(|| refuse("which the model does not have".to_owned()))?;
            if !variables[index].is_trainable() {
                return Err(refuse("which is not trained: it is frozen, or a statistic".to_owned()).into());
            }
            let component = &variables[index].components()[self.local];
            let (expected, given) =
                ((component.shape(), dtype::<L>(component)?), (gradient.shape(), dtype::<L>(&gradient)?));
            if expected != given {
                let form = |(shape, dtype): (Vec<usize>, _)| format!("{shape:?} {dtype}");
                return Err(refuse(format!("which is {}, but the gradient is {}", form(expected), form(given))).into());
            }
            if all[index].replace(gradient).is_some() {
                return Err(refuse("for which there is one already; add them first".to_owned()).into());
            }
        }
        Ok(all.into_iter().enumerate().rev().filter_map(|(index, gradient)| Some((index, gradient?))).collect())
    }

    fn refuse_sharded(&self, what: &'static str) -> Result<(), Error> {
        let is_sharded = self.optimizer.parameters.variables().iter().any(|variable| variable.layout().is_some());
        let why = "whole gradients are reduced to parts as soon as they are complete; use minimize";
        if is_sharded { Err(Error::Combination { what, other: "sharded variables", why }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use distribute_strategy::{MirroredStrategy, Strategy};
    use distribute_values::{HostTensor, TensorStorage};

    use crate::{Adam, HostError, HostLoss, HostModel, LossScale, Optimizer, Sgd};

    fn tensor(values: &[f32]) -> HostTensor<f32> {
        HostTensor::new(&[values.len()], values.to_vec()).unwrap()
    }

    fn model(strategy: &Strategy) -> HostModel {
        HostModel::new(strategy, [("w", tensor(&[0.5, -1.0])), ("b", tensor(&[0.25]))]).unwrap()
    }

    fn refused(
        strategy: &Strategy,
        optimizer: &Optimizer<distribute_values::Host>,
        gradients: impl Fn(usize) -> Vec<(&'static str, HostTensor<f32>)> + Sync,
        is_summed: bool,
    ) -> String {
        let run = strategy.run_with(optimizer, |context, optimizer| {
            let gradients = gradients(context.replica_id());
            match is_summed {
                true => optimizer.apply_aggregated_gradients(context, gradients),
                false => optimizer.apply_gradients(context, gradients),
            }
        });
        run.map(|_: distribute_values::PerReplica<()>| ()).unwrap_err().to_string()
    }

    #[test]
    fn given_gradients_are_not_changed_and_train_as_those_of_a_loss() {
        let strategy = MirroredStrategy::builder().num_replicas(3).build().unwrap();
        let (by_loss, given, summed) = (model(&strategy), model(&strategy), model(&strategy));
        let optimizers = [&by_loss, &given, &summed].map(|model| Adam::new(0.1).build(model).unwrap());
        let [first, second, third] = &optimizers;
        for step in 0..4 {
            let run = strategy.run_with((first, second, third), |context, (by_loss, given, summed)| {
                let own = (context.replica_id() + 1) as f32 * (step as f32 - 1.5);
                // The second variable gets its first gradient in the third step.
                let bias = (step > 1).then(|| tensor(&[own * 2.0]));
                let gradients: Vec<_> = [("w", Some(tensor(&[own, -own]))), ("b", bias.clone())].into_iter().collect();
                by_loss
                    .minimize(context, &HostLoss(gradients.iter().map(|(_, gradient)| gradient.clone()).collect()))?;
                let some = || gradients.iter().filter_map(|(name, gradient)| Some((*name, gradient.clone()?)));
                given.apply_gradients(context, some())?;
                assert_eq!(gradients[0].1.as_ref().unwrap().to_elements::<f32>()?, [own, -own]);
                // Their sum over three replicas, in the same order.
                let factor = 6.0 / (context.replica_id() + 1) as f32;
                let total = |gradient: HostTensor<f32>| {
                    tensor(&gradient.to_elements::<f32>().unwrap().iter().map(|x| x * factor).collect::<Vec<f32>>())
                };
                let sums: Vec<_> = some().map(|(name, gradient)| (name, total(gradient))).collect();
                summed.apply_aggregated_gradients(context, sums)
            });
            run.unwrap();
            assert_eq!(given.values().unwrap(), by_loss.values().unwrap(), "step {step}");
            assert_eq!(summed.values().unwrap(), by_loss.values().unwrap(), "step {step}");
        }
        assert_ne!(by_loss.values().unwrap(), model(&strategy).values().unwrap());
    }

    #[test]
    fn what_cannot_be_applied_is_refused_and_changes_nothing() {
        let strategy = MirroredStrategy::builder().num_replicas(2).build().unwrap();
        let model = model(&strategy);
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        let before = model.values().unwrap();
        let one = |name: &'static str, values: &'static [f32]| move |_| vec![(name, tensor(values))];
        type Given<'a> = &'a (dyn Fn(usize) -> Vec<(&'static str, HostTensor<f32>)> + Sync);
        let cases: [(Given<'_>, &str); 4] = [
            (&one("c", &[1.0]), "\"c\", which the model does not have"),
            (&one("b", &[1.0, 2.0]), "which is [1] f32, but the gradient is [2] f32"),
            (&|_| vec![("b", tensor(&[1.0])), ("b", tensor(&[1.0]))], "for which there is one already"),
            (&|_| vec![], "no variable of the model got a gradient"),
        ];
        for (gradients, told) in cases {
            for is_summed in [false, true] {
                let error = refused(&strategy, &optimizer, gradients, is_summed);
                assert!(error.contains(told), "{error}");
            }
        }
        let error = refused(&strategy, &optimizer, |replica| vec![("b", tensor(&[replica as f32]))], true);
        assert!(error.contains("differ between replicas"), "{error}");
        let error = refused(&strategy, &optimizer, |replica| vec![(["w", "b"][replica], tensor(&[1.0]))], true);
        assert!(error.contains("which is [2]") || error.contains("differ between replicas"), "{error}");
        assert_eq!(model.values().unwrap(), before);
    }

    #[test]
    fn options_that_have_no_meaning_for_given_gradients_are_refused() {
        let strategy = MirroredStrategy::builder().num_replicas(2).build().unwrap();
        let model = model(&strategy);
        let gradients = |_: usize| vec![("b", tensor(&[1.0]))];
        let scaled = Sgd::new(0.1).build(&model).unwrap().scale_losses(LossScale::fixed(8.0)).unwrap();
        let error = refused(&strategy, &scaled, gradients, false);
        assert!(error.starts_with("scale_losses does not go with apply_gradients"), "{error}");
        drop(scaled);
        let zero1 = Sgd::new(0.1).build(&model).unwrap().zero1().unwrap();
        let error = refused(&strategy, &zero1, gradients, true);
        assert!(error.starts_with("apply_aggregated_gradients does not go with zero1"), "{error}");
        drop(zero1);
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        let run = strategy.run_with(&optimizer, |context, optimizer| {
            optimizer.accumulate(context, &HostLoss(vec![None, Some(tensor(&[1.0]))]))?;
            optimizer.apply_aggregated_gradients(context, gradients(0))
        });
        let error = run.map(|_: distribute_values::PerReplica<()>| ()).unwrap_err();
        assert!(matches!(error, HostError::Optim(crate::Error::Combination { other: "accumulate", .. })), "{error}");
    }
}
