//! Parameters from plain files.

use candle_nn::{Linear, linear};
use distribute::candle::Model;
use distribute::prelude::*;

use crate::check::{Stop, check, check_eq};

pub(crate) fn loaded(strategy: &Strategy) -> Result<(), Stop> {
    // The folder is the chief's; no other process has the file.
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    let build = |seed, head: &str| {
        strategy.scope_seeded(seed, |vb| Ok((linear(3, 4, vb.pp("body"))?, linear(4, 2, vb.pp(head))?)))
    };
    let saved = build(1, "old")?;
    saved.save_safetensors(strategy, &path)?;
    check_eq!(path.exists(), strategy.is_chief(), "a file here");
    let model = build(2, "new")?;
    let head = values(&model, "new.", 0)?;
    let report = model.load_safetensors(strategy, &path)?;
    check_eq!(report.loaded, ["body.weight", "body.bias"], "what was loaded");
    check_eq!(report.missing, ["new.weight", "new.bias"], "what was missing");
    check_eq!(report.unused, ["old.bias", "old.weight"], "what was not used");
    for replica in 0..strategy.num_local_replicas() {
        check_eq!(values(&model, "body.", replica)?, values(&saved, "body.", 0)?, format!("copy {replica}"));
    }
    check_eq!(values(&model, "new.", 0)?, head, "the new head");
    model.audit(strategy)?;
    let refused = model.load_safetensors(strategy, folder.path().join("nowhere"));
    let told = refused.err().map(|error| error.to_string()).unwrap_or_default();
    check!(told.contains("No such file"), "a file that is not there gives {told:?}");
    check_eq!(told.starts_with("on the chief: "), !strategy.is_chief(), "whose error it is");
    Ok(())
}

fn values(model: &Model<(Linear, Linear)>, prefix: &str, replica: usize) -> candle_core::Result<Vec<Vec<f32>>> {
    let chosen = model.variables().iter().filter(|variable| variable.name().starts_with(prefix));
    chosen.map(|variable| variable.components()[replica].flatten_all()?.to_vec1::<f32>()).collect()
}
