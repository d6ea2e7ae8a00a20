//! Reads the numbers and addresses of launchers' variables.

use super::Membership;
use crate::spec::host_problem;
use crate::{ClusterSpec, Error, Result};

/// The environment variables of a process.
#[derive(Clone, Copy)]
pub(super) struct Vars<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    pub(super) fn get(&self, name: &str) -> Option<String> {
        (self.0)(name)
    }

    /// Returns the whole number of a variable, if it is set.
    pub(super) fn number(&self, name: &str) -> Result<Option<u32>> {
        let wrong = |given: &str| wrong(&format!("{name} is not a whole number"), given, "0, 1, 2, …");
        self.get(name).map(|given| given.trim().parse().map_err(|_| wrong(&given))).transpose()
    }

    /// Returns the membership for a rank and size; `leader` is called for its address if there are several processes.
    pub(super) fn ranks(
        &self,
        source: &'static str,
        (rank_name, size_name): (&str, &str),
        leader: impl FnOnce() -> Result<String>,
    ) -> Result<Membership> {
        let number = |name: &str| -> Result<u32> {
            let missing =
                || wrong(&format!("{rank_name} is set, but {name} is not"), &format!("no {name}"), "a number");
            self.number(name)?.ok_or_else(missing)
        };
        let (rank, size) = (number(rank_name)?, number(size_name)?);
        if rank >= size {
            let expected = format!("a rank from 0 to {}", size.saturating_sub(1));
            return Err(wrong(
                &format!("{rank_name}={rank} is outside {size_name}={size}"),
                &rank.to_string(),
                &expected,
            ));
        }
        if size as usize > ClusterSpec::MAX_TASKS {
            let expected = format!("at most {}", ClusterSpec::MAX_TASKS);
            return Err(wrong(&format!("{size_name} is too large"), &size.to_string(), &expected));
        }
        let leader_address = if size == 1 { String::new() } else { leader()? };
        Ok(Membership { source, ..Membership::new(rank, size, leader_address)? })
    }

    /// Returns the leader's address from MASTER_ADDR and the port of DISTRIBUTE_PORT or after MASTER_PORT, else
    /// `otherwise`.
    pub(super) fn at_master(&self, size_name: &str, otherwise: Option<Result<(String, u16)>>) -> Result<String> {
        let own_port = self.port("DISTRIBUTE_PORT")?;
        let master_port = self.port("MASTER_PORT")?;
        if let (Some(own), Some(master)) = (own_port, master_port)
            && own == master
        {
            let problem =
                "DISTRIBUTE_PORT and MASTER_PORT are the same, but launchers listen on MASTER_PORT themselves";
            return Err(wrong(problem, &own.to_string(), "two different ports"));
        }
        let port_after_master = || match master_port {
            Some(u16::MAX) => {
                let expected = "a port below 65535, or DISTRIBUTE_PORT";
                Err(wrong("MASTER_PORT leaves no port after it", &u16::MAX.to_string(), expected))
            }
            Some(master) => Ok(Some(master + 1)),
            None => Ok(None),
        };
        let port = match own_port {
            Some(port) => Some(port),
            None => port_after_master()?,
        };
        match (self.get("MASTER_ADDR"), otherwise) {
            (Some(given), otherwise) => {
                let host = self.host("MASTER_ADDR", &given)?;
                let fallback = otherwise.and_then(Result::ok).map(|(_, port)| port);
                let missing = || {
                    let problem = "MASTER_ADDR is set, but neither MASTER_PORT nor DISTRIBUTE_PORT is";
                    wrong(problem, "no port", "MASTER_PORT, such as 29500")
                };
                Ok(format!("{host}:{}", port.or(fallback).ok_or_else(missing)?))
            }
            (None, Some(address)) => {
                let (host, otherwise) = address?;
                Ok(format!("{host}:{}", port.unwrap_or(otherwise)))
            }
            (None, None) => {
                let size = self.get(size_name).unwrap_or_default();
                let problem = format!("{size_name}={size}, but MASTER_ADDR does not say where rank 0 is");
                Err(wrong(&problem, "no MASTER_ADDR", "the host of rank 0"))
            }
        }
    }

    /// Returns the leader's address where a variable gives its host and another, or the same, its port. DISTRIBUTE_PORT
    /// overrides the port.
    pub(super) fn at_variable(&self, host_name: &str, port_name: &str) -> Result<String> {
        let given = self.get(host_name).ok_or_else(|| {
            wrong(&format!("{host_name} is not set"), &format!("no {host_name}"), "where rank 0 is reached")
        })?;
        let own = self.port("DISTRIBUTE_PORT")?;
        if host_name != port_name {
            let missing = || wrong(&format!("{port_name} is not set"), &format!("no {port_name}"), "a port");
            let port = own.map_or_else(|| self.port(port_name)?.ok_or_else(missing), Ok)?;
            return Ok(format!("{}:{port}", self.host(host_name, &given)?));
        }
        let malformed = || wrong(&format!("{host_name} is not an address"), &given, "host:port");
        let (host, port) = given.trim().rsplit_once(':').ok_or_else(malformed)?;
        let port = port.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(malformed)?;
        Ok(format!("{}:{}", self.host(host_name, host)?, own.unwrap_or(port)))
    }

    /// Returns the host that a variable names; an IPv6 address may be without brackets.
    fn host(&self, name: &str, given: &str) -> Result<String> {
        let given = given.trim();
        let host = match given.parse::<std::net::Ipv6Addr>() {
            Ok(address) => format!("[{address}]"),
            Err(_) => given.to_owned(),
        };
        match host_problem(&host) {
            None => Ok(host),
            Some(_) => {
                let expected = "a host name or IP address, without a port";
                Err(wrong(&format!("{name} is not a host"), given, expected))
            }
        }
    }

    pub(super) fn port(&self, name: &str) -> Result<Option<u16>> {
        let Some(given) = self.get(name) else { return Ok(None) };
        match given.trim().parse::<u16>() {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => Err(wrong(&format!("{name} is not a port"), &given, "a number from 1 to 65535")),
        }
    }
}

pub(super) const ENVIRONMENT: &str = "the environment";

pub(super) fn wrong(problem: &str, given: &str, expected: &str) -> Error {
    let remedy = "Set the variables alike on every process, or start the program with `distribute run`.";
    Error::config(ENVIRONMENT, problem, given, expected, remedy)
}
