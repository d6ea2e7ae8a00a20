//! The part of Slurm's host list grammar that is needed to find the first host.

/// Returns the first host of a list such as `n[1-2,5],m7`, or `None` if the list is malformed.
pub(crate) fn first_host(list: &str) -> Option<String> {
    let Some((prefix, rest)) = list.split_once('[') else {
        return list.split(',').next().map(str::trim).filter(|host| !host.is_empty()).map(str::to_owned);
    };
    if let Some((host, _)) = prefix.split_once(',') {
        return (!host.is_empty()).then(|| host.trim().to_owned());
    }
    let (ranges, suffix) = rest.split_once(']')?;
    let first = ranges.split([',', '-']).next().filter(|number| number.chars().all(|c| c.is_ascii_digit()))?;
    let suffix = suffix.split(',').next().unwrap_or_default();
    (!suffix.contains('[')).then(|| format!("{}{first}{suffix}", prefix.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_hosts() {
        for (list, host) in [
            ("node7", Some("node7")),
            ("a,b", Some("a")),
            ("n[01-03,7],m5", Some("n01")),
            ("n[3,1]-ib,m", Some("n3-ib")),
            ("a,n[1-2]", Some("a")),
            ("n[1", None),
            ("", None),
        ] {
            assert_eq!(first_host(list).as_deref(), host, "{list}");
        }
    }
}
