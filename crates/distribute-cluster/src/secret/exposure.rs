//! Listeners that others than the job's hosts may reach.

use std::net::IpAddr;

use super::JobSecret;
use crate::JobTls;

/// Returns the address at which machines of other networks may reach a listener that is bound to `bound`: one that is
/// neither loopback nor private (RFC 1918, RFC 4193) nor link-local. A listener on all interfaces has all addresses of
/// the machine.
///
/// # Examples
/// ```
/// use distribute_cluster::secret::exposed_address;
/// let [public, private] = ["192.0.2.7", "10.0.0.7"].map(|text| text.parse().unwrap());
/// assert_eq!(exposed_address(private, &[public]), None);
/// assert_eq!(exposed_address("::".parse().unwrap(), &[private, public]), Some(public));
/// ```
pub fn exposed_address(bound: IpAddr, machine: &[IpAddr]) -> Option<IpAddr> {
    let bound = bound.to_canonical();
    match bound.is_unspecified() {
        // A listener on all interfaces of IPv4 has no address of IPv6.
        true => machine.iter().copied().find(|own| is_public(*own) && (bound.is_ipv6() || own.is_ipv4())),
        false => Some(bound).filter(|bound| is_public(*bound)),
    }
}

fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(own) => !(own.is_loopback() || own.is_private() || own.is_link_local() || own.is_unspecified()),
        IpAddr::V6(own) => {
            !(own.is_loopback() || own.is_unique_local() || own.is_unicast_link_local() || own.is_unspecified())
        }
    }
}

/// Warns if a process without a secret and without TLS listens where others than the job's hosts may connect. `service`
/// names what is open there, `variable` the one that gives a secret.
pub fn warn_if_exposed(
    service: &str,
    bound: Option<IpAddr>,
    (secret, tls): (Option<&JobSecret>, Option<&JobTls>),
    variable: &str,
) {
    let (Some(bound), None, None) = (bound, secret, tls) else { return };
    let machine: Vec<IpAddr> = match bound.is_unspecified() {
        true => if_addrs::get_if_addrs().unwrap_or_default().iter().map(if_addrs::Interface::ip).collect(),
        false => Vec::new(),
    };
    if let Some(address) = exposed_address(bound, &machine) {
        distribute_notice::warn!(
            "{service} listens at {address}, which is not a private address, and any process that reaches it can take \
             part: no secret and no certificate is set; set {variable} alike for all processes, use TLS, or listen \
             in a private network"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_addresses_alone_are_exposed() {
        let own = |text: &str| text.parse::<IpAddr>().unwrap();
        for private in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.0.1",
            "169.254.1.1",
            "::1",
            "fd00::1",
            "fe80::1",
            "::ffff:10.0.0.1",
        ] {
            assert_eq!(exposed_address(own(private), &[own("8.8.8.8")]), None, "{private}");
        }
        for public in ["8.8.8.8", "172.32.0.1", "100.64.0.1", "2001:db8::1", "192.169.0.1"] {
            assert_eq!(exposed_address(own(public), &[]), Some(own(public)));
        }
        assert_eq!(exposed_address(own("::ffff:8.8.8.8"), &[]), Some(own("8.8.8.8")));
        let machine = [own("127.0.0.1"), own("10.0.0.1"), own("2001:db8::1")];
        assert_eq!(exposed_address(own("0.0.0.0"), &machine), None);
        assert_eq!(exposed_address(own("::"), &machine), Some(machine[2]));
        assert_eq!(exposed_address(own("::"), &machine[..2]), None);
    }
}
