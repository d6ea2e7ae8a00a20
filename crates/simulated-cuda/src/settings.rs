//! The settings of the environment, read once.

use std::collections::BTreeSet;
use std::env;
use std::fmt::Display;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

use crate::error::Code;
use crate::functions::is_exported;

/// The properties and the behaviour of the simulated machine.
pub(crate) struct Settings {
    /// Physical indices of the visible devices, in order.
    pub(crate) visible: Vec<u32>,
    pub(crate) memory_bytes: u64,
    pub(crate) peers: Peers,
    pub(crate) arch: Arch,
    pub(crate) driver_version: i32,
    pub(crate) pools: bool,
    pub(crate) delay: Duration,
    pub(crate) seed: u64,
    pub(crate) failures: Vec<Failure>,
    pub(crate) slow: Vec<Slow>,
    pub(crate) deadline: Duration,
    pub(crate) compiler: String,
    pub(crate) trace: bool,
}

/// A compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Arch {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// The pairs of devices with peer access.
pub(crate) enum Peers {
    All,
    Pairs(BTreeSet<(u32, u32)>),
}

/// An error that a call returns instead of doing its work.
#[derive(Debug, PartialEq)]
pub(crate) struct Failure {
    pub(crate) function: String,
    pub(crate) nth: u64,
    pub(crate) code: Code,
}

/// A function whose calls take at least some time.
#[derive(Debug, PartialEq)]
pub(crate) struct Slow {
    pub(crate) function: String,
    pub(crate) time: Duration,
}

/// Returns the settings of this process.
///
/// # Panics
///
/// If a variable is malformed: a test that misspells one must fail, not run with a default.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let devices = number("SIMULATED_CUDA_DEVICES", 2);
        Settings {
            visible: visible(devices, env::var("CUDA_VISIBLE_DEVICES").ok().as_deref()),
            memory_bytes: number::<u64>("SIMULATED_CUDA_MEMORY_MIB", 1024) << 20,
            peers: parsed("SIMULATED_CUDA_PEER", Peers::All),
            arch: parsed("SIMULATED_CUDA_ARCH", Arch { major: 9, minor: 0 }),
            driver_version: number("SIMULATED_CUDA_DRIVER_VERSION", 13000),
            pools: number("SIMULATED_CUDA_POOLS", 1) != 0,
            delay: Duration::from_micros(number("SIMULATED_CUDA_DELAY_US", 0)),
            seed: number("SIMULATED_CUDA_SEED", 1),
            failures: list("SIMULATED_CUDA_FAIL"),
            slow: list("SIMULATED_CUDA_SLOW"),
            deadline: Duration::from_secs(number("SIMULATED_CUDA_DEADLINE_S", 120)),
            compiler: text("SIMULATED_CUDA_CC").unwrap_or_else(|| "cc".to_owned()),
            trace: number("SIMULATED_CUDA_TRACE", 0) != 0,
        }
    })
}

impl Peers {
    pub(crate) fn allow(&self, from: u32, to: u32) -> bool {
        from != to
            && match self {
                Self::All => true,
                Self::Pairs(pairs) => pairs.contains(&(from, to)),
            }
    }
}

impl FromStr for Peers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            "none" => Ok(Self::Pairs(BTreeSet::new())),
            pairs => pairs
                .split(',')
                .map(|pair| {
                    let (from, to) =
                        pair.split_once('-').ok_or_else(|| format!("{pair}: expected a pair such as 0-1"))?;
                    let index = |text: &str| text.trim().parse().map_err(|e| format!("{pair}: {e}"));
                    Ok((index(from)?, index(to)?))
                })
                .collect::<Result<_, String>>()
                .map(Self::Pairs),
        }
    }
}

impl FromStr for Arch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (major, minor) = text.split_once('.').ok_or("expected major.minor")?;
        let part = |text: &str| text.parse().map_err(|e| format!("{text}: {e}"));
        Ok(Self { major: part(major)?, minor: part(minor)? })
    }
}

impl FromStr for Failure {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<_> = text.trim().split(':').collect();
        let [function, nth, code] = parts[..] else { return Err("expected function:nth:code".to_owned()) };
        let nth = nth.parse().map_err(|e| format!("{nth}: {e}"))?;
        let code = Code(code.parse().map_err(|e| format!("{code}: {e}"))?);
        if code.name().is_none() {
            return Err(format!("{} is not a CUresult", code.0));
        }
        Ok(Self { function: exported(function)?, nth, code })
    }
}

impl FromStr for Slow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (function, time) = text.trim().split_once(':').ok_or("expected function:microseconds")?;
        let time = Duration::from_micros(time.parse().map_err(|e| format!("{time}: {e}"))?);
        Ok(Self { function: exported(function)?, time })
    }
}

/// Returns the name of a function, which must be exported: another one is never called.
fn exported(function: &str) -> Result<String, String> {
    match is_exported(function) {
        true => Ok(function.to_owned()),
        false => Err(format!("the simulation exports no function {function}; give the name of one, with its suffix")),
    }
}

/// Returns the visible devices as the driver determines them: an index that is not a device ends the list.
fn visible(devices: u32, variable: Option<&str>) -> Vec<u32> {
    let Some(list) = variable else { return (0..devices).collect() };
    list.split(',').map_while(|index| index.trim().parse().ok().filter(|&index: &u32| index < devices)).collect()
}

fn text(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns the values of a variable that are separated by semicolons.
fn list<T: FromStr<Err: Display>>(name: &str) -> Vec<T> {
    let value = text(name).unwrap_or_default();
    value.split(';').filter(|part| !part.is_empty()).map(|part| read(name, part)).collect()
}

fn number<T: FromStr<Err: Display>>(name: &str, default: T) -> T {
    parsed(name, default)
}

fn parsed<T: FromStr<Err: Display>>(name: &str, default: T) -> T {
    text(name).map_or(default, |value| read(name, &value))
}

fn read<T: FromStr<Err: Display>>(name: &str, value: &str) -> T {
    value.parse().unwrap_or_else(|e| panic!("{name}={value}: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_are_read_as_the_driver_reads_them() {
        assert_eq!(visible(2, None), [0, 1]);
        assert_eq!(visible(2, Some("1,0")), [1, 0]);
        assert_eq!(visible(3, Some("2,7,0")), [2]);
        assert!(visible(2, Some("")).is_empty());
        assert!(visible(2, Some("-1")).is_empty());
    }

    #[test]
    fn peers_are_all_none_or_pairs_in_one_direction() {
        let pairs: Peers = "0-1,2-0".parse().unwrap();
        assert!(pairs.allow(0, 1) && !pairs.allow(1, 0) && pairs.allow(2, 0));
        assert!(Peers::All.allow(0, 1) && !Peers::All.allow(1, 1));
        assert!(!"none".parse::<Peers>().unwrap().allow(0, 1));
        assert!("0+1".parse::<Peers>().is_err());
    }

    #[test]
    fn a_failure_names_function_call_and_code() {
        let failure: Failure = "cuMemAlloc_v2:3:2".parse().unwrap();
        assert_eq!(failure, Failure { function: "cuMemAlloc_v2".to_owned(), nth: 3, code: Code::OUT_OF_MEMORY });
        assert!("cuMemAlloc_v2:3".parse::<Failure>().is_err());
        assert!("cuMemAlloc_v2:3:98765".parse::<Failure>().is_err());
    }

    #[test]
    fn a_function_that_is_not_exported_is_refused() {
        for text in ["cuMemAlloc:1:2", "cuMemAloc_v2:1:2", "cuGetErrorText:1:2"] {
            let problem = text.parse::<Failure>().unwrap_err();
            let name = text.split(':').next().unwrap();
            assert!(problem.contains(&format!("no function {name};")), "{problem}");
        }
        assert!("nvrtcCompileProgram:1:6".parse::<Failure>().is_ok() && "nvrtcVersion:1000".parse::<Slow>().is_ok());
        assert!("cuEventRecrd:1500".parse::<Slow>().is_err());
    }

    #[test]
    fn a_slow_function_has_a_time() {
        let slow: Slow = "cuEventRecord:1500".parse().unwrap();
        assert_eq!(slow, Slow { function: "cuEventRecord".to_owned(), time: Duration::from_micros(1500) });
        assert!("cuEventRecord".parse::<Slow>().is_err() && "cuEventRecord:long".parse::<Slow>().is_err());
    }
}
