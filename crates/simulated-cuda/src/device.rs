//! Devices: their properties, their memory and peer access to it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::context::{CONTEXTS, Context};
use crate::error::{Code, Result};
use crate::memory::Window;
use crate::pool::{POOLS, Pool};
use crate::registry::locked;
use crate::settings::{Arch, Settings, settings};

/// A visible device.
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    /// Its index before `CUDA_VISIBLE_DEVICES` is applied.
    pub(crate) physical: u32,
    pub(crate) arch: Arch,
    pub(crate) total_bytes: u64,
    /// The address range of its memory.
    pub(crate) window: Window,
    pub(crate) primary: Arc<Context>,
    pub(crate) default_pool: Arc<Pool>,
    pub(crate) current_pool: Mutex<Arc<Pool>>,
    used_bytes: Mutex<u64>,
    retained: Mutex<u32>,
}

impl Device {
    fn new(ordinal: usize, physical: u32, settings: &Settings) -> Self {
        let default_pool = POOLS.insert(|handle| Pool::new(handle, ordinal));
        Self {
            ordinal,
            physical,
            arch: settings.arch,
            total_bytes: settings.memory_bytes,
            window: Window::reserve(ordinal).expect("no address space for a simulated device's memory"),
            primary: CONTEXTS.insert(|handle| Context::primary(handle, ordinal)),
            current_pool: Mutex::new(default_pool.clone()),
            default_pool,
            used_bytes: Mutex::new(0),
            retained: Mutex::new(0),
        }
    }

    /// Counts `bytes` as used.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if the device has less memory left.
    pub(crate) fn take(&self, bytes: u64) -> Result {
        let mut used = locked(&self.used_bytes);
        if bytes > self.total_bytes - *used {
            return Err(Code::OUT_OF_MEMORY);
        }
        *used += bytes;
        Ok(())
    }

    pub(crate) fn give_back(&self, bytes: u64) {
        *locked(&self.used_bytes) -= bytes;
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.total_bytes - *locked(&self.used_bytes)
    }

    /// `cuDevicePrimaryCtxRetain`.
    pub(crate) fn retain(&self) -> usize {
        let mut retained = locked(&self.retained);
        *retained += 1;
        self.primary.activate();
        self.primary.handle
    }

    /// `cuDevicePrimaryCtxRelease`: the last release ends the context by `end`, and no thread can retain it meanwhile.
    pub(crate) fn release(&self, end: impl FnOnce(&Context)) -> Result {
        let mut retained = locked(&self.retained);
        match *retained {
            0 => Err(Code::INVALID_CONTEXT),
            1 => {
                *retained = 0;
                end(&self.primary);
                Ok(())
            }
            _ => {
                *retained -= 1;
                Ok(())
            }
        }
    }

    pub(crate) fn is_active(&self) -> bool {
        *locked(&self.retained) > 0
    }

    /// Returns whether kernels of this device may access memory of `other` after that is enabled.
    pub(crate) fn reaches(&self, other: &Self) -> bool {
        settings().peers.allow(self.physical, other.physical)
    }

    pub(crate) fn uuid(&self) -> [u8; 16] {
        let mut uuid = *b"simulated-cuda\0\0";
        uuid[14..].copy_from_slice(&u16::try_from(self.physical).unwrap_or(u16::MAX).to_be_bytes());
        uuid
    }

    pub(crate) fn pci_bus_id(&self) -> String {
        format!("0000:{:02X}:00.0", self.pci_bus())
    }

    fn pci_bus(&self) -> u32 {
        0x10 + self.physical
    }

    /// Returns the value of a `CUdevice_attribute`; attributes that are not listed are unsupported or have no meaning
    /// in a simulation.
    pub(crate) fn attribute(&self, attribute: u32) -> Result<i32> {
        let small = |value: u32| i32::try_from(value).unwrap_or(i32::MAX);
        Ok(match attribute {
            1 => small(MAX_THREADS_PER_BLOCK),
            2 | 3 => small(MAX_BLOCK[0]),
            4 => small(MAX_BLOCK[2]),
            5 => small(MAX_GRID[0]),
            6 | 7 => small(MAX_GRID[1]),
            8 | 97 => 48 << 10,  // shared memory of a block
            9 => 64 << 10,       // constant memory
            10 => 32,            // threads of a warp
            11 => i32::MAX,      // pitch
            12 | 82 => 64 << 10, // registers
            13 | 36 => 1 << 20,  // clocks, in kHz
            14 => 512,           // texture alignment
            15 | 19 => 1,        // concurrent copies and kernels; mapped host memory
            16 => 4,             // multiprocessors
            31 | 41 => 1,        // concurrent kernels; unified addressing
            33 => small(self.pci_bus()),
            37 => 1024,    // width of the memory bus, in bits
            38 => 4 << 20, // second-level cache
            39 => 2048,    // threads of a multiprocessor
            40 => 2,       // copy engines
            75 => small(self.arch.major),
            76 => small(self.arch.minor),
            78 | 91 | 99 => 1, // priorities of streams; registered host memory
            81 => 96 << 10,    // shared memory of a multiprocessor
            106 => 32,         // blocks of a multiprocessor
            115 => i32::from(settings().pools),
            0 | 148.. => return Err(Code::INVALID_VALUE),
            _ => 0,
        })
    }
}

/// Returns the visible devices, which the first call creates.
pub(crate) fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let settings = settings();
        let visible = settings.visible.iter().enumerate();
        visible.map(|(ordinal, &physical)| Device::new(ordinal, physical, settings)).collect()
    })
}

/// `cuInit`.
pub(crate) fn initialise() -> Result {
    if devices().is_empty() {
        return Err(Code::NO_DEVICE);
    }
    INITIALISED.store(true, Ordering::Release);
    Ok(())
}

pub(crate) fn is_initialised() -> bool {
    INITIALISED.load(Ordering::Acquire)
}

static INITIALISED: AtomicBool = AtomicBool::new(false);

/// Returns the visible device with an ordinal.
pub(crate) fn device(ordinal: i32) -> Result<&'static Device> {
    let index = usize::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)?;
    devices().get(index).ok_or(Code::INVALID_DEVICE)
}

pub(crate) const NAME: &str = "Simulated CUDA device";
pub(crate) const MAX_THREADS_PER_BLOCK: u32 = 1024;
pub(crate) const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
pub(crate) const MAX_GRID: [u32; 3] = [0x7FFF_FFFF, 0xFFFF, 0xFFFF];
