//! Parameters from plain files and modules.

use candle_nn::{Linear, linear};
use distribute::candle::Model;
use distribute::device::DType;
use distribute::prelude::*;

use super::models::{audit, parameters};
use crate::check::{Stop, check, check_eq};
use crate::library::{Burn, Kind, Library};

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

pub(crate) fn exchanged(strategy: &Strategy) -> Result<(), Stop> {
    let build = |seed, kind| Burn::model(strategy, kind, seed, DType::F32);
    let (from, to) = (build(1, Kind::NormedApart)?, build(2, Kind::NormedApart)?);
    let expected = parameters::<Burn>(strategy, &from, 0)?;
    check!(parameters::<Burn>(strategy, &to, 0)? != expected, "another seed gives the same model");
    to.load_module(&from.to_module(strategy)?)?;
    for replica in 0..strategy.num_local_replicas() {
        check_eq!(parameters::<Burn>(strategy, &to, replica)?, expected, format!("copy {replica}"));
    }
    audit::<Burn>(strategy, &to)?;
    let refused = to.load_module(&build(1, Kind::Dense)?.to_module(strategy)?);
    let told = refused.err().map(|error| error.to_string()).unwrap_or_default();
    check!(told.contains("differ"), "a module with other parameters gives {told:?}");
    check_eq!(parameters::<Burn>(strategy, &to, 0)?, expected, "values after a module was refused");
    Ok(())
}
