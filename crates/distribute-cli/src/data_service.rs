//! `distribute data-service`: the dispatcher of a data service, and data workers on this host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use distribute_cluster::JobId;
use distribute_data_service::{Dispatcher, DispatcherOptions};

use crate::args::DataService;
use crate::error::Error;
use crate::host::{self, Host, Settings, TICK};
use crate::job::Task;
use crate::output;
use crate::restart::Budget;
use crate::revival::{Revival, Rules, Runner, Start};
use crate::signals::Signal;

/// Serves until it is told to stop, or no data worker is left to start again; returns the exit code.
pub(crate) fn run(args: &DataService) -> Result<u8, Error> {
    let identity = args.id.as_deref().map(JobId::new).transpose().map_err(|_| Error::Options {
        problem: "--id is not the name of a data service",
        given: args.id.clone().unwrap_or_default().escape_debug().to_string(),
        expected: "1 to 128 printable ASCII characters without spaces".to_owned(),
    })?;
    let options = DispatcherOptions::default().bind(args.bind.as_str()).identity(identity);
    let tasks: Vec<Task> = (0..args.workers.unwrap_or(0) as usize)
        .map(|index| Task { rank: index, job: "data-worker", index, node: 0 })
        .collect();
    let started = || Dispatcher::start(options).map_err(|error| Error::DataService { problem: error.to_string() });
    if tasks.is_empty() {
        // Before the address is shown, so that who reads it can stop the service.
        let signals = host::signals().map_err(Error::system("handle signals"))?;
        let dispatcher = started()?;
        announce(reached_at(&dispatcher))?;
        loop {
            // None comes only if the thread that passes them on has ended.
            match signals.recv_timeout(TICK) {
                Ok(Signal::Child | Signal::Request(_)) | Err(crossbeam_channel::RecvTimeoutError::Timeout) => {}
                Ok(Signal::End(_)) | Err(crossbeam_channel::RecvTimeoutError::Disconnected) => return Ok(0),
            }
        }
    }
    let settings = Settings {
        program: args.program.clone(),
        log_dir: args.log_dir.clone(),
        quiet: args.quiet,
        timestamps: args.timestamps,
        ..Settings::default()
    };
    let host = Host::new(settings, &tasks)?;
    let dispatcher = started()?;
    let address = reached_at(&dispatcher);
    announce(address)?;
    let ended = serve(args, &host, &tasks, &address.to_string());
    host.close();
    ended
}

/// Prints the address in the form in which the environment takes it.
///
/// # Errors
/// [`Error::Write`] if it cannot be printed.
fn announce(address: SocketAddr) -> Result<(), Error> {
    output::print(&format!("DISTRIBUTE_DATA_SERVICE={address}\n"))
}

/// Returns an address at which the dispatcher is reached, also from other hosts if there is one.
fn reached_at(dispatcher: &Dispatcher) -> SocketAddr {
    let interfaces = || if_addrs::get_if_addrs().unwrap_or_default().into_iter().map(|interface| interface.ip());
    reachable(dispatcher.address(), default_route, interfaces)
}

/// Returns an address to connect to, where `bound` may be that of all interfaces: of the default route, else of the
/// first interface that others may reach, else of this host alone.
fn reachable<I: Iterator<Item = IpAddr>>(
    bound: SocketAddr,
    default_route: impl Fn(IpAddr) -> Option<IpAddr>,
    interfaces: impl Fn() -> I,
) -> SocketAddr {
    if !bound.ip().is_unspecified() {
        return bound;
    }
    let is_usable = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => bound.is_ipv4() && !ip.is_loopback() && !ip.is_link_local() && !ip.is_unspecified(),
        IpAddr::V6(ip) => bound.is_ipv6() && !ip.is_loopback() && !ip.is_unicast_link_local() && !ip.is_unspecified(),
    };
    let alone = || match bound.ip() {
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    let found = default_route(bound.ip()).filter(&is_usable);
    SocketAddr::new(found.or_else(|| interfaces().find(is_usable)).unwrap_or_else(alone), bound.port())
}

/// Returns the address of the interface with the default route, of the family of `any`. Nothing is sent.
fn default_route(any: IpAddr) -> Option<IpAddr> {
    // Addresses for documentation, of no host.
    let elsewhere: IpAddr = match any {
        IpAddr::V4(_) => Ipv4Addr::new(192, 0, 2, 1).into(),
        IpAddr::V6(_) => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((elsewhere, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// Keeps the data workers running until a signal, or until all have ended.
fn serve(args: &DataService, host: &Host, tasks: &[Task], address: &str) -> Result<u8, Error> {
    let seconds = |seconds: u32| Duration::from_secs(seconds.into());
    let budget = Budget::new(args.max_restarts, Some(seconds(args.restart_window)), RESTART_PAUSE);
    let revival = Revival::new(tasks.len(), Rules::Independent, &budget, seconds(args.grace));
    let environment = |_: &Task, _: Start| {
        let mut env = vec![("DISTRIBUTE_DATA_SERVICE", Some(address.to_owned()))];
        env.extend(args.id.clone().map(|id| ("DISTRIBUTE_DATA_SERVICE_ID", Some(id))));
        Ok(env)
    };
    let ended = Runner::new(host, tasks, revival, seconds(args.grace), environment)?.run()?;
    Ok(match ended.revival.interrupted() {
        Some(_) => 0,
        None => {
            let outcomes = ended.revival.outcomes();
            let failed = outcomes.iter().filter(|outcome| !outcome.exit.is_success());
            failed.min_by_key(|outcome| outcome.at).map_or(0, |outcome| outcome.exit.code())
        }
    })
}

/// The pause before a data worker is started again; each further one doubles it.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_that_is_shown_can_be_connected_to() {
        let of = |bound: &str, route: Option<&str>, interfaces: &[&str]| {
            let route: Option<IpAddr> = route.map(|ip| ip.parse().unwrap());
            let interfaces: Vec<IpAddr> = interfaces.iter().map(|ip| ip.parse().unwrap()).collect();
            reachable(bound.parse().unwrap(), |_| route, || interfaces.clone().into_iter()).to_string()
        };
        assert_eq!(of("10.0.0.7:5050", Some("10.0.0.8"), &[]), "10.0.0.7:5050");
        assert_eq!(of("127.0.0.1:5050", Some("10.0.0.8"), &[]), "127.0.0.1:5050");
        assert_eq!(of("0.0.0.0:5050", Some("10.0.0.8"), &["10.0.0.9"]), "10.0.0.8:5050");
        let interfaces = ["127.0.0.1", "169.254.0.3", "fe80::1", "2001:db8::7", "10.0.0.9"];
        assert_eq!(of("0.0.0.0:5050", None, &interfaces), "10.0.0.9:5050");
        assert_eq!(of("[::]:5050", None, &interfaces), "[2001:db8::7]:5050");
        assert_eq!(of("0.0.0.0:5050", None, &["127.0.0.1"]), "127.0.0.1:5050");
        assert_eq!(of("[::]:5050", None, &[]), "[::1]:5050");
    }
}
