//! An authority and what it issues.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    date_time_ymd,
};

use super::files::{Shown, read, unusable, write};
use crate::error::Error;

/// An authority with its key.
#[derive(Debug)]
pub(super) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    /// Makes a new authority.
    pub(super) fn new(days: u32) -> Result<Authority, Error> {
        let key = KeyPair::generate().map_err(|error| unusable(Path::new("ca.key"), &error))?;
        let failed = |error: rcgen::Error| unusable(Path::new("ca.pem"), &error);
        let mut params = CertificateParams::new(Vec::new()).map_err(failed)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        // Authorities of one name are taken for one another until their signatures are verified.
        let digits: String = key.public_key_raw()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        params.distinguished_name.push(DnType::CommonName, format!("distribute authority {digits}"));
        limit(&mut params, days);
        let pem = params.self_signed(&key).map_err(failed)?.pem();
        Ok(Authority { issuer: Issuer::new(params, key), pem })
    }

    /// Creates an authority in a folder.
    pub(super) fn init(folder: &Path, days: u32) -> Result<(), Error> {
        let path = folder.join("ca.key");
        if path.exists() {
            return Err(Error::Exists { path });
        }
        std::fs::create_dir_all(folder).map_err(|source| Error::Write { path: folder.to_owned(), source })?;
        let authority = Authority::new(days)?;
        write(&path, &authority.issuer.key().serialize_pem(), 0o600)?;
        write(&folder.join("ca.pem"), &authority.pem, 0o644)
    }

    /// Reads the authority of a folder.
    pub(super) fn open(folder: &Path) -> Result<Authority, Error> {
        let (key_path, path) = (folder.join("ca.key"), folder.join("ca.pem"));
        let key = KeyPair::from_pem(&read(&key_path)?).map_err(|error| unusable(&key_path, &error))?;
        let pem = read(&path)?;
        let issuer = Issuer::from_ca_cert_pem(&pem, key).map_err(|error| unusable(&path, &error))?;
        Ok(Authority { issuer, pem })
    }

    /// The authority's own certificate.
    pub(super) fn pem(&self) -> &str {
        &self.pem
    }

    /// Issues a certificate with a new key.
    pub(super) fn issue(&self, folder: &Path, name: &str, names: Vec<String>, days: u32) -> Result<(), Error> {
        let (path, key_path) = (folder.join(format!("{name}.pem")), folder.join(format!("{name}.key")));
        if path.exists() || key_path.exists() {
            return Err(Error::Exists { path });
        }
        let key = KeyPair::generate().map_err(|error| unusable(&key_path, &error))?;
        write(&key_path, &key.serialize_pem(), 0o600)?;
        write(&path, &self.sign(&path, name, names, days, &key)?, 0o644)
    }

    /// Issues a certificate again, for its key and names, and for as long as before.
    pub(super) fn renew(&self, folder: &Path, old: &Shown) -> Result<(), Error> {
        let (path, key_path) = (folder.join(format!("{}.pem", old.name)), folder.join(format!("{}.key", old.name)));
        let key = KeyPair::from_pem(&read(&key_path)?).map_err(|error| unusable(&key_path, &error))?;
        write(&path, &self.sign(&path, &old.name, old.names.clone(), old.days(), &key)?, 0o644)
    }

    fn sign(&self, path: &Path, name: &str, names: Vec<String>, days: u32, key: &KeyPair) -> Result<String, Error> {
        let failed = |error: rcgen::Error| unusable(path, &error);
        let mut params = CertificateParams::new(names).map_err(failed)?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        limit(&mut params, days);
        Ok(params.signed_by(key, &self.issuer).map_err(failed)?.pem())
    }
}

/// Sets the time of validity, from a little before now: clocks of other machines may be behind.
fn limit(params: &mut CertificateParams, days: u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let date = |since: Duration| date_time_ymd(1970, 1, 1) + since;
    params.not_before = date(now.saturating_sub(MARGIN));
    params.not_after = date(now + Duration::from_secs(u64::from(days) * 24 * 3600));
}

/// How far the clocks of machines may differ.
const MARGIN: Duration = Duration::from_secs(600);
