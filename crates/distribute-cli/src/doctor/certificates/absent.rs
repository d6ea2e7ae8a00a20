//! The certificate of this process, in a build that cannot read it.

use distribute_cluster::tls::TlsFiles;

use super::cluster::sentence;
use super::report::Check;
use super::seen::Seen;

/// Says that the certificate is not checked, if there is one.
pub(crate) fn certificates(seen: &Seen) -> Option<Check> {
    match TlsFiles::from_vars(seen.lookup()) {
        Err(error) => Some(sentence("certificate", error)),
        Ok(None) => None,
        Ok(Some(files)) => {
            let found = format!("{} is not checked: this program is built without TLS", files.certificate.display());
            Some(Check::skipped("certificate", found).remedy("build it with the cargo feature `tls`"))
        }
    }
}
