//! Checks of the options of `distribute run` that depend on each other.

use super::{Run, SSH};
use crate::elastic::MAX_RESTARTS;
use crate::error::Error;

impl Run {
    /// Returns the number of hosts.
    pub(crate) fn nodes(&self) -> usize {
        self.hosts.as_ref().map_or(self.nnodes as usize, Vec::len)
    }

    /// Returns how often the job, or each worker of an elastic one, may be started again.
    pub(crate) fn max_restarts(&self) -> u32 {
        self.max_restarts.unwrap_or(if self.elastic.is_some() { MAX_RESTARTS } else { 0 })
    }

    /// Returns the command that starts launchers on other hosts.
    pub(crate) fn ssh_command(&self) -> String {
        self.ssh.clone().unwrap_or_else(|| SSH.to_owned())
    }

    /// Checks options that depend on each other.
    ///
    /// # Errors
    /// [`Error::Options`].
    pub(crate) fn check(&self) -> Result<(), Error> {
        let wrong = |problem: &'static str, given: String, expected: &str| {
            Err(Error::Options { problem, given, expected: expected.to_owned() })
        };
        let hosts = self.hosts.iter().flatten();
        if hosts.clone().any(|host| host.trim().is_empty() || host.starts_with('-')) {
            let given = self.hosts.clone().unwrap_or_default().join(",");
            return wrong("--hosts has an entry that is not a host", given, "names or addresses, such as a,b,10.0.0.7");
        }
        let mut sorted: Vec<_> = hosts.collect();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return wrong(
                "--hosts names a host twice",
                twice[0].clone(),
                "each host once; its launcher starts all of its tasks",
            );
        }
        if self.hosts.is_some() && self.nnodes > 1 && self.nnodes as usize != self.nodes() {
            let given = format!("--nnodes {} and {} hosts", self.nnodes, self.nodes());
            return wrong("--nnodes contradicts --hosts", given, "one of the two");
        }
        if self.hosts.is_none() && self.nnodes > 1 && self.rendezvous.is_none() {
            let expected = "--rendezvous HOST:PORT with an address of one of the hosts, or --hosts A,B --ssh";
            return wrong("several hosts, and no place where they meet", format!("--nnodes {}", self.nnodes), expected);
        }
        let port = |address: &String| {
            address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        };
        if let Some(address) = self.rendezvous.as_ref().filter(|address| !port(address)) {
            return wrong("--rendezvous is not an address", address.clone(), "HOST:PORT, such as 10.0.0.1:29400");
        }
        if let Some(rank) = self.node_rank.filter(|rank| *rank >= self.nnodes && self.hosts.is_none()) {
            let expected = format!("a number below --nnodes {}", self.nnodes);
            return wrong("--node-rank is the number of no host", rank.to_string(), &expected);
        }
        if let (Some(window), None, None, 0) =
            (self.restart_window, self.max_restarts, self.elastic, self.chief_restarts)
        {
            let given = format!("--restart-window {window}");
            let expected = "--max-restarts N too, or --chief-restarts N";
            return wrong("--restart-window counts restarts, and none are allowed", given, expected);
        }
        if self.chief_restarts > 0 && self.ps == 0 {
            let given = format!("--chief-restarts {}", self.chief_restarts);
            let expected = "--ps N too; without parameter servers nothing outlives the chief, and --max-restarts N \
                            starts all tasks again";
            return wrong("only the chief of a job with parameter servers is started again alone", given, expected);
        }
        if self.chief_restarts > 0 && (self.hosts.is_some() || self.nodes() > 1) {
            let given = format!("--chief-restarts {} and {} hosts", self.chief_restarts, self.nodes());
            let expected = "one host, or --max-restarts N, which starts all tasks again";
            return wrong("the chief is started again alone on one host", given, expected);
        }
        if self.tls && (self.hosts.is_some() || self.nodes() > 1) {
            let expected = "one host; on several, certificates of `distribute certs` in DISTRIBUTE_TLS_CERT on each";
            return wrong("--tls makes certificates for one host", format!("{} hosts", self.nodes()), expected);
        }
        self.elastic.map_or(Ok(()), |elastic| elastic.check(self))
    }
}
