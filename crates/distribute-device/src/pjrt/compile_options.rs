//! Options of a compilation.

use std::collections::BTreeMap;

use prost::Message;

use super::{PjrtDevice, Value};
use crate::{Error, Result};

/// Options of a compilation: how many replicas and partitions a program has, and their devices.
///
/// The program's text must tell the same numbers, as `mhlo.num_replicas` and `mhlo.num_partitions` of its module.
///
/// # Examples
/// ```
/// use distribute_device::pjrt::CompileOptions;
/// let two_of_one_replica = CompileOptions::new(2, 1).with_assignment(vec![vec![0], vec![1]]);
/// # let _ = two_of_one_replica;
/// ```
///
/// # Source
/// `CompileOptionsProto` of XLA.
#[derive(Debug, Clone, PartialEq)]
pub struct CompileOptions {
    replicas: usize,
    partitions: usize,
    assignment: Option<Vec<Vec<i32>>>,
    overrides: BTreeMap<String, Value>,
}

impl CompileOptions {
    /// Creates options for a number of replicas, each of a number of partitions. The plugin chooses the devices.
    pub fn new(replicas: usize, partitions: usize) -> CompileOptions {
        CompileOptions { replicas, partitions, assignment: None, overrides: BTreeMap::new() }
    }

    /// Creates options for one replica on each of the devices, in this order.
    pub fn for_devices(devices: &[PjrtDevice]) -> CompileOptions {
        let assignment = devices.iter().map(|device| vec![device.id()]).collect();
        CompileOptions::new(devices.len(), 1).with_assignment(assignment)
    }

    /// Sets the devices by their numbers: for each replica, those of its partitions.
    #[must_use]
    pub fn with_assignment(mut self, assignment: Vec<Vec<i32>>) -> CompileOptions {
        self.assignment = Some(assignment);
        self
    }

    /// Sets an option of XLA, such as `xla_embed_ir_in_executable`: a text, an integer, a number or a truth value.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> CompileOptions {
        self.overrides.insert(name.to_owned(), value.into());
        self
    }

    /// Returns the number of replicas.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// Returns the number of partitions of a replica.
    pub fn partitions(&self) -> usize {
        self.partitions
    }

    /// Returns the message that the plugin reads. Equal options give equal bytes.
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        let (replicas, partitions) = (self.replicas, self.partitions);
        let count = |count: usize| i32::try_from(count).ok().filter(|count| *count > 0);
        let (Some(replica_count), Some(computation_count)) = (count(replicas), count(partitions)) else {
            return Err(wrong(format!("{replicas} replicas of {partitions} partitions were given; give 1 or more")));
        };
        let device_assignment = match &self.assignment {
            Some(rows) if rows.len() != replicas || rows.iter().any(|row| row.len() != partitions) => {
                return Err(wrong(format!(
                    "the devices {rows:?} were given for {replicas} replicas of {partitions} partitions; give a list \
                     of {partitions} for each of {replicas} replicas"
                )));
            }
            Some(rows) => {
                let mut ids: Vec<i32> = rows.iter().flatten().copied().collect();
                ids.sort_unstable();
                if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
                    return Err(wrong(format!("device {} was given twice; give each one once", twice[0])));
                }
                // The message has a row for each partition.
                let of_partition = |partition: usize| ComputationDevice {
                    replica_device_ids: rows.iter().map(|row| i64::from(row[partition])).collect(),
                };
                let computation_devices = (0..partitions).map(of_partition).collect();
                Some(DeviceAssignment { replica_count, computation_count, computation_devices })
            }
            None => None,
        };
        let mut env_option_overrides = BTreeMap::new();
        for (name, value) in &self.overrides {
            let value = match value.clone() {
                Value::Text(text) => OptionValue::Text(text),
                Value::Integer(integer) => OptionValue::Integer(integer),
                Value::Float(number) => OptionValue::Number(f64::from(number)),
                Value::Bool(truth) => OptionValue::Truth(truth),
                other => return Err(wrong(format!("{name} is {other:?}; give a text, a number or a truth value"))),
            };
            env_option_overrides.insert(name.clone(), OptionOverride { value: Some(value) });
        }
        let build = BuildOptions {
            device_ordinal: -1,
            num_replicas: i64::from(replica_count),
            num_partitions: i64::from(computation_count),
            use_spmd_partitioning: partitions > 1,
            device_assignment,
        };
        Ok(Options { executable_build_options: Some(build), env_option_overrides }.encode_to_vec())
    }
}

/// Options for one replica of one partition, on the plugin's first device.
impl Default for CompileOptions {
    fn default() -> CompileOptions {
        CompileOptions::new(1, 1)
    }
}

fn wrong(problem: String) -> Error {
    Error::Operands { operation: "the options of a compilation", problem }
}

/// `CompileOptionsProto`.
#[derive(Clone, PartialEq, Message)]
struct Options {
    #[prost(message, optional, tag = "3")]
    executable_build_options: Option<BuildOptions>,
    #[prost(btree_map = "string, message", tag = "7")]
    env_option_overrides: BTreeMap<String, OptionOverride>,
}

/// `ExecutableBuildOptionsProto`.
#[derive(Clone, PartialEq, Message)]
struct BuildOptions {
    #[prost(int64, tag = "1")]
    device_ordinal: i64,
    #[prost(int64, tag = "4")]
    num_replicas: i64,
    #[prost(int64, tag = "5")]
    num_partitions: i64,
    #[prost(bool, tag = "6")]
    use_spmd_partitioning: bool,
    #[prost(message, optional, tag = "9")]
    device_assignment: Option<DeviceAssignment>,
}

/// `DeviceAssignmentProto`.
#[derive(Clone, PartialEq, Message)]
struct DeviceAssignment {
    #[prost(int32, tag = "1")]
    replica_count: i32,
    #[prost(int32, tag = "2")]
    computation_count: i32,
    #[prost(message, repeated, tag = "3")]
    computation_devices: Vec<ComputationDevice>,
}

/// `DeviceAssignmentProto.ComputationDevice`.
#[derive(Clone, PartialEq, Message)]
struct ComputationDevice {
    #[prost(int64, repeated, tag = "1")]
    replica_device_ids: Vec<i64>,
}

/// `OptionOverrideProto`.
#[derive(Clone, PartialEq, Message)]
struct OptionOverride {
    #[prost(oneof = "OptionValue", tags = "1, 2, 3, 4")]
    value: Option<OptionValue>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum OptionValue {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(bool, tag = "2")]
    Truth(bool),
    #[prost(int64, tag = "3")]
    Integer(i64),
    #[prost(double, tag = "4")]
    Number(f64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_encoded_as_the_message_is_defined() {
        let options = CompileOptions::new(2, 1).with_assignment(vec![vec![5], vec![3]]);
        // Field 3: the ordinal -1, 2 replicas, 1 partition, and field 9: 2 by 1, with the devices 5 and 3.
        let assignment = [0x08, 2, 0x10, 1, 0x1a, 4, 0x0a, 2, 5, 3];
        let ordinal = [0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1];
        let build = [ordinal.as_slice(), &[0x20, 2, 0x28, 1, 0x4a, 10], &assignment].concat();
        assert_eq!(options.encode().unwrap(), [&[0x1a, build.len() as u8], build.as_slice()].concat());
    }

    #[test]
    fn a_row_of_the_message_is_a_partition() {
        let options = CompileOptions::new(3, 2).with_assignment(vec![vec![0, 1], vec![2, 3], vec![4, 5]]);
        let message = Options::decode(options.encode().unwrap().as_slice()).unwrap();
        let build = message.executable_build_options.unwrap();
        let rows: Vec<_> = build.device_assignment.unwrap().computation_devices;
        let ids: Vec<_> = rows.into_iter().map(|row| row.replica_device_ids).collect();
        assert_eq!((ids, build.use_spmd_partitioning), (vec![vec![0, 2, 4], vec![1, 3, 5]], true));
    }

    #[test]
    fn options_that_do_not_fit_each_other_are_refused() {
        let text = |options: CompileOptions| options.encode().unwrap_err().to_string();
        assert!(text(CompileOptions::new(0, 1)).contains("0 replicas of 1 partitions"));
        let short = text(CompileOptions::new(2, 1).with_assignment(vec![vec![0]]));
        assert!(short.contains("give a list of 1 for each of 2 replicas"), "{short}");
        let list = text(CompileOptions::default().with("xla_list", vec![1, 2]));
        assert!(list.contains("xla_list is Integers([1, 2])"), "{list}");
        let one = |value: bool| CompileOptions::default().with("xla_a", value).with("xla_b", 1).encode().unwrap();
        assert_ne!(one(true), one(false));
        assert_eq!(one(true), CompileOptions::default().with("xla_b", 1).with("xla_a", true).encode().unwrap());
    }
}
