//! The properties that two processes must share before they look for each other's memory, and the proof that they found
//! it.

use std::fs;
use std::io;

use crate::environment;

/// Why two processes do not share memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::transport) enum Obstacle {
    OtherHost = 1,
    OtherPidNamespace = 2,
    OtherUserNamespace = 3,
    /// The other side could not make a segment.
    NoSegment = 4,
    /// The system does not let this process open it.
    CannotOpen = 5,
    /// The segment found is another one, such as this process's own.
    OtherSegment = 6,
    /// The answering process cannot find another's memory.
    Unsupported = 7,
}

impl Obstacle {
    /// `None` for a code of no obstacle.
    pub(super) fn from_code(code: u8) -> Option<Obstacle> {
        match code {
            0 => None,
            1 => Some(Obstacle::OtherHost),
            2 => Some(Obstacle::OtherPidNamespace),
            3 => Some(Obstacle::OtherUserNamespace),
            4 => Some(Obstacle::NoSegment),
            5 => Some(Obstacle::CannotOpen),
            7 => Some(Obstacle::Unsupported),
            _ => Some(Obstacle::OtherSegment),
        }
    }

    /// Returns whether a segment that is [passed](super::give) may help.
    pub(in crate::transport) fn may_be_passed(self) -> bool {
        match self {
            Obstacle::OtherPidNamespace
            | Obstacle::OtherUserNamespace
            | Obstacle::CannotOpen
            | Obstacle::OtherSegment => true,
            Obstacle::OtherHost | Obstacle::NoSegment | Obstacle::Unsupported => false,
        }
    }

    /// Returns whether to warn: between hosts there is no shared memory to expect.
    pub(in crate::transport) fn is_surprising(self) -> bool {
        self != Obstacle::OtherHost
    }
}

impl std::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Obstacle::OtherHost => "it is on another host, or has another DISTRIBUTE_HOST_ID",
            Obstacle::OtherPidNamespace => {
                "it is in another pid namespace and another network namespace (another container); let containers \
                 share one of both (docker run --pid or --network) to use shared memory"
            }
            Obstacle::OtherUserNamespace => {
                "it is in another user namespace and another network namespace (another container)"
            }
            Obstacle::NoSegment => "one of both could not create a segment",
            Obstacle::CannotOpen => "the system lets neither of both open or receive the other's segment",
            Obstacle::OtherSegment => "what was found in its place was not the other's segment",
            Obstacle::Unsupported => "one of both cannot read /proc, as on systems other than Linux",
        })
    }
}

/// The host and namespaces of a process, which must be equal for process ids to mean the same processes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PidScope {
    host: String,
    pid_namespace: String,
    user_namespace: String,
}

impl PidScope {
    /// Longest encoded place.
    pub(super) const LEN: usize = 256;

    /// This process's. `DISTRIBUTE_HOST_ID` keeps processes apart that must not share memory.
    pub(super) fn here() -> io::Result<PidScope> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let own = environment::raw("DISTRIBUTE_HOST_ID");
        let namespace = |kind: &str| -> io::Result<String> {
            Ok(fs::read_link(format!("/proc/self/ns/{kind}"))?.to_string_lossy().into_owned())
        };
        let host = format!("{} {}", boot.trim(), own.to_string_lossy());
        let place = PidScope { host, pid_namespace: namespace("pid")?, user_namespace: namespace("user")? };
        // What was cut off could be what differs.
        if place.text().len() > PidScope::LEN {
            return Err(io::Error::other("DISTRIBUTE_HOST_ID has more than 128 bytes"));
        }
        Ok(place)
    }

    pub(super) fn encode(&self) -> [u8; PidScope::LEN] {
        let mut bytes = [0; PidScope::LEN];
        bytes.iter_mut().zip(self.text().bytes()).for_each(|(place, byte)| *place = byte);
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> PidScope {
        let text = String::from_utf8_lossy(bytes);
        let mut parts = text.trim_end_matches('\0').rsplitn(3, '\n').map(str::to_owned);
        let mut part = || parts.next().unwrap_or_default();
        PidScope { user_namespace: part(), pid_namespace: part(), host: part() }
    }

    /// Why a process at `other` cannot be found from here, if so.
    pub(super) fn obstacle(&self, other: &PidScope) -> Option<Obstacle> {
        match other {
            _ if self.host.is_empty() || self.host != other.host => Some(Obstacle::OtherHost),
            _ if self.pid_namespace != other.pid_namespace => Some(Obstacle::OtherPidNamespace),
            _ if self.user_namespace != other.user_namespace => Some(Obstacle::OtherUserNamespace),
            _ => None,
        }
    }

    fn text(&self) -> String {
        format!("{}\n{}\n{}", self.host, self.pid_namespace, self.user_namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_differ_by_host_and_namespaces() {
        let here = PidScope::here().unwrap();
        assert_eq!(PidScope::decode(&here.encode()), here);
        assert_eq!(here.obstacle(&PidScope::decode(&here.encode())), None);
        let other = |change: fn(&mut PidScope)| {
            let mut place = PidScope::here().unwrap();
            change(&mut place);
            here.obstacle(&PidScope::decode(&place.encode()))
        };
        assert_eq!(other(|place| place.host.push('2')), Some(Obstacle::OtherHost));
        assert_eq!(other(|place| place.pid_namespace = "pid:[1]".to_owned()), Some(Obstacle::OtherPidNamespace));
        assert_eq!(other(|place| place.user_namespace = "user:[1]".to_owned()), Some(Obstacle::OtherUserNamespace));
        // Unknown places are different hosts.
        assert_eq!(here.obstacle(&PidScope::decode(&[0; PidScope::LEN])), Some(Obstacle::OtherHost));
    }
}
