//! Promises of trainings that are described once, and run under any strategy and on parameter servers.

use std::path::Path;

use candle_core::{Device, Tensor};
use candle_nn::{Linear, Module, ModuleT, VarBuilder, linear};
use distribute::candle::{Adam, Error, ServedFit, ServedTrainer, ServedTraining, SparseCategoricalCrossentropy};
use distribute::input::InputContext;
use distribute::prelude::{Dataset, Strategy};
use distribute::train::callbacks::BackupAndRestore;
use distribute::train::history::History;
use distribute::train::metrics::{Accuracy, Metrics};
use distribute_testkit::apart;

use crate::check::{Stop, check, check_eq};
use crate::library::{Batch, CLASSES, INPUTS};
use crate::place::Place;

/// Three batches of eight.
const EXAMPLES: usize = 24;
const BATCH: usize = 8;
const STEPS: u64 = 3;

/// A network of two layers.
struct Net(Linear, Linear);

impl Net {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Net> {
        Ok(Net(linear(INPUTS, 12, vb.pp("first"))?, linear(12, CLASSES, vb.pp("second"))?))
    }
}

impl ModuleT for Net {
    fn forward_t(&self, x: &Tensor, _: bool) -> candle_core::Result<Tensor> {
        self.1.forward(&self.0.forward(x)?.tanh()?)
    }
}

fn inputs(examples: &Batch) -> candle_core::Result<Tensor> {
    Tensor::from_slice(&examples.x, (examples.y.len(), INPUTS), &Device::Cpu)
}

/// Returns the rows of an input pipeline. A global batch has the same rows whatever the number of pipelines.
fn rows(context: &InputContext) -> Result<Dataset<(Tensor, Tensor)>, Error> {
    let examples = Batch::new(0, EXAMPLES);
    let targets = Tensor::from_slice(&examples.y, EXAMPLES, &Device::Cpu)?;
    let all = Dataset::from_tensor_slices((inputs(&examples)?, targets));
    Ok(all.shard(context.num_input_pipelines, context.input_pipeline_id))
}

fn training() -> ServedTraining<Net> {
    let metrics = Metrics::new().with(Accuracy);
    let train = |context: &InputContext| Ok::<_, Error>(rows(context)?.batch(context.per_replica_batch_size(BATCH)?));
    ServedTraining::new(Net::new, Adam::new(0.01), SparseCategoricalCrossentropy, metrics)
        .dataset("train", train)
        .dataset("test", |context: &InputContext| Ok::<_, Error>(rows(context)?.batch(5)))
}

fn predictions(trainer: &ServedTrainer<Net>) -> Result<Vec<f32>, Stop> {
    let inputs = Dataset::from_tensor_slices(inputs(&Batch::new(0, EXAMPLES))?).batch(7);
    Ok(trainer.predict(&inputs)?.flatten_all()?.to_vec1()?)
}

fn close(got: &[(String, f64)], expected: &[(String, f64)]) -> Result<(), Stop> {
    check_eq!(got.len(), expected.len(), "the number of scores");
    for ((name, a), (expected_name, b)) in got.iter().zip(expected) {
        check_eq!(name, expected_name, "a score");
        check!((a - b).abs() < 1e-4, "{name} is {a}, and {b} with one replica");
    }
    Ok(())
}

fn same(got: &History, expected: &History) -> Result<(), Stop> {
    check_eq!(got.epochs.len(), expected.epochs.len(), "epochs");
    got.epochs.iter().zip(&expected.epochs).try_for_each(|((_, got), (_, expected))| close(got, expected))
}

/// Returns whether the loss has fallen and is a number.
fn learns(history: &History) -> bool {
    history.last("loss").is_some_and(|last| last < 0.98 * history.of("loss")[0])
}

pub(super) fn fitted(place: &Place) -> Result<(), Stop> {
    let fit = |place: &Place| -> Result<_, Stop> {
        let (mut trainer, _tasks) = place.trainer(training())?;
        // Each example counts once, whichever replicas and workers evaluate it.
        let before = trainer.evaluate("test")?;
        let fit = ServedFit::epochs(4).steps_per_epoch(STEPS * place.steps()).validation(&trainer.data("test")?);
        let history = trainer.fit("train", fit)?;
        Ok((before, history, trainer.evaluate("test")?, predictions(&trainer)?))
    };
    let (before, history, after, outputs) = fit(place)?;
    let (expected_before, expected, expected_after, expected_outputs) =
        fit(&Place::Strategy(Strategy::default_strategy()?))?;
    close(&before, &expected_before)?;
    check_eq!(outputs.len(), expected_outputs.len(), "predictions");
    check!(learns(&history), "it does not learn: {history}");
    if place.is_in_step() {
        same(&history, &expected)?;
        close(&after, &expected_after)?;
        let apart = apart(&outputs, &expected_outputs);
        check!(apart < 1e-4, "predictions are {apart:e} apart");
    } else {
        check_eq!(after[0].1, history.last("val_loss").unwrap_or(f64::NAN), "the loss after the last epoch");
    }
    Ok(())
}

fn fit(trainer: &mut ServedTrainer<Net>, place: &Place, epochs: u32, folder: &Path) -> Result<History, Stop> {
    let backup = BackupAndRestore::new(folder).keep_at_end();
    Ok(trainer.fit("train", ServedFit::epochs(epochs).steps_per_epoch(STEPS * place.steps()).callback(backup))?)
}

pub(super) fn backed_up(place: &Place) -> Result<(), Stop> {
    // Each worker has a folder of its own; only the chief's is used.
    let folder = tempfile::tempdir()?;
    let (mut first, tasks) = place.trainer(training())?;
    fit(&mut first, place, 2, folder.path())?;
    drop((first, tasks));
    let (mut second, _tasks) = place.trainer(training())?;
    let history = fit(&mut second, place, 4, folder.path())?;
    check_eq!(history.epochs.len(), 4, "epochs");
    check!(learns(&history), "it does not learn: {history}");
    let outputs = predictions(&second)?;
    let alone = Place::Strategy(Strategy::default_strategy()?);
    if place.is_chief() {
        // One replica continues with what was saved here.
        let (mut here, _) = alone.trainer(training())?;
        check_eq!(fit(&mut here, &alone, 4, folder.path())?.epochs.len(), 4, "epochs of the restored training");
        let apart = apart(&predictions(&here)?, &outputs);
        check!(apart < 1e-5, "predictions of the restored model are {apart:e} apart");
        let continued = fit(&mut here, &alone, 5, folder.path());
        if place.pipelines() > 1 {
            // The functions of other workers have chosen other parts of the data.
            let how = format!("{:?}", continued.err());
            check!(how.contains("there are 1 now; begin a pass instead"), "it is resumed, or fails with {how}");
        } else {
            check_eq!(continued?.epochs.len(), 5, "epochs of the continued training");
        }
    }
    if place.is_in_step() {
        let calm = tempfile::tempdir()?;
        let (mut calmly, _) = alone.trainer(training())?;
        same(&history, &fit(&mut calmly, &alone, 4, calm.path())?)?;
    }
    Ok(())
}
