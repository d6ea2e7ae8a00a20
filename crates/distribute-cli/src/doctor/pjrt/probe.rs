//! The process that opens the plugin.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use distribute_device::pjrt::{Client, ClientOptions, Plugin};
use pjrt_sys::{Error, Library, Search};

use super::{Step, child};

/// Opens the plugin that programs would open, and prints each step.
pub(crate) fn probe() -> ExitCode {
    let chips = distribute_cluster::tpu::local_chips();
    if let Err(problem) = steps(&Search::new().with_tpu_chips(chips.is_some()), chips) {
        tell(&Step::Failed { problem });
    }
    ExitCode::SUCCESS
}

fn steps(search: &Search, chips: Option<u32>) -> Result<(), String> {
    let deadline = Instant::now() + child::patience(chips);
    let library = match Library::open(search) {
        Ok(library) => library,
        Err(Error::NotFound { named_by: None, attempts }) => {
            tell(&Step::Absent { attempts: attempts.iter().map(ToString::to_string).collect() });
            return Ok(());
        }
        Err(error) => return Err(error.to_string()),
    };
    tell(&Step::Opened { path: library.path().display().to_string(), version: library.version().to_string() });
    let plugin = Plugin::open(search, deadline).map_err(|error| error.to_string())?;
    let versions = plugin.stablehlo_versions().map_err(|error| error.to_string())?;
    let number = |version: Vec<i64>| version.iter().map(i64::to_string).collect::<Vec<_>>().join(".");
    tell(&Step::Initialised { stablehlo: versions.map(|(oldest, newest)| (number(oldest), number(newest))) });
    if chips.is_none() && is_libtpu(plugin.path()) {
        tell(&Step::NoDevices);
        return Ok(());
    }
    let client = Client::create(&plugin, ClientOptions::new(), deadline).map_err(|error| error.to_string())?;
    let mut kinds = BTreeMap::<String, usize>::new();
    for device in client.addressable_devices() {
        *kinds.entry(device.description().kind.clone()).or_default() += 1;
    }
    tell(&Step::Devices {
        platform: client.platform_name().to_owned(),
        software: client.platform_version().to_owned(),
        kinds: kinds.into_iter().map(|(kind, count)| format!("{count} of kind {kind:?}")).collect(),
    });
    Ok(())
}

/// Prints a line. The plugin may print others, which begin otherwise.
fn tell(step: &Step) {
    // Texts and lists can always be serialized; an error of the pipe cannot be reported.
    if let Ok(json) = serde_json::to_string(step) {
        let mut stdout = std::io::stdout().lock();
        let _ = writeln!(stdout, "\n{}{json}", child::MARK);
        let _ = stdout.flush();
    }
}

/// Returns whether a file is libtpu, by its name or the name that it leads to.
fn is_libtpu(file: &Path) -> bool {
    let named = |file: &Path| file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libtpu"));
    named(file) || file.canonicalize().is_ok_and(|real| named(&real))
}
