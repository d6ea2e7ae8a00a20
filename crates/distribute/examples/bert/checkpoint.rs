//! Files of pre-trained models, with the names of Hugging Face's.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use candle_core::safetensors::BufferedSafetensors;
use distribute::candle::Model;
use distribute::{Error, Strategy};
use serde_json::{Value, json};

use super::{Classifier, Flags};

/// A model that is to be fine-tuned.
pub(crate) struct Checkpoint {
    path: PathBuf,
    /// The names of its tensors, on the chief, which reads the file for all workers.
    names: BTreeSet<String>,
}

impl Checkpoint {
    /// Refuses a file of another model than the flags describe; the chief decides.
    pub(crate) fn open(strategy: &Strategy, flags: &Flags, path: PathBuf) -> distribute::Result<Checkpoint> {
        let mut names = BTreeSet::new();
        if strategy.is_chief() {
            check_config(flags, &path.with_file_name("config.json"))?;
            let file = std::fs::read(&path).map_err(|error| wrong(&path, error))?;
            let file = BufferedSafetensors::new(file);
            let file = file.map_err(|error| wrong(&path, format!("{error}; give a safetensors file")))?;
            names = file.tensors().into_iter().map(|(name, _)| name).collect();
            check_layers(flags, &path, &names)?;
        }
        Ok(Checkpoint { path, names })
    }

    /// Loads all but the head. Files of the encoder alone lack the prefix of the names, and in older ones
    /// normalisations have the names that TensorFlow gave them.
    pub(crate) fn load(&self, strategy: &Strategy, model: &Model<Classifier>) -> distribute::Result<()> {
        let name_in_file = |name: &str| {
            let alone = name.strip_prefix("bert.")?;
            let names = [name, alone].map(str::to_owned);
            let older = names.each_ref().map(|name| {
                name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            });
            let known = names.into_iter().chain(older).find(|name| self.names.contains(name));
            Some(known.unwrap_or_else(|| name.to_owned()))
        };
        match model.load_safetensors_as(strategy, &self.path, name_in_file)?.missing.first() {
            Some(name) => Err(wrong(&self.path, format!("{name} is missing; give a checkpoint of BERT"))),
            None => Ok(()),
        }
    }
}

/// Writes what the shapes of a model do not tell, for those who load it.
pub(crate) fn write_config(flags: &Flags, pieces: usize, path: &Path) -> distribute::Result<()> {
    let config = json!({
        "model_type": "bert",
        "vocab_size": pieces,
        "num_hidden_layers": flags.layers,
        "num_attention_heads": flags.heads(),
        "hidden_size": flags.width,
        "intermediate_size": 4 * flags.width,
        "hidden_act": ACTIVATION,
    });
    std::fs::write(path, format!("{config:#}\n")).map_err(|error| wrong(path, error))
}

/// Compares the flags with a model's configuration, if there is one.
fn check_config(flags: &Flags, path: &Path) -> distribute::Result<()> {
    let config: Value = match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| wrong(path, error))?,
        Err(error) if error.kind() == ErrorKind::NotFound => Value::Null,
        Err(error) => return Err(wrong(path, error)),
    };
    for (key, flag, given) in [
        ("num_hidden_layers", "--layers", flags.layers),
        ("num_attention_heads", "--heads", flags.heads()),
        ("hidden_size", "--width", flags.width),
    ] {
        match config.get(key).and_then(Value::as_u64) {
            Some(value) if value != given as u64 => {
                return Err(wrong(path, format!("{key} is {value}, and {flag} {given}; give {flag} {value}")));
            }
            _ => {}
        }
    }
    if let Some(activation) = config.get("hidden_act").filter(|activation| **activation != ACTIVATION) {
        return Err(wrong(path, format!("hidden_act is {activation}; give a model with {ACTIVATION:?}")));
    }
    if flags.heads.is_none() && config.get("num_attention_heads").is_none() {
        let problem = "the number of attention heads is not in it, and no shape tells it; give --heads, or this file";
        return Err(wrong(path, problem));
    }
    Ok(())
}

fn check_layers(flags: &Flags, path: &Path, names: &BTreeSet<String>) -> distribute::Result<()> {
    let number = |name: &String| name.split_once("encoder.layer.")?.1.split_once('.')?.0.parse::<usize>().ok();
    match names.iter().filter_map(number).max() {
        Some(last) if last + 1 != flags.layers => {
            let (layers, given) = (last + 1, flags.layers);
            Err(wrong(
                path,
                format!("its encoder has {layers} layers, and --layers is {given}; give --layers {layers}"),
            ))
        }
        _ => Ok(()),
    }
}

fn wrong(path: &Path, problem: impl std::fmt::Display) -> Error {
    Error::program(format!("{}: {problem}", path.display()))
}

/// The activation between the layers, computed by the error function; `gelu_new` is the approximation by tanh.
const ACTIVATION: &str = "gelu";
