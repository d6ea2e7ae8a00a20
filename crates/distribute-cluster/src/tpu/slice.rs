//! The hosts of this machine's slice, by the environment and the metadata server of a TPU VM.

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv6Addr;

use super::accelerator::{AcceleratorType, product};
use crate::http::Client;
use crate::metadata::Metadata;
use crate::spec::host_problem;
use crate::{Error, Result, environment};

/// The hosts of this machine's slice, and this process's place among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slice {
    /// The addresses of the processes of this slice, or of all slices.
    pub(super) addresses: Vec<String>,
    /// The number of processes of one slice.
    pub(super) per_slice: u32,
    pub(super) slices: u32,
    /// This process's index among those of all slices.
    pub(super) process: u32,
    /// The address at which the processes of several slices meet.
    pub(super) leader: Option<String>,
    /// The name of the slice's type; newer ones than this crate knows still have hosts.
    accelerator: Option<String>,
    /// The number of chips of each process.
    chips: Option<u32>,
}

/// Values of the metadata server, by the names of variables.
pub(super) type Attributes = HashMap<String, String>;

/// Returns whether variables name the hosts, so that the metadata server is not needed.
pub(super) fn is_described(variable: &dyn Fn(&str) -> Option<String>) -> bool {
    let set = environment::set(variable);
    let processes = set(ADDRESSES);
    let hosts = processes.or_else(|| set(HOSTS));
    hosts.is_some_and(|hosts| !hosts.contains(',') || set(WORKER).or_else(|| set(TASK)).is_some())
}

/// Asks the metadata server for what it knows of the slice.
pub(super) async fn attributes(client: &Client, metadata: &Metadata) -> Result<Attributes> {
    let mut found = Attributes::new();
    if let Some(text) = metadata.find(client, "instance/attributes/tpu-env").await? {
        for (key, value) in tpu_env(&text) {
            // Variables have the prefix, keys of the attribute need not.
            let key = if key.starts_with("TPU_") || key.starts_with("MEGASCALE_") { key } else { format!("TPU_{key}") };
            found.insert(key, value);
        }
    }
    for (name, attribute) in
        [(TYPE, "accelerator-type"), (WORKER, "agent-worker-number"), (HOSTS, "worker-network-endpoints")]
    {
        if let Some(value) = metadata.find(client, &format!("instance/attributes/{attribute}")).await? {
            found.entry(name.to_owned()).or_insert(value);
        }
    }
    Ok(found)
}

/// Returns the pairs of lines such as `KEY: 'value'`.
pub(super) fn tpu_env(text: &str) -> BTreeMap<String, String> {
    let pair = |line: &str| {
        let (key, value) = line.split_once(':')?;
        let (key, value) = (key.trim().trim_matches(['\'', '"']), value.trim().trim_matches(['\'', '"']));
        (!key.is_empty() && !value.is_empty()).then(|| (key.to_owned(), value.to_owned()))
    };
    text.lines().filter_map(pair).collect()
}

impl Slice {
    /// Reads the slice; variables count before values of the metadata server. Returns `None` if neither names hosts.
    ///
    /// # Errors
    /// [`Error::Config`] if values are missing, malformed or contradictory.
    pub(super) fn read(
        variable: &dyn Fn(&str) -> Option<String>,
        attributes: &Attributes,
        port: u16,
    ) -> Result<Option<Slice>> {
        let set = environment::set(variable);
        let value = |name: &str| set(name).or_else(|| attributes.get(name).cloned());
        let number = |name: &'static str| {
            let wrong = |given: &str| wrong(name, "it is not a whole number", given, "0, 1, 2, …");
            let parse = |given: String| given.trim().parse::<u32>().map_err(|_| wrong(&given));
            value(name).map(parse).transpose()
        };
        let (name, list) = match (value(ADDRESSES), value(HOSTS)) {
            (Some(list), _) => (ADDRESSES, list),
            (None, Some(list)) => (HOSTS, list),
            (None, None) => return Ok(None),
        };
        let addresses = addresses(name, &list, port)?;
        // Processes of one host have a number of their own.
        let ids = if name == ADDRESSES { [TASK, WORKER] } else { [WORKER, TASK] };
        let id = match number(ids[0])? {
            Some(id) => Some(id),
            None => number(ids[1])?,
        };
        let slices = number(SLICES)?.unwrap_or(1).max(1);
        let bounds = ["TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS"].into_iter().find_map(|name| Some((name, value(name)?)));
        let count = addresses.len() as u32;
        let per_slice = match &bounds {
            None => count,
            Some((bounds, given)) => {
                let processes = product(given, ',');
                let processes = processes.ok_or_else(|| wrong(bounds, "they are not bounds", given, "x,y,z"))?;
                if count != processes && processes.checked_mul(slices) != Some(count) {
                    let problem = format!("they are the bounds of {processes} processes, but {name} names {count}");
                    let expected = format!("bounds of {count} processes, or {processes} of them in {name}");
                    return Err(wrong(bounds, &problem, given, &expected));
                }
                processes
            }
        };
        let id = match id {
            Some(id) if id < per_slice => id,
            None if per_slice == 1 => 0,
            Some(id) => {
                let expected = format!("a number below the {per_slice} processes of the slice");
                return Err(wrong(ids[0], "it is outside the slice", &id.to_string(), &expected));
            }
            None => return Err(wrong(ids[0], "it is not set", "nothing", "this process's number in the slice")),
        };
        let slice = number(SLICE)?.unwrap_or(0);
        if slice >= slices {
            let expected = format!("a number below {SLICES}, {slices}");
            return Err(wrong(SLICE, "it is outside the job", &slice.to_string(), &expected));
        }
        let too_many = || wrong(SLICES, "the job is too large", &slices.to_string(), "at most 100000 processes");
        let total = slices.checked_mul(per_slice).filter(|total| *total as usize <= crate::ClusterSpec::MAX_TASKS);
        total.ok_or_else(too_many)?;
        let accelerator = value(TYPE);
        let chips = match ["TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"]
            .into_iter()
            .find_map(|name| Some((name, value(name)?)))
        {
            None => None,
            Some((name, given)) => {
                Some(product(&given, ',').ok_or_else(|| wrong(name, "they are not bounds", &given, "x,y,z"))?)
            }
        };
        let leader = value(LEADER).filter(|_| slices > 1).map(|leader| match host(leader.trim()) {
            Some(host) => Ok(format!("{host}:{port}")),
            None => Err(wrong(LEADER, "it is not an address", &leader, "host:port or [fd00::1]:port")),
        });
        let leader = leader.transpose()?;
        let process = id + slice * per_slice;
        Ok(Some(Slice { addresses, per_slice, slices, process, leader, accelerator, chips }))
    }

    /// Returns whether the addresses of all slices are known.
    pub(super) fn is_whole(&self) -> bool {
        self.addresses.len() as u32 == self.per_slice * self.slices
    }

    /// Returns the number of TensorCores of each process, if the type of the slice is known.
    ///
    /// # Errors
    /// [`Error::Config`] if it is not the same for all.
    pub(super) fn cores_per_process(&self) -> Result<Option<u32>> {
        let Some(name) = &self.accelerator else { return Ok(None) };
        let accelerator: AcceleratorType = name.parse()?;
        let cores = accelerator.cores_per_task(self.per_slice)?;
        match self.chips.map(|chips| chips.saturating_mul(accelerator.cores_per_chip())) {
            Some(other) if other != cores => {
                let problem = format!("the TensorCores of {accelerator} are unequal on {} processes", self.per_slice);
                let expected = format!("{cores} for each");
                Err(wrong("TPU_CHIPS_PER_PROCESS_BOUNDS", &problem, &format!("{other} for each"), &expected))
            }
            _ => Ok(Some(cores)),
        }
    }
}

/// Returns the host of `host` or `host:port`, whose IPv6 addresses are in brackets; `None` if there is none.
fn host(given: &str) -> Option<String> {
    let end = given.rfind(']').unwrap_or(0);
    let host = match given[end..].rsplit_once(':') {
        Some((_, port)) => &given[..given.len() - port.len() - 1],
        None => given,
    };
    host_problem(host).is_none().then(|| host.to_owned())
}

/// Returns the host of `host` or `name:id:host`, whose IPv6 addresses may be without brackets.
fn host_of_worker(given: &str) -> Option<String> {
    let bare = |given: &str| given.parse::<Ipv6Addr>().ok().map(|address| format!("[{address}]"));
    let of_endpoint = || {
        let (_, rest) = given.split_once(':')?;
        let (id, address) = rest.split_once(':')?;
        id.bytes().all(|byte| byte.is_ascii_digit()).then(|| bare(address).or_else(|| host(address)))?
    };
    bare(given).or_else(|| host(given)).or_else(of_endpoint)
}

/// Returns the addresses of a list of `host`, `host:port` or `name:id:address`. Ports are our own: those in the list
/// belong to libtpu. Processes of one host have ports one after another.
fn addresses(name: &'static str, list: &str, port: u16) -> Result<Vec<String>> {
    let mut on_host = HashMap::<String, u16>::new();
    let address = |entry: &str| {
        let entry = entry.trim();
        let host = if name == HOSTS { host_of_worker(entry) } else { host(entry) };
        let host = host.ok_or_else(|| {
            let expected = if name == ADDRESSES {
                "host:port,… or [fd00::1]:port,…"
            } else {
                "host,… or name:id:address,…"
            };
            wrong(name, "an entry is not a host", entry, expected)
        })?;
        let place = on_host.entry(host.clone()).or_default();
        let own = port.checked_add(*place);
        *place = place.saturating_add(1);
        let own = own.ok_or_else(|| wrong("port", "it leaves too few ports", &port.to_string(), "a lower port"))?;
        Ok(format!("{host}:{own}"))
    };
    let entries: Vec<&str> = list.split(',').filter(|entry| !entry.trim().is_empty()).collect();
    if entries.is_empty() || entries.len() > crate::ClusterSpec::MAX_TASKS {
        return Err(wrong(name, "it has no hosts, or too many", list, "1 to 100000 hosts"));
    }
    entries.into_iter().map(address).collect()
}

fn wrong(subject: &'static str, problem: &str, given: &str, expected: &str) -> Error {
    let remedy = "Correct the variable, or the attribute of the TPU VM that it overrides.";
    Error::config(subject, problem, given, expected, remedy)
}

const ADDRESSES: &str = "TPU_PROCESS_ADDRESSES";
const HOSTS: &str = "TPU_WORKER_HOSTNAMES";
const WORKER: &str = "TPU_WORKER_ID";
const TASK: &str = "CLOUD_TPU_TASK_ID";
pub(super) const TYPE: &str = "TPU_ACCELERATOR_TYPE";
const SLICES: &str = "MEGASCALE_NUM_SLICES";
const SLICE: &str = "MEGASCALE_SLICE_ID";
const LEADER: &str = "MEGASCALE_COORDINATOR_ADDRESS";

#[cfg(test)]
mod tests {
    use super::*;

    fn read_with(vars: &[(&str, &str)], attributes: &[(&str, &str)]) -> Result<Option<Slice>> {
        let find = |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        let pair = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        Slice::read(&find, &attributes.iter().map(pair).collect(), 8470)
    }

    fn read(vars: &[(&str, &str)]) -> Slice {
        read_with(vars, &[]).unwrap().unwrap()
    }

    #[test]
    fn variables_describe_the_slice() {
        let slice = read(&[(HOSTS, "a,b"), (WORKER, "1"), (TYPE, "v5litepod-8")]);
        assert_eq!((slice.addresses.clone(), slice.process), (vec!["a:8470".to_owned(), "b:8470".to_owned()], 1));
        assert_eq!((slice.cores_per_process().unwrap(), slice.is_whole()), (Some(4), true));
        assert_eq!(read(&[(HOSTS, "localhost")]).process, 0);
        assert_eq!(read_with(&[(WORKER, "1")], &[]).unwrap(), None);
    }

    #[test]
    fn processes_of_one_host_have_ports_of_their_own() {
        let vars = [(ADDRESSES, "a:8476,a:8477,b:8476"), (TASK, "2"), (WORKER, "0"), (HOSTS, "a,b")];
        let slice = read(&vars);
        assert_eq!(
            (slice.addresses.clone(), slice.process),
            (["a:8470", "a:8471", "b:8470"].map(String::from).into(), 2)
        );
    }

    #[test]
    fn hosts_may_be_ipv6_addresses() {
        let all = |vars: &[(&str, &str)]| read(vars).addresses.join(" ");
        let expected = "[fd00::1]:8470 [fd00::2]:8470";
        for list in ["fd00::1,fd00::2", "[fd00::1], [fd00::2]", "w-0:0:fd00::1,w-1:1:[fd00::2]"] {
            assert_eq!(all(&[(HOSTS, list), (WORKER, "0")]), expected, "{list}");
        }
        assert_eq!(all(&[(ADDRESSES, "[fd00::1]:8476,[fd00::2]:8476"), (TASK, "0")]), expected);
        assert_eq!(all(&[(ADDRESSES, "[fd00::1]:1,[fd00::1]:2"), (TASK, "0")]), "[fd00::1]:8470 [fd00::1]:8471");
        for leader in ["[fd00::9]", "[fd00::9]:8081"] {
            let slice = read(&[(HOSTS, "a"), (SLICES, "2"), (LEADER, leader)]);
            assert_eq!(slice.leader.as_deref(), Some("[fd00::9]:8470"), "{leader}");
        }
    }

    #[test]
    fn a_host_has_no_more_processes_than_ports() {
        let list = vec!["a"; 1 << 16].join(",");
        let find = |name: &str| (name == HOSTS).then(|| list.clone());
        let error = Slice::read(&find, &Attributes::new(), 1).unwrap_err().to_string();
        assert!(error.contains("too few ports"), "{error}");
    }

    #[test]
    fn variables_count_before_the_metadata_server() {
        let attributes = [(HOSTS, "worker-0:0:10.0.0.1,worker-1:1:10.0.0.2"), (WORKER, "0"), (TYPE, "v4-16")];
        let slice = read_with(&[], &attributes).unwrap().unwrap();
        assert_eq!(slice.addresses, ["10.0.0.1:8470", "10.0.0.2:8470"]);
        assert_eq!((slice.process, slice.cores_per_process().unwrap()), (0, Some(8)));
        let slice = read_with(&[(WORKER, "1"), (TYPE, "v5litepod-8")], &attributes).unwrap().unwrap();
        assert_eq!((slice.process, slice.cores_per_process().unwrap()), (1, Some(4)));
    }

    #[test]
    fn several_slices_count_their_processes_one_after_another() {
        let vars = |hosts: &'static str| {
            vec![
                (HOSTS, hosts),
                (WORKER, "1"),
                (SLICES, "3"),
                (SLICE, "2"),
                (LEADER, "job-0.svc:8081"),
                ("TPU_HOST_BOUNDS", "1,2,1"),
            ]
        };
        let slice = read(&vars("e,f"));
        assert_eq!((slice.process, slice.is_whole(), slice.leader.as_deref()), (5, false, Some("job-0.svc:8470")));
        let slice = read(&vars("a,b,c,d,e,f"));
        assert_eq!((slice.process, slice.per_slice, slice.is_whole()), (5, 2, true));
        let text = read_with(&vars("a,b,c"), &[]).unwrap_err().to_string();
        assert!(text.contains("bounds of 2 processes, but TPU_WORKER_HOSTNAMES names 3"), "{text}");
    }

    #[test]
    fn the_attribute_has_lines_of_keys_and_values() {
        let text =
            "ACCELERATOR_TYPE: 'v5litepod-16'\nWORKER_ID: '3'\nMEGASCALE_NUM_SLICES: \"2\"\nempty: ''\nnothing\n";
        let pairs = tpu_env(text);
        assert_eq!(pairs.len(), 3);
        assert_eq!((pairs["ACCELERATOR_TYPE"].as_str(), pairs["WORKER_ID"].as_str()), ("v5litepod-16", "3"));
        assert_eq!(pairs["MEGASCALE_NUM_SLICES"], "2");
    }

    #[test]
    fn every_mistake_is_a_sentence() {
        for (vars, words) in [
            (&[(HOSTS, "a,b")][..], "TPU_WORKER_ID: it is not set"),
            (&[(HOSTS, "a,b"), (WORKER, "2")], "it is outside the slice. Given: 2"),
            (&[(HOSTS, "a,b"), (WORKER, "x")], "TPU_WORKER_ID: it is not a whole number"),
            (&[(HOSTS, ","), (WORKER, "0")], "it has no hosts"),
            (&[(ADDRESSES, "a:b:c"), (TASK, "0")], "TPU_PROCESS_ADDRESSES: an entry is not a host"),
            // It may be one with a port, or without one.
            (&[(ADDRESSES, "fd00::1:8476"), (TASK, "0")], "TPU_PROCESS_ADDRESSES: an entry is not a host"),
            (&[(HOSTS, "a"), (SLICES, "2"), (LEADER, "fd00::9:8081")], "MEGASCALE_COORDINATOR_ADDRESS: it is not"),
            (&[(HOSTS, "a:b:c"), (WORKER, "0")], "TPU_WORKER_HOSTNAMES: an entry is not a host"),
            (&[(HOSTS, "[fd00:1],[fd00::2]"), (WORKER, "0")], "an entry is not a host. Given: [fd00:1]."),
            (&[(HOSTS, "a"), (SLICES, "2"), (LEADER, "a:b:c")], "MEGASCALE_COORDINATOR_ADDRESS: it is not an address"),
            (&[(HOSTS, "a"), (SLICES, "2"), (SLICE, "2")], "MEGASCALE_SLICE_ID: it is outside the job"),
            (&[(HOSTS, "a"), (SLICES, "100001")], "the job is too large"),
            (&[(HOSTS, "a"), ("TPU_PROCESS_BOUNDS", "1,x")], "they are not bounds"),
        ] {
            let text = read_with(vars, &[]).unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
        let unknown = read(&[(HOSTS, "a"), (TYPE, "v99-8")]).cores_per_process().unwrap_err().to_string();
        assert!(unknown.contains("its generation is unknown"), "{unknown}");
        let unequal = [(HOSTS, "a,b,c"), (WORKER, "0"), (TYPE, "v4-16")];
        assert!(read(&unequal).cores_per_process().unwrap_err().to_string().contains("unequal on 3 tasks"));
        let bounds = [(HOSTS, "a"), (TYPE, "v4-8"), ("TPU_CHIPS_PER_HOST_BOUNDS", "2,1,1")];
        assert!(read(&bounds).cores_per_process().unwrap_err().to_string().contains("Given: 4 for each"));
    }
}
