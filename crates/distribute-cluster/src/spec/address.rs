//! The syntax of task addresses.

use crate::{Error, Result, Task};

/// Checks that `address` has the form `host:port`.
pub(super) fn check(task: Task, address: &str) -> Result<()> {
    let Some(problem) = problem(address) else { return Ok(()) };
    let expected = "host:port, such as 10.0.0.1:2222, worker-0.job:2222 or [fd00::1]:2222";
    let problem = format!("the address of {task} {problem}");
    Err(Error::config("cluster", problem, format!("{address:?}"), expected, "Correct the address."))
}

/// Returns the problem of an address, if any.
fn problem(address: &str) -> Option<&'static str> {
    if address.contains("://") {
        return Some("has a protocol before it");
    }
    let Some((host, port)) = address.rsplit_once(':') else { return Some("has no port") };
    if let Some(problem) = host_problem(host) {
        return Some(problem);
    }
    // `u16::from_str` accepts a sign, which other programs reject.
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    match port.parse::<u16>() {
        _ if port.is_empty() => Some("has no port"),
        Ok(1..) if digits => None,
        _ => Some("has a port that is not between 1 and 65535"),
    }
}

/// Returns the problem of a host name, IPv4 address or bracketed IPv6 address, if any.
pub(crate) fn host_problem(host: &str) -> Option<&'static str> {
    if host.is_empty() {
        return Some("has no host");
    }
    let named = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte));
    if let Some(inner) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        let (literal, zone) = inner.split_once('%').map_or((inner, None), |(literal, zone)| (literal, Some(zone)));
        if literal.parse::<std::net::Ipv6Addr>().is_err() {
            return Some("has no IPv6 address between its brackets");
        }
        let wrong_zone = |zone: &str| zone.is_empty() || zone.len() > MAX_ZONE || !named(zone);
        return zone.is_some_and(wrong_zone).then_some("has an IPv6 zone that is not an interface's name");
    }
    if host.contains(':') {
        return Some("is an IPv6 address without brackets");
    }
    if !named(host) {
        return Some("has a host with characters that no host name has");
    }
    let too_long = host.len() > MAX_HOST || host.split('.').any(|label| label.len() > MAX_LABEL);
    too_long.then_some("has a host that is longer than a name can be: 253 bytes, and 63 between dots")
}

/// RFC 1035, section 2.3.4: the longest name in presentation form, and the longest label.
const MAX_HOST: usize = 253;
const MAX_LABEL: usize = 63;

/// Length limit of an interface name; Linux allows 15 bytes.
const MAX_ZONE: usize = 63;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn good_and_bad_addresses() {
        let longest = format!("{}a:1", "a.".repeat(126));
        for good in [
            &*longest,
            "a:1",
            "10.0.0.1:65535",
            "worker-0.job.svc:2222",
            "[::1]:22",
            "[fe80::1%eth0]:22",
            "worker_1:80",
        ] {
            assert_eq!(problem(good), None, "{good}");
        }
        for (bad, words) in [
            ("a", "no port"),
            ("a:", "no port"),
            ("", "no port"),
            (":1", "no host"),
            ("a:0", "between 1 and 65535"),
            ("a:65536", "between 1 and 65535"),
            ("a:+5", "between 1 and 65535"),
            ("a:-5", "between 1 and 65535"),
            ("a:x", "between 1 and 65535"),
            ("fd00::1:22", "without brackets"),
            ("::1", "without brackets"),
            ("[fd00]:22", "no IPv6 address"),
            ("[::1]", "without brackets"),
            ("grpc://a:1", "protocol"),
            ("a b:1", "characters"),
            ("a/b:1", "characters"),
            ("a\nINFO:1", "characters"),
            ("größe:1", "characters"),
            ("[fe80::1%]:22", "zone"),
            ("[fe80::1%a\nb]:22", "zone"),
            (&format!("{}:1", "a.".repeat(127)), "longer"),
            (&format!("{}:1", "a".repeat(64)), "longer"),
        ] {
            assert!(problem(bad).is_some_and(|problem| problem.contains(words)), "{bad}: {:?}", problem(bad));
        }
    }

    proptest! {
        #[test]
        fn any_name_with_any_port_is_an_address(host in "[a-z][a-z0-9.-]{0,30}", port in 1u16..) {
            prop_assert_eq!(problem(&format!("{host}:{port}")), None);
        }

        #[test]
        fn no_text_makes_it_panic(text in "\\PC*") {
            let _ = problem(&text);
        }
    }
}
