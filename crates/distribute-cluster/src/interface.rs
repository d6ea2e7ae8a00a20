//! The choice of the network interface at which other members reach this process.

use std::net::IpAddr;

use crate::{Error, Result, environment};

/// Variables that choose an interface; the first that is set is used.
const VARIABLES: [&str; 3] = ["DISTRIBUTE_INTERFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"];

/// A choice among the interfaces of a machine, in the syntax of NCCL_SOCKET_IFNAME: `eth` (names with this prefix),
/// `=eth0` (this name), `^lo,docker` (all but names with these prefixes), or an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceChoice {
    /// The source of the choice, as named in errors.
    variable: &'static str,
    given: String,
}

impl InterfaceChoice {
    /// Creates a choice made by the program itself.
    pub fn new(given: &str) -> InterfaceChoice {
        InterfaceChoice { variable: "the option interface", given: given.to_owned() }
    }

    /// Returns the source of the choice, such as DISTRIBUTE_INTERFACE.
    pub fn variable(&self) -> &'static str {
        self.variable
    }

    /// Reads the choice; an empty variable counts as unset.
    pub(crate) fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Option<InterfaceChoice> {
        let variable = environment::set(&variable);
        VARIABLES.into_iter().find_map(|name| Some(InterfaceChoice { variable: name, given: variable(name)? }))
    }

    /// Returns an address of the chosen interfaces: of the loopback interface only if there is no other, preferably of
    /// the same protocol as `like`.
    pub(crate) fn address(&self, like: Option<IpAddr>) -> Result<IpAddr> {
        let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
        let interfaces: Vec<(String, IpAddr)> =
            interfaces.into_iter().map(|interface| (interface.name.clone(), interface.ip())).collect();
        self.among(&interfaces, like)
    }

    fn among(&self, interfaces: &[(String, IpAddr)], like: Option<IpAddr>) -> Result<IpAddr> {
        let chosen = interfaces.iter().filter(|(name, ip)| self.names(name, *ip)).map(|(_, ip)| *ip);
        let wants_v6 = like.is_some_and(|like| like.is_ipv6());
        // A link-local address is unusable on another machine without a scope id.
        let usable = chosen.filter(|ip| !matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local()));
        // Exclusions leave the loopback interface in, which no other machine reaches.
        usable.min_by_key(|ip| (ip.is_loopback(), ip.is_ipv6() != wants_v6)).ok_or_else(|| {
            let mut known: Vec<&str> = Vec::new();
            for (name, _) in interfaces {
                // An interface is listed once per address, and those of one protocol come before those of the other.
                if !known.contains(&name.as_str()) {
                    known.push(name);
                }
            }
            Error::config(
                self.variable,
                "no interface of this machine with an address is chosen by it",
                &self.given,
                "an address, or names of interfaces: eth (those that begin so), =eth0 (that one), ^lo,docker (all \
                 others)",
                format!("This machine has {}.", known.join(", ")),
            )
        })
    }

    fn names(&self, name: &str, ip: IpAddr) -> bool {
        let given = self.given.trim();
        if let Ok(address) = given.parse::<IpAddr>() {
            return address == ip;
        }
        let list = given.trim_start_matches(['^', '=']);
        let mut entries = list.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        match given.as_bytes().first() {
            Some(b'^') => !entries.any(|entry| name.starts_with(entry)),
            Some(b'=') => entries.any(|entry| name == entry),
            _ => entries.any(|entry| name.starts_with(entry)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interfaces() -> Vec<(String, IpAddr)> {
        [("lo", "127.0.0.1"), ("eth0", "fe80::1"), ("eth0", "10.0.0.5"), ("eth0", "2001:db8::5"), ("eth01", "10.0.1.5")]
            .into_iter()
            .chain([("docker0", "172.17.0.1"), ("lo", "::1")])
            .map(|(name, ip)| (name.to_owned(), ip.parse().unwrap()))
            .collect()
    }

    fn chosen(given: &str, like: &str) -> Result<String> {
        let choice = InterfaceChoice { variable: "DISTRIBUTE_INTERFACE", given: given.to_owned() };
        choice.among(&interfaces(), like.parse().ok()).map(|ip| ip.to_string())
    }

    #[test]
    fn names_prefixes_exclusions_and_addresses_choose() {
        for (given, like, expected) in [
            ("eth", "10.9.9.9", "10.0.0.5"),
            ("eth", "2001:db8::9", "2001:db8::5"),
            ("=eth01", "", "10.0.1.5"),
            ("docker, eth", "", "10.0.0.5"),
            ("^lo,eth", "", "172.17.0.1"),
            ("^docker", "", "10.0.0.5"),
            ("^docker", "127.0.0.1", "10.0.0.5"),
            ("^docker,eth", "", "127.0.0.1"),
            ("10.0.1.5", "", "10.0.1.5"),
            ("lo", "", "127.0.0.1"),
        ] {
            assert_eq!(chosen(given, like).unwrap(), expected, "{given} {like}");
        }
    }

    #[test]
    fn what_chooses_nothing_is_an_error_that_lists_the_interfaces() {
        for given in ["ib0", "=eth", "192.168.0.1", "^lo,eth,docker"] {
            let text = chosen(given, "").unwrap_err().to_string();
            assert!(text.contains(given) && text.contains("has lo, eth0, eth01, docker0."), "{text}");
        }
    }

    #[test]
    fn the_projects_own_variable_comes_first() {
        let both = |name: &str| match name {
            "DISTRIBUTE_INTERFACE" => Some("eth0".to_owned()),
            "NCCL_SOCKET_IFNAME" => Some("ib".to_owned()),
            _ => None,
        };
        assert_eq!(InterfaceChoice::from_vars(both).unwrap().given, "eth0");
        assert_eq!(InterfaceChoice::from_vars(|_| None), None);
        // As a template without a value sets it.
        assert_eq!(InterfaceChoice::from_vars(|name| Some(" ".to_owned()).filter(|_| name.contains("DISTR"))), None);
        let second = |name: &str| if name == VARIABLES[0] { Some(String::new()) } else { both(name) };
        assert_eq!(InterfaceChoice::from_vars(second).unwrap().given, "ib");
    }

    #[test]
    fn this_machine_has_a_loopback_interface() {
        let choice = InterfaceChoice { variable: "DISTRIBUTE_INTERFACE", given: "lo".to_owned() };
        assert!(choice.address(None).unwrap().is_loopback());
    }
}
