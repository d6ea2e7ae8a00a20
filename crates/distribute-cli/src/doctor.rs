//! `distribute doctor`: what this machine offers, what will be used, and why something is not.
//!
//! Each module judges one group of things by a pure function of what was read, and has a separate function that reads;
//! only this module combines them. `report` is the result, `print` its forms, `self_test` the jobs of `--run`.

#[cfg(feature = "tls")]
mod certificates;
#[cfg(not(feature = "tls"))]
#[path = "doctor/certificates/absent.rs"]
mod certificates;
mod cluster;
mod devices;
mod folder;
mod glibc;
mod host;
mod kernels;
mod limits;
mod nccl;
mod network;
mod options;
mod pjrt;
mod print;
mod report;
mod seen;
mod self_test;
mod shared_memory;
mod software;
mod transports;
mod variables;

use std::path::PathBuf;

use distribute_cluster::CoordinationOptions;
use distribute_device::{DeviceKind, absence, discover};
use distribute_train::progress::Form;

use self::host::Cores;
use self::limits::Limit;
use self::network::Interface;
use self::report::{Check, Report};
use self::seen::Seen;
use self::shared_memory::Space;
use crate::args::Doctor;
use crate::error::Error;
use crate::output;

pub(crate) use self::pjrt::probe as probe_pjrt;
pub(crate) use self::self_test::rank as self_test_rank;

/// Runs all checks and prints the report; returns the exit code.
///
/// # Errors
/// [`Error::Write`] if the report cannot be printed.
pub(crate) fn run(args: &Doctor) -> Result<u8, Error> {
    let seen = Seen::by_this_process();
    let mut checks = machine(&seen);
    let transports = network(&seen, &mut checks);
    if args.run {
        checks.extend(self_test::run(args.workers, &transports));
    }
    let report = Report::new(checks);
    let text = match (args.json, args.markdown) {
        (true, _) => print::json(&report),
        (_, true) => print::markdown(&report, args.verbose),
        _ => print::text(&report, print::Look::from_stdout(args.verbose)),
    };
    output::print(&text)?;
    Ok(report.exit_code())
}

/// Makes the checks that need no socket.
fn machine(seen: &Seen) -> Vec<Check> {
    let found = discover();
    let cores = Cores::of_this_process(seen);
    let model = found.iter().find(|device| device.kind == DeviceKind::Cpu).map_or("unknown", |cpu| &cpu.name);
    let mut checks = vec![
        software::build(!cfg!(debug_assertions)),
        software::system(seen, glibc::version().as_deref()),
        host::cpu(model, cores),
        host::threads(seen, cores.usable),
        host::memory(seen),
    ];
    checks.extend(devices::devices(seen, &found, absence));
    checks.push(devices::driver(seen));
    checks.extend(kernels::kernels());
    checks.push(nccl::nccl(found.iter().any(|device| device.kind == DeviceKind::Gpu)));
    checks.extend(pjrt::pjrt(seen));
    checks.extend([
        shared_memory::dev_shm(seen, Space::of(&seen.path("/dev/shm"))),
        shared_memory::ptrace(seen),
        folder::folder(&std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."))),
    ]);
    checks
}

/// Checks the network, the job's description and the transports; returns the transports that work.
fn network(seen: &Seen, checks: &mut Vec<Check>) -> Vec<distribute_collectives::TransportKind> {
    let (cluster, membership) = cluster::cluster(seen);
    let membership = membership.filter(|membership| membership.world_size() > 1);
    let world_size = membership.as_ref().map_or(1, |membership| membership.world_size());
    checks.push(limits::open_files(Limit::of_open_files(), world_size));
    checks.push(limits::locked_memory(seen, Limit::of_locked_memory()));
    let loopback = network::try_loopback();
    let has_loopback = loopback.is_ok();
    checks.push(network::loopback(loopback));
    let (options, wanted) = options::options(seen, Form::from_env());
    checks.push(options);
    let mut working = Vec::new();
    for kind in transports::ALL {
        let attempt = if has_loopback { transports::attempt(kind) } else { transports::Attempt::Untried };
        if matches!(attempt, transports::Attempt::Works(_)) {
            working.push(kind);
        }
        checks.push(transports::transport(kind, attempt, wanted));
    }
    if let Some(as_member) = membership.clone().or_else(network::stranger) {
        // A wrong timeout is reported among the options.
        let lookup = seen.lookup();
        let coordination = CoordinationOptions::from_vars(|name| lookup(name).filter(|_| name != "DISTRIBUTE_TIMEOUT"));
        let local = coordination.and_then(|options| options.local_host(&as_member));
        checks.push(network::network(&Interface::all(), local, membership.is_none()));
    }
    checks.push(cluster);
    if let Some(membership) = &membership {
        checks.push(network::leader(membership, network::look_for_leader(membership)));
    }
    checks.extend(certificates::certificates(seen));
    checks.push(variables::variables(seen));
    working
}
