//! Authorities and certificates, also such as are refused.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, date_time_ymd,
};

use crate::Error;

/// An authority that issues certificates.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// The paths of an authority's certificate, of a certificate that it has issued, and of its key.
#[derive(Clone, Debug)]
pub struct Files {
    /// The authority's certificate.
    pub authority: PathBuf,
    /// The certificate.
    pub certificate: PathBuf,
    /// The key, which only its owner can read.
    pub key: PathBuf,
}

/// The properties of a certificate.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The DNS name that it is valid for.
    pub name: String,
    /// When its validity begins and ends.
    pub valid: (SystemTime, SystemTime),
}

impl Certificate {
    /// The name of [`Certificate::valid`].
    pub const NAME: &str = "distribute";

    /// Describes a certificate for the name `distribute` that is valid for an hour, before and after now.
    #[must_use]
    pub fn valid() -> Certificate {
        let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
        Certificate { name: Certificate::NAME.to_owned(), valid: (now - hour, now + hour) }
    }

    /// Changes the name.
    #[must_use]
    pub fn name(self, name: &str) -> Certificate {
        Certificate { name: name.to_owned(), ..self }
    }

    /// Changes the time of validity.
    #[must_use]
    pub fn within(self, from: SystemTime, until: SystemTime) -> Certificate {
        Certificate { valid: (from, until), ..self }
    }
}

impl Authority {
    /// Creates an authority. All have the same name, so that only their keys tell them apart.
    ///
    /// # Errors
    /// [`Error::Certificate`] if the key cannot be made.
    pub fn new() -> Result<Authority, Error> {
        let mut params = CertificateParams::new(Vec::new()).map_err(failed)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "authority of a test");
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().map_err(failed)?).map_err(failed)?;
        Ok(Authority { issuer })
    }

    /// Writes a certificate, its key and that of the authority into a folder, under names that begin with `stem`. Files
    /// that are there are replaced.
    ///
    /// # Errors
    /// [`Error::Certificate`] if the certificate cannot be made or the files cannot be written.
    pub fn issue(&self, folder: &Path, stem: &str, certificate: &Certificate) -> Result<Files, Error> {
        let mut params = CertificateParams::new([certificate.name.clone()]).map_err(failed)?;
        let date = |time: SystemTime| date_time_ymd(1970, 1, 1) + time.duration_since(UNIX_EPOCH).unwrap_or_default();
        (params.not_before, params.not_after) = (date(certificate.valid.0), date(certificate.valid.1));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().map_err(failed)?;
        let signed = params.signed_by(&key, &self.issuer).map_err(failed)?;
        let path = |end: &str| folder.join(format!("{stem}-{end}.pem"));
        let files = Files { authority: path("ca"), certificate: path("cert"), key: path("key") };
        write(&files.authority, &self.issuer.pem())?;
        write(&files.certificate, &signed.pem())?;
        write(&files.key, &key.serialize_pem())?;
        Ok(files)
    }
}

/// Replaces a file by one that only its owner can read.
fn write(path: &Path, text: &str) -> Result<(), Error> {
    use std::os::unix::fs::OpenOptionsExt;
    let new = path.with_extension("new");
    let written = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| fs::rename(&new, path));
    written.map_err(failed)
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Certificate(std::io::Error::other(error))
}
