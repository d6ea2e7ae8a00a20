//! Names of TPU slices.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// A TPU slice by its generation and size, such as `v5litepod-16`.
///
/// The number in a name counts TensorCores up to v4 and for v5p, which have two in each chip, and chips for v5litepod
/// and v6e, which have one.
///
/// # Examples
/// ```
/// use distribute_cluster::tpu::AcceleratorType;
/// let pod: AcceleratorType = "v4-32".parse()?;
/// assert_eq!((pod.chips(), pod.cores()), (16, 32));
/// let pod: AcceleratorType = "v5litepod-16".parse()?;
/// assert_eq!((pod.chips(), pod.cores()), (16, 16));
/// assert_eq!(pod.cores_per_task(4)?, 4);
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
///
/// # Source
/// "TPU configurations" of Cloud TPU's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AcceleratorType {
    generation: Generation,
    chips: u32,
}

/// A generation of TPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Generation {
    /// As in names of slices.
    name: &'static str,
    /// The type in an `acceleratorConfig` of the node API.
    config: &'static str,
    cores_per_chip: u32,
    /// Whether names count cores rather than chips.
    counts_cores: bool,
    /// The PCI device; v2 and v3 have the same.
    pci: Option<u16>,
}

const GENERATIONS: [Generation; 6] = [
    Generation { name: "v2", config: "V2", cores_per_chip: 2, counts_cores: true, pci: None },
    Generation { name: "v3", config: "V3", cores_per_chip: 2, counts_cores: true, pci: Some(0x0027) },
    Generation { name: "v4", config: "V4", cores_per_chip: 2, counts_cores: true, pci: Some(0x005e) },
    Generation { name: "v5p", config: "V5P", cores_per_chip: 2, counts_cores: true, pci: Some(0x0062) },
    Generation { name: "v5litepod", config: "V5LITE_POD", cores_per_chip: 1, counts_cores: false, pci: Some(0x0063) },
    Generation { name: "v6e", config: "V6E", cores_per_chip: 1, counts_cores: false, pci: Some(0x006f) },
];

impl Generation {
    /// Returns the generation of a chip on the PCI bus.
    pub(super) fn of_pci(device: u16) -> Option<Generation> {
        GENERATIONS.into_iter().find(|generation| generation.pci == Some(device))
    }

    pub(super) fn cores_per_chip(self) -> u32 {
        self.cores_per_chip
    }
}

impl AcceleratorType {
    /// The largest number of chips of a slice that is accepted; the largest slices have some 9,000.
    pub const MAX_CHIPS: u32 = 1 << 16;

    /// Returns the slice of a type and a topology of the node API, such as `V4` and `2x2x4`.
    ///
    /// # Errors
    /// [`Error::Config`] if the type is unknown, or if the topology is not a product of chips.
    pub fn from_config(config: &str, topology: &str) -> Result<AcceleratorType> {
        let generation = GENERATIONS.into_iter().find(|generation| generation.config == config);
        let known = || GENERATIONS.map(|generation| generation.config).join(", ");
        let generation = generation.ok_or_else(|| wrong("its type is unknown", config, &known()))?;
        let chips = product(topology, 'x').filter(|chips| *chips <= AcceleratorType::MAX_CHIPS);
        let chips = chips.ok_or_else(|| wrong("its topology is not a product of chips", topology, "2x2x1, 4x4, …"))?;
        Ok(AcceleratorType { generation, chips })
    }

    /// Returns the number of chips.
    pub fn chips(&self) -> u32 {
        self.chips
    }

    /// Returns the number of TensorCores, which are the devices of a program.
    pub fn cores(&self) -> u32 {
        self.chips * self.generation.cores_per_chip
    }

    /// Returns the number of TensorCores in each chip.
    pub fn cores_per_chip(&self) -> u32 {
        self.generation.cores_per_chip
    }

    /// Returns the number of TensorCores of each of `tasks` tasks.
    ///
    /// # Errors
    /// [`Error::Config`] if the cores cannot be divided evenly among them.
    pub fn cores_per_task(&self, tasks: u32) -> Result<u32> {
        if tasks == 0 || !self.cores().is_multiple_of(tasks) {
            let problem = format!("the {} TensorCores of {self} are unequal on {tasks} tasks", self.cores());
            let expected = "the same number of TensorCores for every task";
            let remedy = "Give all tasks of the slice, and one for each of its hosts.";
            return Err(Error::config(SUBJECT, problem, format!("{tasks} tasks"), expected, remedy));
        }
        Ok(self.cores() / tasks)
    }
}

impl FromStr for AcceleratorType {
    type Err = Error;

    /// Parses a name such as `v4-32`.
    ///
    /// # Errors
    /// [`Error::Config`] if the generation is unknown, or if the number is not one of a slice.
    fn from_str(given: &str) -> Result<AcceleratorType> {
        let known = || GENERATIONS.map(|generation| format!("{}-N", generation.name)).join(", ");
        let (name, number) =
            given.trim().rsplit_once('-').ok_or_else(|| wrong("it is not a type of TPU", given, &known()))?;
        let generation = GENERATIONS.into_iter().find(|generation| generation.name == name);
        let generation = generation.ok_or_else(|| wrong("its generation is unknown", given, &known()))?;
        let unit = if generation.counts_cores { generation.cores_per_chip } else { 1 };
        let number: Option<u32> = number.parse().ok().filter(|number| *number > 0 && *number % unit == 0);
        let chips = number.map(|number| number / unit).filter(|chips| *chips <= AcceleratorType::MAX_CHIPS);
        let expected = if unit == 1 { "a number of chips" } else { "an even number of TensorCores" };
        Ok(AcceleratorType { generation, chips: chips.ok_or_else(|| wrong("its size is wrong", given, expected))? })
    }
}

impl fmt::Display for AcceleratorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = if self.generation.counts_cores { self.cores() } else { self.chips };
        f.pad(&format!("{}-{number}", self.generation.name))
    }
}

/// Returns the product of positive numbers, such as `2x2x1` or `2,2,1`.
pub(super) fn product(text: &str, separator: char) -> Option<u32> {
    let factors = text.trim().split(separator).map(|part| part.trim().parse::<u32>().ok().filter(|part| *part > 0));
    factors.into_iter().try_fold(1u32, |product, factor| product.checked_mul(factor?))
}

fn wrong(problem: &str, given: &str, expected: &str) -> Error {
    Error::config(SUBJECT, problem, given, expected, "Correct the type of the accelerator.")
}

const SUBJECT: &str = "TPU accelerator type";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_count_cores_or_chips() {
        for (name, chips, cores) in [
            ("v2-8", 4, 8),
            ("v3-2048", 1024, 2048),
            ("v4-8", 4, 8),
            ("v5p-128", 64, 128),
            ("v5litepod-1", 1, 1),
            ("v5litepod-256", 256, 256),
            ("v6e-16", 16, 16),
        ] {
            let parsed: AcceleratorType = name.parse().unwrap();
            assert_eq!((parsed.chips(), parsed.cores(), parsed.to_string().as_str()), (chips, cores, name));
        }
        for (name, words) in [
            ("", "it is not a type of TPU"),
            ("v4", "it is not a type of TPU"),
            ("v9-8", "its generation is unknown"),
            ("a100-8", "v2-N, v3-N, v4-N, v5p-N, v5litepod-N, v6e-N"),
            ("v4-7", "an even number of TensorCores"),
            ("v6e-0", "a number of chips"),
            ("v6e-4294967296", "its size is wrong"),
            ("v6e-65537", "its size is wrong"),
        ] {
            let text = name.parse::<AcceleratorType>().unwrap_err().to_string();
            assert!(text.starts_with("TPU accelerator type: ") && text.contains(words), "{text}");
        }
    }

    #[test]
    fn types_of_the_node_interface_have_a_topology() {
        let of = |config: &str, topology: &str| AcceleratorType::from_config(config, topology);
        assert_eq!(of("V4", "2x2x4").unwrap().to_string(), "v4-32");
        assert_eq!(of("V5LITE_POD", "4x4").unwrap().to_string(), "v5litepod-16");
        assert!(of("V9", "2x2").unwrap_err().to_string().contains("V5LITE_POD"));
        for wrong in ["", "2x", "0x2", "2x2x-1", "65536x65536", "257x256"] {
            assert!(of("V4", wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn unequal_cores_are_an_error() {
        let slice: AcceleratorType = "v3-32".parse().unwrap();
        assert_eq!(slice.cores_per_task(4).unwrap(), 8);
        for tasks in [0, 3, 33] {
            let text = slice.cores_per_task(tasks).unwrap_err().to_string();
            assert!(text.contains("the 32 TensorCores of v3-32 are unequal on"), "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_name_is_read_as_it_is_printed(place in 0..GENERATIONS.len(), chips in 1..=AcceleratorType::MAX_CHIPS) {
            let slice = AcceleratorType { generation: GENERATIONS[place], chips };
            prop_assert_eq!(slice.to_string().parse::<AcceleratorType>().unwrap(), slice);
        }

        #[test]
        fn no_text_makes_it_panic(text in "\\PC*") {
            let _ = text.parse::<AcceleratorType>();
            let _ = AcceleratorType::from_config("V4", &text);
        }
    }
}
