//! The addresses of a process of an elastic job, and its listeners.

use std::io::Result as IoResult;
use std::net::TcpListener;
use std::sync::Arc;

use super::options::ElasticOptions;
use crate::coordination::{QUEUE, listen};
use crate::host::{by_route, split};
use crate::{Error, Membership, Result};

/// Where a process is reached.
pub(super) struct Addresses {
    /// For control messages.
    pub(super) listener: TcpListener,
    pub(super) control: String,
    /// The host at which others reach the process.
    pub(super) host: String,
    /// The place of `control` among the seeds.
    pub(super) seat: Option<u64>,
    /// For the coordination of generations that the process leads.
    pub(super) service: Arc<TcpListener>,
    pub(super) service_address: String,
}

impl Addresses {
    /// Listens, and finds out which seed this process is.
    pub(super) fn find(options: &ElasticOptions) -> Result<Addresses> {
        let wanted = wanted(options);
        let failed = |source| Error::Control { address: wanted.clone(), source };
        let listener = match &options.listener {
            Some(listener) => listener.try_clone(),
            None => bind(&wanted),
        };
        let listener = listener.map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let host = match (&options.host, split(&wanted)) {
            (Some(host), _) => host.clone(),
            (None, Ok((host, _))) if options.listener.is_none() && !is_anywhere(host) => host.to_owned(),
            (None, _) if !bound.ip().is_unspecified() => bound.ip().to_string(),
            (None, _) => {
                let seed = options.seeds.first();
                let towards = match seed {
                    Some(seed) => Membership::new(1, 2, seed.clone())?,
                    None => Membership::new(0, 1, "")?,
                };
                by_route(&towards)
            }
        };
        let control = joined(&host, bound.port());
        let seat = options.seeds.iter().position(|seed| *seed == control).map(|place| place as u64);
        let service = TcpListener::bind((bound.ip(), 0)).map_err(failed)?;
        let service_address = joined(&host, service.local_addr().map_err(failed)?.port());
        super::generation::check_address(&control).and(super::generation::check_address(&service_address)).map_err(
            |problem| {
                let remedy = "Set host to a name or address by which others reach this process.";
                Error::config("the options of an elastic job", problem, host.clone(), "host:port", remedy)
            },
        )?;
        // As for the leader of a coordination: all others may connect at once.
        rustix::net::listen(&listener, QUEUE).map_err(|error| failed(error.into()))?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Addresses { listener, control, host, seat, service: Arc::new(service), service_address })
    }
}

/// Returns the address to listen on.
fn wanted(options: &ElasticOptions) -> String {
    let host = |address: &String| split(address).map(|(host, _)| host.to_owned()).ok();
    let own = options.seeds.iter().filter(|seed| options.host.is_some() && host(seed) == options.host);
    let own: Vec<&String> = own.collect();
    match (&options.bind, own.as_slice()) {
        (Some(bind), _) => bind.clone(),
        (None, [only]) => (*only).clone(),
        (None, _) => ANYWHERE.to_owned(),
    }
}

/// Any free port on all interfaces.
const ANYWHERE: &str = "0.0.0.0:0";

fn is_anywhere(host: &str) -> bool {
    matches!(host, "0.0.0.0" | "[::]" | "::")
}

fn bind(address: &str) -> IoResult<TcpListener> {
    // A job of one, whose leader's address may have port 0.
    match Membership::new(0, 1, address) {
        Ok(membership) => listen(&membership),
        Err(error) => Err(std::io::Error::other(error.to_string())),
    }
}

/// Joins a host and a port; an IPv6 address gets its brackets.
fn joined(host: &str, port: u16) -> String {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}
