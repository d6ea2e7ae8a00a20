//! Names, quantities and variables, as users give them and as platforms write them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A name of a job: an RFC 1035 label, since it is also the name of a Service and a part of host names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Name(pub(super) String);

impl FromStr for Name {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let begins = given.starts_with(|first: char| first.is_ascii_lowercase());
        if !(begins && is_label(given)) {
            return Err("expected lower-case letters, digits and \"-\", with a letter first, a letter or digit last, \
                        and at most 63 of them; give another name"
                .to_owned());
        }
        Ok(Self(given.to_owned()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A name of something that exists: a namespace, a claim of a volume, a runtime. RFC 1123.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Existing(pub(super) String);

impl FromStr for Existing {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        if given.len() > 253 || !given.split('.').all(is_label) {
            return Err("expected lower-case letters, digits, \"-\" and \".\", such as training-data; see kubectl get"
                .to_owned());
        }
        Ok(Self(given.to_owned()))
    }
}

/// A name of Slurm's: a partition or an account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SlurmName(pub(super) String);

impl FromStr for SlurmName {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let begins = given.starts_with(|first: char| first.is_ascii_alphanumeric());
        if !begins || !given.chars().all(|next| next.is_ascii_alphanumeric() || "-_.,".contains(next)) {
            return Err("expected letters, digits, \"-\", \"_\" and \".\", or several names with commas; see sinfo \
                        and sacctmgr"
                .to_owned());
        }
        Ok(Self(given.to_owned()))
    }
}

/// A container image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Image(pub(super) String);

impl FromStr for Image {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        // TrainJob's schema has the limit; registries take fewer.
        let is_valid = (1..=500).contains(&given.len()) && given.chars().all(|next| next.is_ascii_graphic());
        match is_valid {
            true => Ok(Self(given.to_owned())),
            false => Err("expected an image such as registry.example/mnist:1, without spaces".to_owned()),
        }
    }
}

/// An absolute path in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MountPath(pub(super) String);

impl FromStr for MountPath {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let is_valid = given.starts_with('/') && given.len() > 1 && !given.contains([':', '\0', '\n']);
        match is_valid && !given.split('/').any(|part| part == "..") {
            true => Ok(Self(given.to_owned())),
            false => Err("expected an absolute path without \":\" and \"..\", such as /checkpoints".to_owned()),
        }
    }
}

/// A number of CPUs, in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cpus(u32);

impl Cpus {
    /// Returns the number if it is whole.
    pub(super) fn whole(self) -> Option<u32> {
        self.0.is_multiple_of(1000).then_some(self.0 / 1000)
    }

    /// Returns the number as a Kubernetes quantity: `4` or `500m`.
    pub(super) fn quantity(self) -> String {
        self.whole().map_or_else(|| format!("{}m", self.0), |whole| whole.to_string())
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.whole() {
            Some(whole) => write!(f, "{whole}"),
            None => f.write_str(format!("{}.{:03}", self.0 / 1000, self.0 % 1000).trim_end_matches('0')),
        }
    }
}

impl FromStr for Cpus {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let digits = |text: &str| text.bytes().all(|digit| digit.is_ascii_digit()).then(|| text.parse::<u32>().ok());
        let thousandths = match (given.strip_suffix('m'), given.split_once('.')) {
            (Some(thousandths), None) => digits(thousandths).flatten(),
            (None, None) => digits(given).flatten().and_then(|whole| whole.checked_mul(1000)),
            (None, Some((whole, part))) if (1..=3).contains(&part.len()) => {
                let part = digits(&format!("{part:0<3}")).flatten();
                let whole = digits(whole).flatten().and_then(|whole| whole.checked_mul(1000));
                whole.zip(part).and_then(|(whole, part)| whole.checked_add(part))
            }
            _ => None,
        };
        let expected = || "expected CPUs such as 4, 0.5 or 500m".to_owned();
        thousandths.filter(|thousandths| *thousandths > 0).map(Self).ok_or_else(expected)
    }
}

/// A size in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(u64);

impl Size {
    /// Returns the size in MiB, rounded up.
    pub(super) fn mebibytes(self) -> u64 {
        self.0.div_ceil(1 << 20)
    }

    /// Returns the size times `count`, if it fits.
    pub(super) fn times(self, count: u32) -> Option<Self> {
        self.0.checked_mul(count.into()).map(Self)
    }

    /// Returns the size as Docker Compose reads it, whose units are powers of 1024: `16gb`.
    pub(super) fn compose(self) -> String {
        let units = [("gb", 1 << 30), ("mb", 1 << 20), ("kb", 1 << 10), ("b", 1)];
        self.in_units(&units)
    }

    fn in_units(self, units: &[(&str, u64)]) -> String {
        let fits = units.iter().filter(|(_, unit)| self.0.is_multiple_of(*unit));
        let shortest = fits.max_by_key(|(_, unit)| *unit);
        shortest.map_or_else(|| self.0.to_string(), |(name, unit)| format!("{}{name}", self.0 / unit))
    }
}

/// Writes the size as a Kubernetes quantity: `16Gi`.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.in_units(&UNITS))
    }
}

/// Units with their bytes.
const UNITS: [(&str, u64); 8] = [
    ("Ti", 1 << 40),
    ("Gi", 1 << 30),
    ("Mi", 1 << 20),
    ("Ki", 1 << 10),
    ("T", 1_000_000_000_000),
    ("G", 1_000_000_000),
    ("M", 1_000_000),
    ("k", 1000),
];

impl FromStr for Size {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let (number, unit) = given.split_at(given.find(|next: char| !next.is_ascii_digit()).unwrap_or(given.len()));
        let unit = match unit {
            "" => Some(1),
            name => UNITS.iter().find(|(known, _)| *known == name).map(|(_, bytes)| *bytes),
        };
        let bytes = number.parse::<u64>().ok().zip(unit).and_then(|(number, unit)| number.checked_mul(unit));
        bytes.filter(|bytes| *bytes > 0).map(Self).ok_or_else(|| {
            "expected a whole number of bytes with a unit: Ki, Mi, Gi, Ti (powers of 1024) or k, M, G, T (of 1000), \
             such as 16Gi"
                .to_owned()
        })
    }
}

/// A time in whole seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TimeLimit(Duration);

impl TimeLimit {
    pub(super) fn seconds(self) -> u64 {
        self.0.as_secs()
    }

    /// Returns the time as Slurm reads it: days-hours:minutes:seconds.
    pub(super) fn slurm(self) -> String {
        let seconds = self.seconds();
        let (days, hours) = (seconds / 86_400, seconds / 3600 % 24);
        format!("{days}-{hours:02}:{:02}:{:02}", seconds / 60 % 60, seconds % 60)
    }
}

impl FromStr for TimeLimit {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let time = humantime::parse_duration(given).ok();
        let is_valid = |time: &Duration| time.subsec_nanos() == 0 && (1..=LONGEST).contains(&time.as_secs());
        let expected = || "expected whole seconds up to a year, such as 90m, 12h or \"1day 6h\"".to_owned();
        time.filter(is_valid).map(Self).ok_or_else(expected)
    }
}

/// A year, in seconds.
const LONGEST: u64 = 366 * 86_400;

/// A variable of the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Variable {
    pub(super) name: String,
    pub(super) value: String,
}

impl FromStr for Variable {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let Some((name, value)) = given.split_once('=') else {
            return Err("expected NAME=VALUE; write NAME= for an empty value".to_owned());
        };
        let begins = name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
        if !begins || !name.chars().all(|next| next.is_ascii_alphanumeric() || next == '_') {
            return Err("expected a name of letters, digits and \"_\", without a digit first".to_owned());
        }
        if describes_a_job(name) {
            return Err(format!(
                "expected a variable of the program's own; {name} describes a job, which the job file or its platform \
                 does; leave it out"
            ));
        }
        Ok(Self { name: name.to_owned(), value: value.to_owned() })
    }
}

/// Returns whether a variable says which task a process is. One of these in addition to the platform's would contradict
/// it.
fn describes_a_job(name: &str) -> bool {
    DESCRIBING.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

const DESCRIBING: [&str; 14] = [
    "TF_CONFIG",
    "CLUSTER_SPEC",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "JOB_COMPLETION_INDEX",
    "DISTRIBUTE_PORT",
    "DISTRIBUTE_JOB_ID",
    "DISTRIBUTE_ALONE",
    "SM_HOSTS",
    "SM_CURRENT_HOST",
];

const PREFIXES: [&str; 7] = ["PET_", "JAX_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_"];

/// RFC 1123.
fn is_label(given: &str) -> bool {
    let is_inner = |next: char| next.is_ascii_lowercase() || next.is_ascii_digit() || next == '-';
    (1..=63).contains(&given.len()) && given.chars().all(is_inner) && !given.starts_with('-') && !given.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_labels() {
        for given in ["a", "mnist-2", "no", &"a".repeat(63)] {
            assert_eq!(given.parse::<Name>().unwrap().0, given);
        }
        for given in ["", "2a", "a_b", "A", "a.b", "-a", "a-", "ä", "a\nb", &"a".repeat(64)] {
            assert!(given.parse::<Name>().is_err(), "{given:?}");
        }
        assert!("7.data-a".parse::<Existing>().is_ok());
        for given in ["", "a..b", "a:b", "a b", &"a.".repeat(127)] {
            assert!(given.parse::<Existing>().is_err(), "{given:?}");
        }
        assert!("gpu,long_1.x".parse::<SlurmName>().is_ok());
        for given in ["", "-p", "a b", "a\n#SBATCH --uid=0", "a;b", "a=b"] {
            assert!(given.parse::<SlurmName>().is_err(), "{given:?}");
        }
        for given in ["", "a b", "a\n", "bild:ä"] {
            assert!(given.parse::<Image>().is_err(), "{given:?}");
        }
        for given in ["", "/", "data", "/a:b", "/a/../b", "/a\nb"] {
            assert!(given.parse::<MountPath>().is_err(), "{given:?}");
        }
    }

    #[test]
    fn quantities_keep_their_value() {
        for (given, quantity, plain) in [("4", "4", "4"), ("0.5", "500m", "0.5"), ("1500m", "1500m", "1.5")] {
            let cpus: Cpus = given.parse().unwrap();
            assert_eq!((cpus.quantity().as_str(), cpus.to_string().as_str()), (quantity, plain));
        }
        for given in ["", "0", "-1", "+1", "1e3", "0.0001", "m", ".", "1.", "4294967296", "4294968", "1.5m"] {
            assert!(given.parse::<Cpus>().is_err(), "{given:?}");
        }
        for (given, quantity, compose, mebibytes) in [
            ("16Gi", "16Gi", "16gb", 16 << 10),
            ("1024Mi", "1Gi", "1gb", 1024),
            ("16G", "16G", "15625000kb", 15_259),
            ("1500", "1500", "1500b", 1),
            ("3k", "3k", "3000b", 1),
        ] {
            let size: Size = given.parse().unwrap();
            assert_eq!((size.to_string().as_str(), size.compose().as_str()), (quantity, compose), "{given}");
            assert_eq!(size.mebibytes(), mebibytes);
            assert_eq!(size.to_string().parse(), Ok(size));
        }
        for given in ["", "0", "0Gi", "-1", "1.5Gi", "16gb", "16 Gi", "Gi", "99999999999Ti"] {
            assert!(given.parse::<Size>().is_err(), "{given:?}");
        }
        let day: TimeLimit = "1day 2h 3m 4s".parse().unwrap();
        assert_eq!((day.seconds(), day.slurm().as_str()), (93_784, "1-02:03:04"));
        for given in ["", "0s", "500ms", "10", "2years", "h"] {
            assert!(given.parse::<TimeLimit>().is_err(), "{given:?}");
        }
    }

    #[test]
    fn variables_that_describe_a_job_are_refused() {
        let variable: Variable = "A_1=b=c\n".parse().unwrap();
        assert_eq!((variable.name.as_str(), variable.value.as_str()), ("A_1", "b=c\n"));
        assert_eq!("A=".parse::<Variable>().unwrap().value, "");
        for given in ["A", "=a", "1A=", "A-B=1", "TF_CONFIG={}", "RANK=1", "SLURM_PROCID=0", "PET_NNODES=2"] {
            assert!(given.parse::<Variable>().is_err(), "{given:?}");
        }
        assert!("DISTRIBUTE_TIMEOUT=60".parse::<Variable>().is_ok());
    }
}
