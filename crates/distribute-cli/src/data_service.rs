//! `distribute data-service`: the dispatcher of a data service, and data workers on this host.

use std::net::IpAddr;
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
        announce(&dispatcher)?;
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
    announce(&dispatcher)?;
    let address = reached_at(&dispatcher, &host);
    let ended = serve(args, &host, &tasks, &address);
    host.close();
    ended
}

/// Prints the address in the form in which the environment takes it.
///
/// # Errors
/// [`Error::Write`] if it cannot be printed.
fn announce(dispatcher: &Dispatcher) -> Result<(), Error> {
    output::print(&format!("DISTRIBUTE_DATA_SERVICE={}\n", dispatcher.address()))
}

/// Returns the address at which processes of this host reach the dispatcher.
fn reached_at(dispatcher: &Dispatcher, host: &Host) -> String {
    let mut address = dispatcher.address();
    if address.ip().is_unspecified() {
        address.set_ip(if address.is_ipv4() {
            IpAddr::from([127, 0, 0, 1])
        } else {
            IpAddr::from(std::net::Ipv6Addr::LOCALHOST)
        });
        host.note(format!(
            "the data workers are reached at {} only; give --bind an address of this host for consumers on others",
            address.ip()
        ));
    }
    address.to_string()
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
            outcomes.iter().find(|outcome| !outcome.exit.is_success()).map_or(0, |outcome| outcome.exit.code())
        }
    })
}

/// The pause before a data worker is started again; each further one doubles it.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
