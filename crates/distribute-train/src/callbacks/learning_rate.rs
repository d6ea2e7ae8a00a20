//! Callbacks that change the learning rate.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::watch::{Watch, Watched};
use super::{Callback, Training, refuse_elastic, state};
use crate::{Error, Result};

type Schedule = Box<dyn FnMut(u64, f64) -> f64 + Send>;

/// Sets the learning rate of each epoch, or of each step.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::LearningRateSchedule;
/// // Five epochs of warm-up to 0.4, then divided by ten every 30 epochs.
/// let by_epoch = LearningRateSchedule::new(|epoch, _| match epoch {
///     ..=5 => 0.4 * f64::from(epoch) / 5.0,
///     _ => 0.4 * 0.1f64.powi((epoch as i32 - 1) / 30),
/// });
/// // A thousand steps of warm-up to 1e-3, then cosine decay to 0 at step 20,000.
/// let by_step = LearningRateSchedule::by_step(|step| {
///     let done = (step as f64 - 1e3) / (20e3 - 1e3);
///     let cosine = (1.0 + (std::f64::consts::PI * done.min(1.0)).cos()) / 2.0;
///     1e-3 * if step < 1000 { (step + 1) as f64 / 1e3 } else { cosine }
/// });
/// ```
///
/// # Source
/// `tf.keras.callbacks.LearningRateScheduler`, and `tf.keras.optimizers.schedules`.
pub struct LearningRateSchedule {
    schedule: Schedule,
    by_step: bool,
    /// The rate that was set last: an epoch may begin again, after a restart or a change of processes.
    last: Scheduled,
}

impl LearningRateSchedule {
    /// Computes the rate from the number of the epoch that begins, from 1, and the current rate.
    pub fn new(mut schedule: impl FnMut(u32, f64) -> f64 + Send + 'static) -> LearningRateSchedule {
        let schedule = move |epoch, rate| schedule(u32::try_from(epoch).unwrap_or(u32::MAX), rate);
        LearningRateSchedule { schedule: Box::new(schedule), by_step: false, last: Scheduled::default() }
    }

    /// Computes the rate from the number of completed steps, over all epochs: 0 for the first step.
    pub fn by_step(mut schedule: impl FnMut(u64) -> f64 + Send + 'static) -> LearningRateSchedule {
        let schedule = Box::new(move |step, _| schedule(step));
        LearningRateSchedule { schedule, by_step: true, last: Scheduled::default() }
    }

    fn set(&mut self, at: u64, training: &mut Training<'_>) -> Result<()> {
        *training.learning_rate = (self.schedule)(at, *training.learning_rate);
        Ok(())
    }

    /// Sets the rate of an epoch, computed from the rate that it begins with.
    fn set_epoch(&mut self, epoch: u64, given: f64, training: &mut Training<'_>) {
        let rate = (self.schedule)(epoch, given);
        *training.learning_rate = rate;
        let replicas = Some(training.strategy.num_replicas_in_sync());
        self.last = Scheduled { epoch, given: Some(given), rate: Some(rate), replicas };
    }

    /// Sets the rate of an epoch that continues with another number of replicas, if [`ScaleByReplicas`] has multiplied
    /// it: a schedule that does not depend on the rate before gives the same rate as for the other number.
    fn set_again(&mut self, training: &mut Training<'_>) {
        let Scheduled { epoch, given: Some(given), rate: Some(rate), replicas: Some(before) } = self.last else {
            return;
        };
        let now = training.strategy.num_replicas_in_sync();
        let scaled = |rate: f64| rate * now as f64 / before as f64;
        let is_scaled = (*training.learning_rate - scaled(rate)).abs() <= ROUNDING * scaled(rate).abs();
        if before != now && is_scaled && training.strategy.elastic().is_none() {
            self.set_epoch(epoch, scaled(given), training);
        }
    }
}

/// Relative difference of two rates that are computed in different orders, or were written to a checkpoint.
const ROUNDING: f64 = 1e-12;

impl Callback for LearningRateSchedule {
    fn name(&self) -> &'static str {
        SCHEDULE
    }

    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        let epoch = u64::from(training.epoch);
        if self.by_step {
            return self.set(training.step, training);
        }
        // The optimizer still has the rate of an epoch that continues.
        match self.last.epoch == epoch {
            true => self.set_again(training),
            false => self.set_epoch(epoch, *training.learning_rate, training),
        }
        Ok(())
    }

    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        if self.by_step { self.set(training.step, training) } else { Ok(()) }
    }

    fn state(&self) -> Value {
        state::of(SCHEDULE, self.last)
    }

    fn set_state(&mut self, given: &Value) {
        // Earlier versions saved the number alone.
        let earlier = |given: &Value| Some(Scheduled { epoch: given.as_u64()?, ..Scheduled::default() });
        if let Some(last) = state::read(SCHEDULE, given, earlier) {
            self.last = last;
        }
    }
}

/// The state of a [`LearningRateSchedule`], and its name in checkpoints. Earlier versions saved the epoch alone.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Scheduled {
    epoch: u64,
    /// The rate that the epoch's was computed from; `None` for one that is not finite, which JSON does not have.
    #[serde(default)]
    given: Option<f64>,
    /// The rate of the epoch.
    #[serde(default)]
    rate: Option<f64>,
    /// The number of replicas when it was set.
    #[serde(default)]
    replicas: Option<usize>,
}

const SCHEDULE: &str = "LearningRateSchedule";

impl fmt::Debug for LearningRateSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LearningRateSchedule").field("by_step", &self.by_step).finish_non_exhaustive()
    }
}

/// Multiplies the learning rate by the number of replicas, for global batches that grow with it, optionally with a
/// linear warm-up. If a restarted program has another number of replicas, the rate is multiplied by the ratio of the
/// two numbers; one that a [`LearningRateSchedule`] has set stays, if it does not depend on the rate before it. The
/// rate also stays after training: of several calls of `fit` for one trainer, give it to the first.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::ScaleByReplicas;
/// let scale = ScaleByReplicas::new().warm_up(500);
/// ```
///
/// # Source
/// Goyal et al., "Accurate, Large Minibatch SGD" (2017); Horovod's `LearningRateWarmupCallback`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScaleByReplicas {
    warm_up: u64,
    scaled: Scaled,
    /// Whether the state is that of an earlier version, which did not save whether the warm-up was over.
    is_earlier: bool,
}

/// The state of a [`ScaleByReplicas`].
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Scaled {
    /// The rate for one replica.
    rate: Option<f64>,
    /// Whether the rate has been multiplied by the number of replicas; then other callbacks may change it.
    done: bool,
    /// The number of replicas that it was last multiplied by; earlier versions did not save it.
    #[serde(default)]
    replicas: Option<usize>,
}

impl ScaleByReplicas {
    /// Scales from the first step on.
    pub fn new() -> ScaleByReplicas {
        ScaleByReplicas::default()
    }

    /// Warms up linearly from the optimizer's rate over this many steps, after which the rate is left to other
    /// callbacks.
    pub fn warm_up(self, steps: u64) -> ScaleByReplicas {
        ScaleByReplicas { warm_up: steps, ..self }
    }

    fn set(&mut self, training: &mut Training<'_>) -> Result<()> {
        if std::mem::take(&mut self.is_earlier) {
            self.scaled.done = training.step > self.warm_up;
        }
        let rate = *self.scaled.rate.get_or_insert(*training.learning_rate);
        let replicas = training.strategy.num_replicas_in_sync();
        let before = self.scaled.replicas.replace(replicas).unwrap_or(replicas);
        if !self.scaled.done {
            // Several steps may have been made at once, beyond the end of the warm-up.
            self.scaled.done = training.step >= self.warm_up;
            let grown = if self.scaled.done { 1.0 } else { training.step as f64 / self.warm_up as f64 };
            *training.learning_rate = rate * (1.0 + (replicas as f64 - 1.0) * grown);
        } else if before != replicas {
            // Restored under another number. Factors of other callbacks stay.
            *training.learning_rate *= replicas as f64 / before as f64;
            if training.is_chief() {
                let rate = *training.learning_rate;
                tracing::info!("{replicas} replicas instead of {before}: the learning rate is now {rate}");
            }
        }
        Ok(())
    }
}

impl Callback for ScaleByReplicas {
    fn name(&self) -> &'static str {
        SCALE
    }

    fn train_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        let why = "the number of replicas of an elastic job changes, and its global batch does not; set the rate in \
                   members_changed";
        refuse_elastic(training, true, "ScaleByReplicas", why)
    }

    fn resumed(&mut self, training: &mut Training<'_>) -> Result<()> {
        // Before schedules, in whatever order the callbacks are.
        self.set(training)
    }

    fn epoch_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.set(training)
    }

    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.set(training)
    }

    fn state(&self) -> Value {
        state::of(SCALE, self.scaled)
    }

    fn set_state(&mut self, given: &Value) {
        // Earlier versions saved the rate alone. The number of an epoch, of a schedule, has no fraction.
        let rate = given.as_f64().filter(|_| given.is_f64());
        if let Some(scaled) = state::read(SCALE, given, |_| Some(Scaled { rate: Some(rate?), ..Scaled::default() })) {
            (self.scaled, self.is_earlier) = (scaled, rate.is_some());
        }
    }
}

/// The name in checkpoints.
const SCALE: &str = "ScaleByReplicas";

/// Multiplies the learning rate by a factor when a value has not improved for some epochs.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::ReduceLrOnPlateau;
/// let plateau = ReduceLrOnPlateau::new("val_loss").patience(3).factor(0.5).cooldown(2).min_learning_rate(1e-5);
/// ```
///
/// # Source
/// `tf.keras.callbacks.ReduceLROnPlateau`.
#[derive(Clone, Debug)]
pub struct ReduceLrOnPlateau {
    watch: Watch,
    factor: f64,
    min_learning_rate: f64,
    cooldown: u32,
    /// The epochs until those without improvement count again.
    cooling: u32,
}

impl ReduceLrOnPlateau {
    /// Monitors a value, as [`EarlyStopping`](super::EarlyStopping) does.
    pub fn new(monitor: &str) -> ReduceLrOnPlateau {
        let watch = Watch { patience: 10, min_delta: 1e-4, ..Watch::new(monitor) };
        ReduceLrOnPlateau { watch, factor: 0.1, min_learning_rate: 0.0, cooldown: 0, cooling: 0 }
    }

    /// Sets the number of epochs in a row without improvement after which the rate is reduced. Default: 10.
    pub fn patience(mut self, epochs: u32) -> ReduceLrOnPlateau {
        self.watch.patience = epochs;
        self
    }

    /// Sets the smallest change that counts as an improvement. Default: 1e-4.
    pub fn min_delta(mut self, delta: f64) -> ReduceLrOnPlateau {
        self.watch.min_delta = delta.abs();
        self
    }

    /// Sets whether the value should rise. Default: as its metric or its name tells.
    pub fn rises(mut self, rises: bool) -> ReduceLrOnPlateau {
        self.watch.rises = Some(rises);
        self
    }

    /// Sets the factor that the rate is multiplied by: from 0 to less than 1. With another one training ends before the
    /// first step with [`Error::CallbackSetting`]. Default: 0.1.
    pub fn factor(mut self, factor: f64) -> ReduceLrOnPlateau {
        self.factor = factor;
        self
    }

    /// Sets the lower bound of the rate, 0 or more. Default: 0.
    pub fn min_learning_rate(mut self, learning_rate: f64) -> ReduceLrOnPlateau {
        self.min_learning_rate = learning_rate;
        self
    }

    /// Sets after how many epochs from a reduction on those without improvement count again, so that the lower rate can
    /// take effect. As in tf.keras the last of them counts: 1 is as 0. Default: 0.
    pub fn cooldown(mut self, epochs: u32) -> ReduceLrOnPlateau {
        self.cooldown = epochs;
        self
    }
}

impl Callback for ReduceLrOnPlateau {
    fn name(&self) -> &'static str {
        PLATEAU
    }

    fn train_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        let refused =
            |setting, given, expected| Err(Error::CallbackSetting { callback: PLATEAU, setting, given, expected });
        if !(0.0..1.0).contains(&self.factor) {
            return refused("factor", self.factor, "a number from 0 to less than 1, such as 0.1");
        }
        // What is not a number is not less than another one either.
        if self.min_learning_rate.is_nan() || self.min_learning_rate < 0.0 {
            return refused("min_learning_rate", self.min_learning_rate, "0 or more");
        }
        self.watch.begin(PLATEAU, training)
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        let Some(value) = self.watch.value(training)? else { return Ok(()) };
        if self.cooling > 0 {
            self.cooling -= 1;
            self.watch.seen.waited = 0;
        }
        let is_best = self.watch.is_best(value);
        if self.cooling > 0 {
            self.watch.seen.waited = 0;
        } else if !is_best && self.watch.is_out_of_patience() {
            (self.watch.seen.waited, self.cooling) = (0, self.cooldown);
            // A rate that is lower already stays.
            let least = self.min_learning_rate.min(*training.learning_rate);
            *training.learning_rate = (*training.learning_rate * self.factor).max(least);
        }
        Ok(())
    }

    fn state(&self) -> Value {
        state::of(PLATEAU, Cooled { watched: self.watch.watched(), cooling: self.cooling })
    }

    fn set_state(&mut self, given: &Value) {
        let earlier = |given: &Value| Cooled::deserialize(given).ok();
        if let Some(Cooled { watched, cooling }) = state::read(PLATEAU, given, earlier)
            && self.watch.adopt(PLATEAU, watched)
        {
            self.cooling = cooling;
        }
    }
}

/// The state of [`ReduceLrOnPlateau`] in checkpoints.
#[derive(Serialize, Deserialize)]
struct Cooled {
    #[serde(flatten)]
    watched: Watched,
    /// Earlier versions had no cooldown.
    #[serde(default)]
    cooling: u32,
}

/// The name in checkpoints.
const PLATEAU: &str = "ReduceLrOnPlateau";
