//! The certificate of this process.

use distribute_cluster::JobTls;

use super::cluster::sentence;
use super::report::Check;
use super::seen::Seen;
use crate::certs::Shown;

/// Checks the files of the certificate as a process of a job does, and how long it is valid, if there is one.
pub(crate) fn certificates(seen: &Seen) -> Option<Check> {
    let tls = match JobTls::from_vars(seen.lookup()) {
        Err(error) => return Some(sentence("certificate", error)),
        Ok(tls) => tls?,
    };
    let files = tls.files();
    let Ok(certificate) = Shown::read(&files.certificate) else {
        return Some(Check::fail("certificate", format!("{} cannot be read", files.certificate.display())));
    };
    let days = certificate.days_left();
    let found = format!("{}: for {}, {days:.1} days left", files.certificate.display(), files.name);
    Some(match days < 1.0 {
        false => Check::ok("certificate", found),
        true => Check::warn("certificate", found)
            .why("connections that exist stay, but no process accepts it any more once it has expired")
            .remedy("renew it: distribute certs renew FOLDER, or with --watch"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_that_is_not_given_is_no_row_and_half_of_one_fails() {
        let seen = Seen::variables_only;
        assert_eq!(certificates(&seen(&[])), None);
        let check = certificates(&seen(&[("DISTRIBUTE_TLS_CERT", "/c.pem")])).unwrap();
        assert!(check.found.contains("some of them are set"), "{check:?}");
    }
}
