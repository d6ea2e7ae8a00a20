//! Certificates as files.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use x509_parser::extensions::GeneralName;
use x509_parser::pem::Pem;

use crate::error::Error;

/// A certificate that was found.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shown {
    /// The name of the file, without its end.
    pub(crate) name: String,
    /// The names that it is valid for.
    pub(crate) names: Vec<String>,
    /// Seconds since 1970.
    begins: i64,
    ends: i64,
    until: String,
}

impl Shown {
    /// Reads the first certificate of a file.
    pub(crate) fn read(path: &Path) -> Result<Shown, Error> {
        let text = read(path)?;
        let unreadable = |problem: String| Error::Certificates {
            problem: format!("no certificate: {problem}"),
            given: path.display().to_string(),
            remedy: "remove it, and issue it again by `distribute certs issue`",
        };
        let first =
            Pem::iter_from_buffer(text.as_bytes()).next().ok_or_else(|| unreadable("it is empty".to_owned()))?;
        let pem = first.map_err(|error| unreadable(error.to_string()))?;
        let parsed = pem.parse_x509().map_err(|error| unreadable(error.to_string()))?;
        let alternatives = parsed.subject_alternative_name().map_err(|error| unreadable(error.to_string()))?;
        let names = alternatives.iter().flat_map(|names| &names.value.general_names).filter_map(|name| match name {
            GeneralName::DNSName(name) => Some((*name).to_owned()),
            GeneralName::IPAddress(bytes) => match bytes.len() {
                4 => <[u8; 4]>::try_from(*bytes).ok().map(|bytes| std::net::IpAddr::from(bytes).to_string()),
                _ => <[u8; 16]>::try_from(*bytes).ok().map(|bytes| std::net::IpAddr::from(bytes).to_string()),
            },
            _ => None,
        });
        let validity = parsed.validity();
        Ok(Shown {
            name: path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            names: names.collect(),
            begins: validity.not_before.timestamp(),
            ends: validity.not_after.timestamp(),
            until: validity.not_after.to_string(),
        })
    }

    /// The end of its validity, as text.
    pub(crate) fn until(&self) -> &str {
        &self.until
    }

    pub(crate) fn days_left(&self) -> f64 {
        (self.ends - now()) as f64 / DAY
    }

    /// The days for which it was issued.
    pub(super) fn days(&self) -> u32 {
        // A margin before the beginning is less than a day.
        ((self.ends - self.begins) as f64 / DAY).floor().max(1.0) as u32
    }

    /// Returns whether less than a third of its time is left.
    pub(super) fn ends_soon(&self) -> bool {
        (self.ends - now()) * 3 < self.ends - self.begins
    }
}

/// Returns the certificates of a folder by name, the authority's first.
pub(super) fn shown(folder: &Path) -> Result<Vec<Shown>, Error> {
    let unusable = |source: io::Error| Error::Certificates {
        problem: format!("the folder cannot be read: {source}"),
        given: folder.display().to_string(),
        remedy: "give the folder that `distribute certs init` has created",
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(unusable)? {
        let path = entry.map_err(unusable)?.path();
        if path.extension().is_some_and(|end| end == "pem") {
            found.push(Shown::read(&path)?);
        }
    }
    found.sort_by(|one, other| (one.name != "ca", &one.name).cmp(&(other.name != "ca", &other.name)));
    Ok(found)
}

/// Reads a file of bounded length.
pub(super) fn read(path: &Path) -> Result<String, Error> {
    let failed = |problem: String| Error::Certificates {
        problem: format!("cannot read it: {problem}"),
        given: path.display().to_string(),
        remedy: "give the folder that `distribute certs init` has created",
    };
    let mut text = String::new();
    let file = File::open(path).map_err(|error| failed(error.to_string()))?;
    io::Read::read_to_string(&mut io::Read::take(file, MAX_BYTES), &mut text)
        .map_err(|error| failed(error.to_string()))?;
    Ok(text)
}

/// Writes a file under another name, syncs it, and renames it.
pub(super) fn write(path: &Path, text: &str, mode: u32) -> Result<(), Error> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let written = || -> io::Result<()> {
        // Only its owner can read it until its mode is set.
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(text.as_bytes())?;
        file.as_file().set_permissions(fs::Permissions::from_mode(mode))?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        File::open(folder)?.sync_all()
    };
    written().map_err(|source| Error::Write { path: path.to_owned(), source })
}

/// Returns the error of a certificate or key that cannot be made or read.
pub(super) fn unusable(path: &Path, problem: &rcgen::Error) -> Error {
    Error::Certificates {
        problem: format!("it cannot be used: {problem}"),
        given: path.display().to_string(),
        remedy: "give the folder that `distribute certs init` has created",
    }
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

const DAY: f64 = 24.0 * 3600.0;

/// Size limit of a file.
const MAX_BYTES: u64 = 256 * 1024;
