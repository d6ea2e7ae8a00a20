//! Events, metrics, the renderer and files, which only the chief has.

use burn::module::Module;
use burn::nn::Linear;
use burn::optim::SgdConfig;
use burn::optim::lr_scheduler::LrSchedulerRecord;
use burn::train::checkpoint::{Checkpoint, Checkpointer, CheckpointerError};
use burn::train::logger::{EvaluationProgressLogger, InMemoryMetricLogger, TrainingProgressLogger};
use burn::train::metric::MetricDefinition;
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation, MetricsRendererTraining,
};
use burn::train::{
    EventProcessorTraining, Learner, LearnerModel, LearnerSummary, LearningResult, SupervisedLearningStrategy,
    SupervisedTraining, SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents, ValidLoader,
};

use super::DataParallel;

/// The chief's training: burn's own frame around [`fit`](SupervisedLearningStrategy::fit), with events of start and
/// end.
pub(super) struct Chief<'a>(pub(super) &'a DataParallel);

impl<M: LearnerModel> SupervisedLearningStrategy<M> for Chief<'_> {
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        self.0.fit(components, learner, train, valid, starting_epoch)
    }
}

/// Trains without events.
pub(super) fn train_silently<M: LearnerModel>(
    training: &DataParallel,
    learner: Learner<M>,
    train: TrainLoader<M>,
    valid: ValidLoader<M>,
    components: TrainingComponents<M>,
) -> LearningResult<M> {
    let starting_epoch = components.checkpoint.unwrap_or(0) + 1;
    let interrupter = components.interrupter.clone();
    let (model, processor) = training.fit(components, learner, train, valid, starting_epoch);
    LearningResult {
        model: model.valid(),
        renderer: processor.renderer(),
        interrupted: interrupter.interruption(),
        error: interrupter.error(),
    }
}

/// Replaces everything that writes or prints. States are not restored either: the chief's are broadcast.
pub(super) fn silenced<M: LearnerModel>(training: SupervisedTraining<M>) -> SupervisedTraining<M> {
    training
        .renderer(Box::new(Silent))
        .with_application_logger(None)
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_custom_checkpointers(
            FromChief(|| None::<Linear>.into_record().allow_partial(true)),
            FromChief(|| SgdConfig::new().init().to_record()),
            FromChief(LrSchedulerRecord::new),
        )
}

/// A checkpointer that saves nothing, and restores a record that changes nothing.
struct FromChief<R>(fn() -> R);

impl<R: Checkpoint> Checkpointer<R> for FromChief<R> {
    fn save(&self, _: usize, _: R) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn delete(&self, _: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _: usize) -> Result<R, CheckpointerError> {
        Ok((self.0)())
    }
}

/// A renderer that shows nothing.
struct Silent;

impl MetricsRendererTraining for Silent {
    fn update_train(&mut self, _: MetricState) {}

    fn update_valid(&mut self, _: MetricState) {}

    fn on_train_end(&mut self, _: Option<LearnerSummary>) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl MetricsRendererEvaluation for Silent {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}

    fn on_test_end(&mut self, _: Option<LearnerSummary>) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl TrainingProgressLogger for Silent {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {}

    fn update_epoch(&mut self, _: usize) {}

    fn start_split(&mut self, _: &str, _: usize) {}

    fn update_split(&mut self, _: usize) {}

    fn end_split(&mut self) {}

    fn end(&mut self) {}

    fn log_event_training(&mut self, _: String) {}
}

impl EvaluationProgressLogger for Silent {
    fn start_global_progress(&mut self, _: usize) {}

    fn start_test(&mut self, _: &str, _: usize) {}

    fn update_test_progress(&mut self, _: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _: String) {}
}

impl MetricsRenderer for Silent {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _: MetricDefinition) {}
}
