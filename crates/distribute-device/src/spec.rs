//! Device names in TensorFlow's syntax.

mod parse;
#[cfg(test)]
mod tests;

use std::fmt;

use crate::{Error, Result};

/// The kind of device that a name denotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The host's processor.
    Cpu,
    /// A CUDA device.
    Gpu,
    /// A tensor processing unit.
    Tpu,
}

/// The index of a device: a number, or any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceIndex {
    /// `GPU:3`.
    At(u32),
    /// `GPU:*`.
    Any,
}

/// A possibly partial device name: `/job:worker/replica:0/task:1/device:GPU:0`, or any part of it.
///
/// Parse it with [`str::parse`], which accepts what TensorFlow accepts: the full form, any part of it in any order, and
/// the shorthands `/gpu:0`, `gpu:0`, `CPU`; also `cuda:0`, which other libraries use, for `GPU:0`. Device types are
/// case-insensitive and written in upper case. Two jobs or tasks in one name, of which TensorFlow keeps the last, are
/// an error; and `GPU:*` remains distinct from `GPU`, so that it never silently becomes `GPU:0`.
///
/// # Examples
/// ```
/// use distribute_device::DeviceSpec;
///
/// let partial: DeviceSpec = "/job:worker/task:1".parse()?;
/// let full = partial.canonicalize(&"/gpu:0".parse()?);
/// assert_eq!(full.to_string(), "/job:worker/replica:0/task:1/device:GPU:0");
/// assert_eq!(full.short(), "GPU:0");
/// # Ok::<(), distribute_device::Error>(())
/// ```
///
/// # Source
/// `tf.DeviceSpec` and `tensorflow.python.distribute.device_util`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceSpec {
    /// The job, such as `worker`.
    pub job: Option<String>,
    /// The replica of the job; always 0 in practice.
    pub replica: Option<u32>,
    /// The task of the job.
    pub task: Option<u32>,
    /// The device type in upper case, such as `GPU`.
    pub device_type: Option<String>,
    /// The index among devices of the type.
    pub device_index: Option<DeviceIndex>,
}

impl DeviceKind {
    /// Returns the device type in names: `CPU`, `GPU`, `TPU`.
    pub const fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "CPU",
            DeviceKind::Gpu => "GPU",
            DeviceKind::Tpu => "TPU",
        }
    }
}

impl DeviceSpec {
    /// Returns the full name of a device of a process without a cluster:
    /// `/job:localhost/replica:0/task:0/device:CPU:0`.
    pub fn local(kind: DeviceKind, index: u32) -> DeviceSpec {
        DeviceSpec {
            job: Some("localhost".to_owned()),
            replica: Some(0),
            task: Some(0),
            device_type: Some(kind.name().to_owned()),
            device_index: Some(DeviceIndex::At(index)),
        }
    }

    /// Returns the kind of device, if the type is given and known.
    pub fn kind(&self) -> Option<DeviceKind> {
        match self.device_type.as_deref()? {
            "CPU" => Some(DeviceKind::Cpu),
            "GPU" => Some(DeviceKind::Gpu),
            "TPU" => Some(DeviceKind::Tpu),
            _ => None,
        }
    }

    /// Returns the index, if it is a number.
    pub fn index(&self) -> Option<u32> {
        match self.device_index {
            Some(DeviceIndex::At(index)) => Some(index),
            Some(DeviceIndex::Any) | None => None,
        }
    }

    /// Returns the fields of `later`, and this one's where `later` has none.
    ///
    /// Merging is associative. A `*` is a field like any other: the later one takes precedence.
    pub fn merge(&self, later: &DeviceSpec) -> DeviceSpec {
        DeviceSpec {
            job: later.job.clone().or_else(|| self.job.clone()),
            replica: later.replica.or(self.replica),
            task: later.task.or(self.task),
            device_type: later.device_type.clone().or_else(|| self.device_type.clone()),
            device_index: later.device_index.or(self.device_index),
        }
    }

    /// Fills missing fields from `default`, then from the local host's first CPU: job localhost, replica 0, task 0,
    /// CPU:0.
    ///
    /// # Source
    /// `device_util.canonicalize`.
    pub fn canonicalize(&self, default: &DeviceSpec) -> DeviceSpec {
        DeviceSpec::local(DeviceKind::Cpu, 0).merge(default).merge(self)
    }

    /// Returns the single device that this name denotes inside nested device scopes, outermost first.
    ///
    /// Missing fields are taken from the innermost scope that has them, then as in [`DeviceSpec::canonicalize`].
    ///
    /// # Errors
    /// [`Error::WildcardDevice`] if the resulting index is `*`.
    ///
    /// # Examples
    /// ```
    /// use distribute_device::DeviceSpec;
    /// let scopes = ["/job:worker".parse::<DeviceSpec>()?, "/task:1".parse()?];
    /// let device = "gpu:0".parse::<DeviceSpec>()?.resolve(&scopes)?;
    /// assert_eq!(device.to_string(), "/job:worker/replica:0/task:1/device:GPU:0");
    /// # Ok::<(), distribute_device::Error>(())
    /// ```
    ///
    /// # Source
    /// `device_util.resolve`, with the scopes given instead of read from the thread.
    pub fn resolve<'a>(&self, scopes: impl IntoIterator<Item = &'a DeviceSpec>) -> Result<DeviceSpec> {
        let scope = scopes.into_iter().fold(DeviceSpec::default(), |outer, inner| outer.merge(inner));
        let device = self.canonicalize(&scope);
        if device.device_index == Some(DeviceIndex::Any) {
            return Err(Error::WildcardDevice { given: device.to_string() });
        }
        Ok(device)
    }

    /// Returns whether `device` has every field of this name; `*` stands for any index.
    pub fn covers(&self, device: &DeviceSpec) -> bool {
        fn agrees<T: PartialEq>(pattern: &Option<T>, value: &Option<T>) -> bool {
            pattern.is_none() || pattern == value
        }
        agrees(&self.job, &device.job)
            && agrees(&self.replica, &device.replica)
            && agrees(&self.task, &device.task)
            && agrees(&self.device_type, &device.device_type)
            && (self.device_index == Some(DeviceIndex::Any) || agrees(&self.device_index, &device.device_index))
    }

    /// Returns the device without its task, as commonly written on one machine: `GPU:0`.
    pub fn short(&self) -> String {
        let kind = self.device_type.as_deref().unwrap_or("*").to_ascii_uppercase();
        match self.device_index {
            Some(DeviceIndex::At(index)) => format!("{kind}:{index}"),
            Some(DeviceIndex::Any) => format!("{kind}:*"),
            None => kind,
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Formats the existing fields in the canonical form.
impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(job) = &self.job {
            write!(f, "/job:{job}")?;
        }
        if let Some(replica) = self.replica {
            write!(f, "/replica:{replica}")?;
        }
        if let Some(task) = self.task {
            write!(f, "/task:{task}")?;
        }
        if self.device_type.is_some() {
            write!(f, "/device:{}", self.short())?;
        }
        Ok(())
    }
}
