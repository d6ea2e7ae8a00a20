//! Slurm's lists of hosts: `n[1-3,7],m05`.

use std::fmt::Write;

/// Most hosts of a list, as of a cluster's tasks.
const MAX_HOSTS: usize = crate::ClusterSpec::MAX_TASKS;

/// Length limit of a host's name, in bytes: RFC 1035, section 2.3.4.
pub(crate) const MAX_NAME_BYTES: usize = 253;

/// Returns the hosts of a list in its order, or `None` if it is malformed, has more than 100,000, or has one whose name
/// is longer than names are.
///
/// Every bracket has numbers and ranges, separated by commas. A range has the width of its first number: `n[08-10]` are
/// n08, n09 and n10.
///
/// # Source
/// `scontrol show hostnames`; the manual of `srun`, "nodelist".
pub(crate) fn expand(list: &str) -> Option<Vec<String>> {
    let mut hosts = Vec::new();
    for part in parts(list)? {
        let mut names = vec![String::new()];
        let mut rest = part;
        while let Some((text, after)) = rest.split_once('[') {
            let (ranges, after) = after.split_once(']')?;
            append(&mut names, text)?;
            names = with_numbers(&names, ranges)?;
            rest = after;
        }
        append(&mut names, rest)?;
        hosts.append(&mut names);
        if hosts.len() > MAX_HOSTS {
            return None;
        }
    }
    let is_name = |host: &String| !host.is_empty() && !host.contains([']', ' ']);
    hosts.iter().all(is_name).then_some(hosts)
}

/// Appends text to all names, unless one becomes too long.
fn append(names: &mut [String], text: &str) -> Option<()> {
    if names.iter().any(|name| name.len() + text.len() > MAX_NAME_BYTES) {
        return None;
    }
    names.iter_mut().for_each(|name| name.push_str(text));
    Some(())
}

/// Returns the parts between the commas that are outside of brackets.
fn parts(list: &str) -> Option<Vec<&str>> {
    let (mut parts, mut begin, mut inside) = (Vec::new(), 0, false);
    for (at, letter) in list.char_indices() {
        match letter {
            '[' if inside => return None,
            '[' => inside = true,
            ']' if !inside => return None,
            ']' => inside = false,
            ',' if !inside => {
                parts.push(list[begin..at].trim());
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(list[begin..].trim());
    (!inside).then_some(parts)
}

/// Returns each name with each number of the ranges appended.
fn with_numbers(names: &[String], ranges: &str) -> Option<Vec<String>> {
    let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<usize>().ok())?;
    let mut all = Vec::new();
    for name in names {
        for range in ranges.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (from, to, width) = (number(first)?, number(last)?, first.len());
            let is_long = name.len() + width.max(last.len()) > MAX_NAME_BYTES;
            if is_long || from > to || to - from >= MAX_HOSTS || all.len() + (to - from) >= MAX_HOSTS {
                return None;
            }
            all.extend((from..=to).map(|number| format!("{name}{number:0width$}")));
        }
    }
    Some(all)
}

/// Returns a list that [`expand`] reads as these hosts, in this order.
pub(crate) fn compress(hosts: &[String]) -> String {
    let mut list = String::new();
    let mut rest = hosts;
    while let Some((first, others)) = rest.split_first() {
        let (prefix, number) = split(first);
        let alike = others.iter().take_while(|host| {
            let (other, digits) = split(host);
            other == prefix && !digits.is_empty() && !number.is_empty()
        });
        let count = 1 + alike.count();
        let separator = if list.is_empty() { "" } else { "," };
        list.push_str(separator);
        match count {
            1 => list.push_str(first),
            _ => {
                // Writing to a string does not fail.
                let _ = write!(list, "{prefix}[{}]", ranges(&rest[..count]));
            }
        }
        rest = &rest[count..];
    }
    list
}

/// Returns the numbers at the ends of hosts as ranges.
fn ranges(hosts: &[String]) -> String {
    let numbers: Vec<&str> = hosts.iter().map(|host| split(host).1).collect();
    let mut ranges: Vec<String> = Vec::new();
    let mut begin = 0;
    while begin < numbers.len() {
        let (first, width) = (numbers[begin], numbers[begin].len());
        let from: usize = first.parse().unwrap_or(0);
        let continues = |(offset, text): (usize, &&str)| **text == format!("{:0width$}", from + offset);
        let count = numbers[begin..].iter().enumerate().take_while(|item| continues((item.0, item.1))).count().max(1);
        match count {
            1 => ranges.push(first.to_owned()),
            _ => ranges.push(format!("{first}-{}", numbers[begin + count - 1])),
        }
        begin += count;
    }
    ranges.join(",")
}

/// Splits a host before the number at its end, of at most nine digits.
fn split(host: &str) -> (&str, &str) {
    let digits = host.bytes().rev().take(9).take_while(u8::is_ascii_digit).count();
    host.split_at(host.len() - digits)
}

#[cfg(test)]
mod tests {
    use distribute_testkit::skipped;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_are_expanded_as_slurm_does() {
        for (list, hosts) in [
            ("node7", Some(vec!["node7"])),
            ("a,b", Some(vec!["a", "b"])),
            ("n[1-2],m5,o[3-4,6,7-9]", Some(vec!["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"])),
            ("n[01-03,7],m5", Some(vec!["n01", "n02", "n03", "n7", "m5"])),
            ("n[8-10]", Some(vec!["n8", "n9", "n10"])),
            ("n[08-10]", Some(vec!["n08", "n09", "n10"])),
            ("n[3,1]-ib,m", Some(vec!["n3-ib", "n1-ib", "m"])),
            ("r[1-2]n[1-2]", Some(vec!["r1n1", "r1n2", "r2n1", "r2n2"])),
            ("n[1", None),
            ("n1]", None),
            ("n[[1]]", None),
            ("n[2-1]", None),
            ("n[a-b]", None),
            ("n[1-1000000000]", None),
            ("n[0-99999]n[0-99999]", None),
            ("a,,b", None),
            ("", None),
        ] {
            let expected = hosts.map(|hosts| hosts.into_iter().map(str::to_owned).collect::<Vec<_>>());
            assert_eq!(expand(list), expected, "{list}");
        }
    }

    #[test]
    fn names_are_those_that_hosts_can_have() {
        let zeros = "0".repeat(70_000);
        assert_eq!(expand(&format!("n[{zeros}-1]")), None);
        // A short list must not stand for gigabytes.
        assert_eq!(expand(&format!("{}[0-99999]", "n".repeat(100_000))), None);
        assert_eq!(expand(&format!("[0-99999]{}", "n".repeat(100_000))), None);
        assert_eq!(expand(&"n".repeat(MAX_NAME_BYTES + 1)), None);
        let longest = format!("{}[7]", "n".repeat(MAX_NAME_BYTES - 1));
        assert_eq!(expand(&longest).unwrap()[0].len(), MAX_NAME_BYTES);
    }

    #[test]
    fn slurm_reads_the_same_hosts() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("slurm.conf");
        let configuration =
            "ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=localhost\n";
        std::fs::write(&file, configuration).unwrap();
        let slurms = |list: &str| {
            let mut command = std::process::Command::new("scontrol");
            command.args(["show", "hostnames", list]).env("SLURM_CONF", &file);
            let output = command.output().ok()?;
            assert!(output.status.success(), "{output:?}");
            Some(String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect::<Vec<_>>())
        };
        let hosts: Vec<String> = (7..123).step_by(3).map(|number| format!("node{number:03}")).collect();
        let compressed = compress(&hosts);
        let lists =
            ["n[8-10]", "n[08-10]", "r[1-2]n[1-2]", "n[1-2],m5,o[3-4,6,7-9]", "n[001-003],n4", "a1,a1", &compressed];
        for list in lists {
            let Some(expected) = slurms(list) else {
                return skipped("Slurm's own expansion: scontrol is not installed (apt-get install slurm-client)");
            };
            assert_eq!(expand(list), Some(expected), "{list}");
        }
    }

    #[test]
    fn hosts_are_compressed() {
        let hosts = |list: &str| expand(list).unwrap();
        assert_eq!(compress(&hosts("n1,n2,n3,n7,m5")), "n[1-3,7],m5");
        assert_eq!(compress(&hosts("n08,n09,n10")), "n[08-10]");
        assert_eq!(compress(&hosts("n8,n9,n10")), "n[8-10]");
        assert_eq!(compress(&hosts("n1,n01")), "n[1,01]");
        assert_eq!(compress(&[]), "");
    }

    proptest! {
        #[test]
        fn what_is_compressed_expands_to_the_same(hosts in prop::collection::vec("[a-c]{1,2}[0-9]{0,11}", 1..40)) {
            prop_assert_eq!(expand(&compress(&hosts)), Some(hosts));
        }
    }
}
