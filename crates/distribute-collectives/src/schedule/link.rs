//! Costs of a connection.

use crate::{Error, Result};

/// The costs of sending a message and of combining received values: alpha, beta and gamma of the common cost models.
///
/// All members of a group must use the same figures, so that they make the same choices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds from a send to the receipt of a short message.
    pub latency_s: f64,
    /// Seconds per byte in each direction, while both directions are in use.
    pub per_byte_s: f64,
    /// Seconds to combine a received byte with a local one.
    pub per_combined_byte_s: f64,
}

impl Link {
    /// Shared memory of one host, as measured with two processes on two cores by `cargo xtask bench allreduce`.
    pub const SHARED_MEMORY: Link =
        Link { latency_s: 0.35e-6, per_byte_s: 1.0 / 17e9, per_combined_byte_s: 1.0 / 25e9 };

    /// TCP over the loopback device, measured in the same way. A network's latency is higher and its rate often lower,
    /// which shifts the choices in the same direction: fewer steps for short messages, fewer bytes for long ones.
    pub const TCP: Link = Link { latency_s: 2.5e-6, per_byte_s: 1.0 / 3e9, per_combined_byte_s: 1.0 / 25e9 };

    /// gRPC over the loopback device, measured in the same way.
    pub const GRPC: Link = Link { latency_s: 8e-6, per_byte_s: 1.0 / 1.7e9, per_combined_byte_s: 1.0 / 25e9 };

    /// Parses `LATENCY_US,GB_S`, such as `30,1.2` for 30 µs and 1.2 GB/s.
    ///
    /// # Errors
    /// [`Error::UnknownName`] if the text is not two numbers above 0.
    pub fn parse(text: &str) -> Result<Link> {
        let wrong = || Error::UnknownName {
            what: "DISTRIBUTE_LINK",
            given: text.to_owned(),
            expected: "latency in µs and rate in GB/s, such as 30,1.2",
        };
        let (latency, rate) = text.split_once(',').ok_or_else(wrong)?;
        let number = |text: &str| text.trim().parse::<f64>().ok().filter(|number| *number > 0.0 && number.is_finite());
        let (latency, rate) = (number(latency).ok_or_else(wrong)?, number(rate).ok_or_else(wrong)?);
        Ok(Link { latency_s: latency * 1e-6, per_byte_s: 1.0 / (rate * 1e9), ..Link::TCP })
    }
}

impl std::fmt::Display for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.3} µs and {:.3} GB/s", self.latency_s * 1e6, 1e-9 / self.per_byte_s)?;
        if self.per_combined_byte_s == Link::TCP.per_combined_byte_s {
            return Ok(());
        }
        write!(f, ", combining {:.3} GB/s", 1e-9 / self.per_combined_byte_s)
    }
}

// Figures are only compared for equality, and are never NaN.
impl Eq for Link {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Algorithm;

    #[test]
    fn short_messages_take_few_steps_and_long_ones_few_bytes() {
        for link in [Link::SHARED_MEMORY, Link::TCP, Link::GRPC] {
            for ranks in [2, 3, 4, 8, 16, 100] {
                let chosen = |bytes| Algorithm::Auto.choose(bytes, ranks, &link);
                assert_eq!(chosen(4), Algorithm::RecursiveDoubling, "{ranks}");
                let long = chosen(1 << 30);
                assert!(matches!(long, Algorithm::Ring | Algorithm::HalvingDoubling), "{ranks}: {long:?}");
            }
        }
        // For medium sizes and many ranks, as few bytes as the ring in fewer steps.
        assert_eq!(Algorithm::Auto.choose(1 << 20, 64, &Link::TCP), Algorithm::HalvingDoubling);
    }

    #[test]
    fn a_link_is_read_from_two_numbers() {
        let link = Link::parse("30, 2").unwrap();
        assert_eq!(link.to_string(), "30.000 µs and 2.000 GB/s");
        assert!((link.latency_s - 30e-6).abs() < 1e-12 && (link.per_byte_s - 0.5e-9).abs() < 1e-15);
        for wrong in ["", "30", "30,0", "fast,2", "1,2,3", "inf,1"] {
            assert!(Link::parse(wrong).unwrap_err().to_string().contains("DISTRIBUTE_LINK"), "{wrong}");
        }
    }
}
