//! The simulated machine of a process.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::context::Context;
use crate::device::Device;
use crate::error::{Code, Result};
use crate::event::Event;
use crate::graph::{Executable, Graph};
use crate::memory::Memory;
use crate::module::{Function, Module};
use crate::pool::Pool;
use crate::registry::Registry;
use crate::settings::settings;
use crate::stream::Stream;

/// All objects, by handle.
pub(crate) struct Simulator {
    pub(crate) devices: Vec<Device>,
    pub(crate) memory: Memory,
    pub(crate) contexts: Registry<Context>,
    pub(crate) streams: Registry<Stream>,
    pub(crate) events: Registry<Event>,
    pub(crate) modules: Registry<Module>,
    pub(crate) functions: Registry<Function>,
    pub(crate) pools: Registry<Pool>,
    pub(crate) graphs: Registry<Graph>,
    pub(crate) executables: Registry<Executable>,
}

/// Returns the machine, which the first call creates.
pub(crate) fn simulator() -> &'static Simulator {
    static SIMULATOR: OnceLock<Simulator> = OnceLock::new();
    SIMULATOR.get_or_init(|| {
        let settings = settings();
        let contexts = Registry::new();
        let pools = Registry::new();
        let devices = settings
            .visible
            .iter()
            .enumerate()
            .map(|(ordinal, &physical)| Device::new(ordinal, physical, settings, &contexts, &pools))
            .collect();
        Simulator {
            devices,
            memory: Memory::new(),
            contexts,
            streams: Registry::new(),
            events: Registry::new(),
            modules: Registry::new(),
            functions: Registry::new(),
            pools,
            graphs: Registry::new(),
            executables: Registry::new(),
        }
    })
}

/// `cuInit`.
pub(crate) fn initialise() -> Result {
    if simulator().devices.is_empty() {
        return Err(Code::NO_DEVICE);
    }
    INITIALISED.store(true, Ordering::Release);
    Ok(())
}

pub(crate) fn is_initialised() -> bool {
    INITIALISED.load(Ordering::Acquire)
}

static INITIALISED: AtomicBool = AtomicBool::new(false);
