//! Parsing of device names.

use std::str::FromStr;

use super::{DeviceIndex, DeviceSpec};
use crate::{Error, Result};

/// The device types of TensorFlow; any other type is treated as a typing error.
const TYPES: [&str; 9] = ["CPU", "GPU", "TPU", "TPU_SYSTEM", "XLA_CPU", "XLA_GPU", "XLA_TPU", "CUSTOM", "EPU"];
const ATTRIBUTES: [&str; 4] = ["job", "replica", "task", "device"];
const GUESSES: [&str; 8] = ["job", "replica", "task", "device", "CPU", "GPU", "TPU", "cuda"];

impl FromStr for DeviceSpec {
    type Err = Error;

    fn from_str(given: &str) -> Result<Self> {
        let mut reader = Reader { given, spec: DeviceSpec::default() };
        for part in given.split('/').filter(|part| !part.is_empty()) {
            reader.part(part)?;
        }
        Ok(reader.spec)
    }
}

struct Reader<'a> {
    given: &'a str,
    spec: DeviceSpec,
}

impl Reader<'_> {
    fn part(&mut self, part: &str) -> Result<()> {
        let fields: Vec<&str> = part.split(':').collect();
        match *fields.as_slice() {
            ["job", job] if !job.is_empty() => {
                let before = self.spec.job.replace(job.to_owned());
                self.once("job", before.is_some())
            }
            ["replica", replica] => {
                let before = self.spec.replica.replace(self.number("replica", replica)?);
                self.once("replica", before.is_some())
            }
            ["task", task] => {
                let before = self.spec.task.replace(self.number("task", task)?);
                self.once("task", before.is_some())
            }
            ["device", kind] => self.device(kind, None, "device type"),
            ["device", kind, index] => self.device(kind, Some(index), "device type"),
            [name, ..] if ATTRIBUTES.contains(&name) => {
                let form = if name == "device" { "device:TYPE:INDEX".to_owned() } else { format!("{name}:VALUE") };
                Err(self.malformed(format!("{part:?} is not of the form {form}")))
            }
            [kind] => self.device(kind, None, "attribute or device type"),
            [kind, index] => self.device(kind, Some(index), "attribute or device type"),
            [name, ..] => Err(self.malformed(format!(
                "{name:?} in {part:?} is not an attribute of a device (job, replica, task, device){}",
                did_you_mean(name)
            ))),
            [] => Ok(()),
        }
    }

    fn device(&mut self, kind: &str, index: Option<&str>, what: &str) -> Result<()> {
        if self.spec.device_type.is_some() {
            return Err(self.malformed("it names two devices; name one".to_owned()));
        }
        let upper = kind.to_ascii_uppercase();
        let known = match upper.as_str() {
            "CUDA" => "GPU",
            "*" if matches!(index, None | Some("*")) => return Ok(()),
            other if TYPES.contains(&other) => other,
            _ => {
                return Err(self.malformed(format!(
                    "{what} {kind:?} is not known (device types are CPU, GPU or TPU){}",
                    did_you_mean(kind)
                )));
            }
        };
        self.spec.device_index = match index {
            None => None,
            Some("*") => Some(DeviceIndex::Any),
            Some(index) => Some(DeviceIndex::At(self.number("device index", index)?)),
        };
        self.spec.device_type = Some(known.to_owned());
        Ok(())
    }

    fn number(&self, what: &str, text: &str) -> Result<u32> {
        // `u32::from_str` also accepts a sign, which device names do not have.
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let star = if what == "device index" { " or *" } else { "" };
        text.parse().ok().filter(|_| digits).ok_or_else(|| {
            self.malformed(format!("its {what} {text:?} is not a whole number{star} (0 to {})", u32::MAX))
        })
    }

    fn once(&self, what: &str, again: bool) -> Result<()> {
        if again { Err(self.malformed(format!("it names two {what}s; name one"))) } else { Ok(()) }
    }

    fn malformed(&self, problem: String) -> Error {
        Error::DeviceString { given: self.given.to_owned(), problem }
    }
}

/// Returns a clause with the most similar type, if one is near enough: one error in a short word, two in a longer one.
fn did_you_mean(word: &str) -> String {
    let lower = word.to_ascii_lowercase();
    GUESSES
        .into_iter()
        .map(|guess| (strsim::osa_distance(&lower, &guess.to_ascii_lowercase()), guess))
        .filter(|(slips, guess)| *slips <= guess.len().min(4) / 2)
        .filter(|(slips, guess)| guess.len() > 3 || *slips < 2)
        .min_by_key(|(slips, _)| *slips)
        .map(|(_, guess)| format!("; did you mean {guess:?}?"))
        .unwrap_or_default()
}
