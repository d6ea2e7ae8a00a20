//! `distribute certs`: the authority of a cluster, and the certificates of its processes.
//!
//! A folder holds ca.pem and ca.key, and NAME.pem and NAME.key for each certificate. Files are written under another
//! name, synced and renamed, so that a reader finds the old or the new one. A certificate is renewed with its key, so
//! that one rename changes all of it.

mod authority;
mod ephemeral;
mod files;

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use self::authority::Authority;
use self::files::shown;
use crate::args::{Certs, CertsCommand};
use crate::error::Error;
use crate::host;
use crate::output;
use crate::report;
use crate::signals::Signal;

pub(crate) use self::ephemeral::Ephemeral;
pub(crate) use self::files::Shown;

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`Error::Certificates`] if a name or file cannot be used, [`Error::Exists`] if a file is there already,
/// [`Error::Write`] if the folder cannot be written.
pub(crate) fn run(args: &Certs) -> Result<String, Error> {
    match &args.command {
        CertsCommand::Init { folder, days } => {
            Authority::init(folder, *days)?;
            Ok(format!("created the authority {}\n", folder.join("ca.pem").display()))
        }
        CertsCommand::Issue { folder, name, hosts, job_name, days } => {
            check_name(name)?;
            let mut names = vec![job_name.clone(), name.clone()];
            names.extend(hosts.iter().cloned());
            names.iter().try_for_each(|name| check_host(name))?;
            names.dedup();
            Authority::open(folder)?.issue(folder, name, names, *days)?;
            Ok(variables(folder, name))
        }
        CertsCommand::Renew { folder, all, watch: false, .. } => renew(folder, *all),
        CertsCommand::Renew { folder, all, watch: true, every } => watch(folder, *all, Duration::from_secs(*every)),
        CertsCommand::Show { folder } => show(folder),
    }
}

/// Returns the variables that give a process a certificate.
fn variables(folder: &Path, name: &str) -> String {
    let folder = std::fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
    let files = [
        ("DISTRIBUTE_TLS_CA", "ca.pem".to_owned()),
        ("DISTRIBUTE_TLS_CERT", format!("{name}.pem")),
        ("DISTRIBUTE_TLS_KEY", format!("{name}.key")),
    ];
    files.map(|(variable, file)| format!("{variable}={}\n", folder.join(file).display())).concat()
}

/// Issues certificates again that have little time left.
fn renew(folder: &Path, all: bool) -> Result<String, Error> {
    let authority = Authority::open(folder)?;
    let mut renewed = String::new();
    for certificate in shown(folder)? {
        if certificate.name != "ca" && (all || certificate.ends_soon()) {
            authority.renew(folder, &certificate)?;
            renewed += &format!("renewed {}\n", folder.join(format!("{}.pem", certificate.name)).display());
        }
    }
    Ok(match renewed.is_empty() {
        true => "nothing ends soon\n".to_owned(),
        false => renewed,
    })
}

/// Renews again and again until a signal ends it. A failure is printed, and tried again.
fn watch(folder: &Path, all: bool, every: Duration) -> Result<String, Error> {
    let signals = host::signals().map_err(Error::system("handle signals"))?;
    // The first look fails at once if the folder cannot be used.
    let mut outcome = renew(folder, all);
    if let Err(error) = outcome {
        return Err(error);
    }
    loop {
        match &outcome {
            Ok(text) if text.starts_with("renewed") => output::say(text),
            Ok(_) => {}
            Err(error) => output::say(&report::error(error)),
        }
        let next = std::time::Instant::now() + every;
        loop {
            match signals.recv_deadline(next) {
                Ok(Signal::Child | Signal::Request(_)) => {}
                Err(crossbeam_channel::RecvTimeoutError::Timeout) => break,
                Ok(Signal::End(_)) | Err(crossbeam_channel::RecvTimeoutError::Disconnected) => {
                    return Ok(String::new());
                }
            }
        }
        outcome = renew(folder, all);
    }
}

/// Returns a table of the certificates.
fn show(folder: &Path) -> Result<String, Error> {
    let all = shown(folder)?;
    let width = all.iter().map(|one| one.name.len()).max().unwrap_or(0);
    let line = |one: &Shown| {
        let left = match one.days_left() {
            days if days < 0.0 => "has expired".to_owned(),
            days => format!("{days:.1} days left"),
        };
        format!("{:width$}  {left:>15}  until {}  {}\n", one.name, one.until(), one.names.join(", "))
    };
    Ok(all.iter().map(line).collect())
}

/// Checks the name of files.
fn check_name(name: &str) -> Result<(), Error> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    match !name.is_empty() && name.len() <= 63 && !name.starts_with('.') && name != "ca" && name.bytes().all(sound) {
        true => Ok(()),
        false => Err(Error::Certificates {
            problem: "--name is not the name of a certificate".to_owned(),
            given: name.escape_debug().to_string(),
            remedy: "give 1 to 63 letters, digits, \"-\", \"_\" and \".\", other than ca",
        }),
    }
}

/// Checks a name that a certificate is to be valid for.
fn check_host(host: &str) -> Result<(), Error> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    match host.parse::<IpAddr>().is_ok() || (!host.is_empty() && host.len() <= 253 && host.bytes().all(sound)) {
        true => Ok(()),
        false => Err(Error::Certificates {
            problem: "a certificate is issued for host names and addresses".to_owned(),
            given: host.escape_debug().to_string(),
            remedy: "give names such as node1.example, or addresses such as 10.0.0.1, without a port",
        }),
    }
}
