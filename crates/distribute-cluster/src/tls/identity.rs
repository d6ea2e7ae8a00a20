//! The certificate of this process, read again when its files change.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::client::danger::ServerCertVerifier;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{cipher_suite, default_provider};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::files::{AUTHORITY, CERTIFICATE, Contents, ISSUE, Stamps, wrong};
use super::verifier::OfJob;
use super::{PROTOCOL, Side, TlsFiles, TlsProblem};
use crate::{Error, Result, environment};

/// The certificate of this process, its private key, and the authority whose certificates it accepts.
///
/// The files are read again when they have changed: new connections use what is there then, those that exist continue.
/// If new files cannot be used, the old certificate is kept, and one warning is logged. Clones share what is loaded.
///
/// # Examples
/// ```
/// use distribute_cluster::JobTls;
/// assert_eq!(JobTls::from_vars(|_| None)?, None);
/// let ca_alone = |name: &str| (name == "DISTRIBUTE_TLS_CA").then(|| "/etc/job/ca.pem".to_owned());
/// let error = JobTls::from_vars(ca_alone).unwrap_err();
/// assert!(error.to_string().contains("DISTRIBUTE_TLS_KEY"));
/// # Ok::<(), distribute_cluster::Error>(())
/// ```
#[derive(Clone)]
pub struct JobTls(Arc<Shared>);

struct Shared {
    files: TlsFiles,
    name: ServerName<'static>,
    provider: Arc<CryptoProvider>,
    loaded: Mutex<Loaded>,
}

struct Loaded {
    stamps: Stamps,
    ready: Arc<Ready>,
    /// Files that could not be used, of which a warning was logged.
    refused: Option<Stamps>,
}

/// The configuration of handshakes.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) caller: Arc<ClientConfig>,
    pub(crate) listener: Arc<ServerConfig>,
    verifier: Arc<WebPkiServerVerifier>,
    chain: Vec<CertificateDer<'static>>,
}

impl JobTls {
    /// Returns the certificate that DISTRIBUTE_TLS_CA, DISTRIBUTE_TLS_CERT and DISTRIBUTE_TLS_KEY give, or `None` if
    /// none of them is set. DISTRIBUTE_TLS_NAME is the DNS name that the certificate of every process of the job must
    /// be valid for; default `distribute`.
    ///
    /// # Errors
    /// [`Error::Config`] if not all of them are set, if a file cannot be read or holds something else, if others than
    /// its owner can read or change the key, or if other processes would not accept the certificate: it has expired, is
    /// for another name, or of another authority.
    pub fn from_env() -> Result<Option<JobTls>> {
        environment::read(|variable| JobTls::from_vars(variable))
    }

    /// Reads the variables like [`from_env`](JobTls::from_env), with a function that looks up variables.
    ///
    /// # Errors
    /// [`Error::Config`], as for [`from_env`](JobTls::from_env).
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<Option<JobTls>> {
        let Some(files) = TlsFiles::from_vars(variable)? else { return Ok(None) };
        let tls = JobTls::open(files)?;
        tls.check()?;
        Ok(Some(tls))
    }

    /// Reads the files. Whether other processes would accept the certificate is not verified: see
    /// [`check`](JobTls::check).
    ///
    /// # Errors
    /// [`Error::Config`] if a file cannot be read or holds something else, if the key is not that of the certificate,
    /// if others than its owner can read or change it, or if the name is not a DNS name.
    pub fn open(files: TlsFiles) -> Result<JobTls> {
        let name = ServerName::try_from(files.name.clone()).map_err(|error| {
            let remedy = "Give the name that all certificates of the job are valid for.";
            Error::config("DISTRIBUTE_TLS_NAME", error.to_string(), &files.name, "a DNS name", remedy)
        })?;
        let mut provider = default_provider();
        // The fastest of these for a processor with instructions for AES; all are as strong as the job needs.
        provider.cipher_suites = vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ];
        let provider = Arc::new(provider);
        let stamps = Stamps::of(&files);
        let ready = Arc::new(Ready::read(&files, &name, &provider)?);
        let loaded = Mutex::new(Loaded { stamps, ready, refused: None });
        Ok(JobTls(Arc::new(Shared { files, name, provider, loaded })))
    }

    /// Returns the files of the certificate.
    pub fn files(&self) -> &TlsFiles {
        &self.0.files
    }

    /// Verifies this process's own certificate as other processes of the job do.
    ///
    /// # Errors
    /// [`Error::Config`] if it has expired, is not yet valid, is for another name, or of another authority.
    pub fn check(&self) -> Result<()> {
        let ready = self.ready();
        let Some((own, intermediates)) = ready.chain.split_first() else { return Ok(()) };
        let verified = ready.verifier.verify_server_cert(own, intermediates, &self.0.name, &[], UnixTime::now());
        verified.map(drop).map_err(|error| {
            let problem = match TlsProblem::of(&error) {
                TlsProblem::Expired(_) => "it has expired".to_owned(),
                TlsProblem::NotYetValid(_) => "it is not yet valid; the clock of this machine may be wrong".to_owned(),
                TlsProblem::WrongName(_) => format!("it is for another name than {}", self.0.files.name),
                TlsProblem::UnknownAuthority(_) => {
                    format!("it is not of the authority in {}", self.0.files.authority.display())
                }
                other => other.to_string(),
            };
            let expected =
                format!("a certificate that processes of the job accept, for the name {}", self.0.files.name);
            wrong(CERTIFICATE, &self.0.files.certificate, problem, &expected, ISSUE)
        })
    }

    /// Returns the name that certificates must be valid for.
    pub(crate) fn server_name(&self) -> ServerName<'static> {
        self.0.name.clone()
    }

    /// Returns what the next handshake needs, of the files as they are now.
    pub(crate) fn ready(&self) -> Arc<Ready> {
        let mut loaded = self.loaded();
        let stamps = Stamps::of(&self.0.files);
        if stamps == loaded.stamps || loaded.refused == Some(stamps) {
            return loaded.ready.clone();
        }
        match Ready::read(&self.0.files, &self.0.name, &self.0.provider) {
            Ok(ready) => {
                tracing::info!("the certificate {} is in use", self.0.files.certificate.display());
                *loaded = Loaded { stamps, ready: Arc::new(ready), refused: None };
            }
            Err(error) => {
                loaded.refused = Some(stamps);
                tracing::warn!("the certificate in use is kept, because the new one cannot be used: {error}");
            }
        }
        loaded.ready.clone()
    }

    fn loaded(&self) -> MutexGuard<'_, Loaded> {
        // It is changed whole.
        self.0.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ready {
    fn read(files: &TlsFiles, name: &ServerName<'static>, provider: &Arc<CryptoProvider>) -> Result<Ready> {
        let Contents { authority, chain, key } = Contents::read(files)?;
        let of_authority = |error: rustls::Error| {
            wrong(AUTHORITY, &files.authority, error.to_string(), "certificates of an authority", ISSUE)
        };
        let of_certificate = |error: rustls::Error| {
            let expected = "a certificate, and its own key in DISTRIBUTE_TLS_KEY";
            wrong(CERTIFICATE, &files.certificate, error.to_string(), expected, ISSUE)
        };
        let mut roots = RootCertStore::empty();
        for certificate in authority {
            roots.add(certificate).map_err(of_authority)?;
        }
        let roots = Arc::new(roots);
        let unusable = |error: &dyn fmt::Display| of_authority(rustls::Error::General(error.to_string()));
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let verifier = verifier.map_err(|error| unusable(&error))?;
        let by_authority = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let by_authority = by_authority.map_err(|error| unusable(&error))?;
        let versions = &[&rustls::version::TLS13];
        let mut caller = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)
            .map_err(of_certificate)?
            .with_webpki_verifier(verifier.clone())
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(of_certificate)?;
        caller.resumption = Resumption::disabled();
        caller.alpn_protocols = vec![PROTOCOL.to_vec()];
        let mut listener = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)
            .map_err(of_certificate)?
            .with_client_cert_verifier(Arc::new(OfJob { by_authority, name: name.clone() }))
            .with_single_cert(chain.clone(), key)
            .map_err(of_certificate)?;
        listener.session_storage = Arc::new(NoServerSessionStorage {});
        listener.send_tls13_tickets = 0;
        listener.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(Ready { caller: Arc::new(caller), listener: Arc::new(listener), verifier, chain })
    }
}

impl PartialEq for JobTls {
    fn eq(&self, other: &JobTls) -> bool {
        self.0.files == other.0.files
    }
}

impl Eq for JobTls {}

impl fmt::Debug for JobTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobTls").field("files", &self.0.files).finish_non_exhaustive()
    }
}

impl TlsProblem {
    /// Returns the problem that an error of rustls stands for.
    pub(crate) fn of(error: &rustls::Error) -> TlsProblem {
        use rustls::{AlertDescription as Alert, CertificateError as Bad, Error as Tls};
        match error {
            Tls::NoCertificatesPresented => TlsProblem::NoCertificate(Side::Theirs),
            Tls::InvalidCertificate(bad) => match bad {
                Bad::Expired | Bad::ExpiredContext { .. } => TlsProblem::Expired(Side::Theirs),
                Bad::NotValidYet | Bad::NotValidYetContext { .. } => TlsProblem::NotYetValid(Side::Theirs),
                // Another authority of the same name is told by its signature.
                Bad::UnknownIssuer | Bad::BadSignature => TlsProblem::UnknownAuthority(Side::Theirs),
                Bad::NotValidForName | Bad::NotValidForNameContext { .. } => TlsProblem::WrongName(Side::Theirs),
                Bad::InvalidPurpose | Bad::InvalidPurposeContext { .. } => TlsProblem::Purpose(Side::Theirs),
                other => TlsProblem::Handshake(other.to_string()),
            },
            Tls::AlertReceived(alert) => match alert {
                Alert::CertificateRequired => TlsProblem::NoCertificate(Side::Ours),
                Alert::CertificateExpired => TlsProblem::Expired(Side::Ours),
                Alert::UnknownCA | Alert::DecryptError => TlsProblem::UnknownAuthority(Side::Ours),
                Alert::BadCertificate => TlsProblem::WrongName(Side::Ours),
                Alert::UnsupportedCertificate => TlsProblem::Purpose(Side::Ours),
                Alert::Unknown(super::problem::WITHOUT_TLS) => TlsProblem::MissingThere,
                other => TlsProblem::Handshake(format!("it ended it ({other:?})")),
            },
            other => TlsProblem::Handshake(other.to_string()),
        }
    }
}
