//! The variables that give a process its certificate.

use std::path::PathBuf;

use crate::{Error, Result, environment};

/// The files that give a process its certificate, each in PEM, and the name that all certificates of the job have.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TlsFiles {
    /// The certificates of the authority, one or more.
    pub authority: PathBuf,
    /// The certificate of this process, followed by those of intermediate authorities.
    pub certificate: PathBuf,
    /// The private key, which only its owner may read.
    pub key: PathBuf,
    /// The DNS name that the certificate of every process is valid for.
    pub name: String,
}

impl TlsFiles {
    /// The name that certificates have where none is given.
    pub const DEFAULT_NAME: &str = "distribute";

    /// Names the files.
    pub fn new(authority: impl Into<PathBuf>, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> TlsFiles {
        let name = TlsFiles::DEFAULT_NAME.to_owned();
        TlsFiles { authority: authority.into(), certificate: certificate.into(), key: key.into(), name }
    }

    /// Sets the name that the certificate of every process is valid for.
    #[must_use]
    pub fn name(self, name: impl Into<String>) -> TlsFiles {
        TlsFiles { name: name.into(), ..self }
    }

    /// Returns the files that DISTRIBUTE_TLS_CA, DISTRIBUTE_TLS_CERT and DISTRIBUTE_TLS_KEY name, or `None` if none of
    /// them is set.
    ///
    /// # Errors
    /// [`Error::Config`] if some of them are set and others are not, or if only DISTRIBUTE_TLS_NAME is set.
    pub fn from_vars(variable: impl Fn(&str) -> Option<String>) -> Result<Option<TlsFiles>> {
        let variable = environment::set(&variable);
        let given = [AUTHORITY, CERTIFICATE, KEY].map(|name| variable(name).map(|path| path.trim().to_owned()));
        let name = variable(NAME).map(|name| name.trim().to_owned());
        let present = || {
            let names = [AUTHORITY, CERTIFICATE, KEY].into_iter().zip(&given).filter(|(_, path)| path.is_some());
            let names: Vec<&str> = names.map(|(name, _)| name).chain(name.as_ref().map(|_| NAME)).collect();
            names.join(", ")
        };
        match given.clone() {
            [Some(authority), Some(certificate), Some(key)] => {
                let files = TlsFiles::new(authority, certificate, key);
                Ok(Some(match name {
                    Some(name) => files.name(name),
                    None => files,
                }))
            }
            [None, None, None] if name.is_none() => Ok(None),
            _ => Err(Error::config(
                "the variables of TLS",
                "some of them are set, and others are not",
                present(),
                "DISTRIBUTE_TLS_CA, DISTRIBUTE_TLS_CERT and DISTRIBUTE_TLS_KEY, or none",
                "Set all three, or unset those that are set.",
            )),
        }
    }
}

const AUTHORITY: &str = "DISTRIBUTE_TLS_CA";
const CERTIFICATE: &str = "DISTRIBUTE_TLS_CERT";
const KEY: &str = "DISTRIBUTE_TLS_KEY";
const NAME: &str = "DISTRIBUTE_TLS_NAME";

#[cfg(test)]
mod tests {
    use super::*;

    fn read(set: &[(&str, &str)]) -> Result<Option<TlsFiles>> {
        TlsFiles::from_vars(|name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn all_three_files_are_given_or_none() {
        assert_eq!(read(&[]).unwrap(), None);
        assert_eq!(read(&[(AUTHORITY, " "), (NAME, "")]).unwrap(), None);
        let all = [(AUTHORITY, "/ca"), (CERTIFICATE, "/c"), (KEY, "/k")];
        assert_eq!(read(&all).unwrap(), Some(TlsFiles::new("/ca", "/c", "/k")));
        let named = [&all[..], &[(NAME, "job.example")]].concat();
        assert_eq!(read(&named).unwrap().unwrap().name, "job.example");
        for left_out in 0..3 {
            let some: Vec<_> =
                all.iter().enumerate().filter(|(place, _)| *place != left_out).map(|(_, own)| *own).collect();
            let error = read(&some).unwrap_err().to_string();
            assert!(error.contains("some of them are set") && error.contains(some[0].0), "{error}");
        }
        let error = read(&[(NAME, "job.example")]).unwrap_err().to_string();
        assert!(error.contains(NAME), "{error}");
    }
}
