//! How fast copies, kernels and collectives are, as a share of what the GPU's memory gives a copy in the same run.

mod collectives;
mod copies;
mod kernels;

use std::fmt::Write;
use std::time::Duration;

use distribute_device::cuda::CudaStream;
use serde::Serialize;

use crate::Result;
use crate::gpu::{Gpus, deadline};

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Measurement {
    /// What was done.
    pub what: String,
    /// Bytes read and written, each once; 0 where only the time counts.
    pub bytes: u64,
    /// The median time of one.
    pub microseconds: f64,
    /// Bytes over time, in units of 1e9.
    pub gigabytes_per_second: f64,
    /// That, as a share of the best copy within the GPU's memory in this run.
    pub share_of_copy: Option<f64>,
}

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Sizes of buffers.
    pub sizes: &'static [usize],
    /// How often each thing is done.
    pub repeats: usize,
}

impl Effort {
    /// For a GPU: buffers of 64 MiB to 1 GiB.
    pub const FULL: Effort = Effort { sizes: &[64 << 20, 256 << 20, 1 << 30], repeats: 30 };

    /// For a stand-in, where figures mean nothing: everything once, small.
    pub const TINY: Effort = Effort { sizes: &[1 << 20], repeats: 3 };
}

impl Measurement {
    fn new(what: String, bytes: u64, time: Duration, ceiling: Option<f64>) -> Measurement {
        let seconds = time.as_secs_f64().max(1e-9);
        let gigabytes_per_second = bytes as f64 / seconds / 1e9;
        let share_of_copy = ceiling.filter(|_| bytes > 0).map(|ceiling| gigabytes_per_second / ceiling);
        Measurement { what, bytes, microseconds: seconds * 1e6, gigabytes_per_second, share_of_copy }
    }

    /// As a table.
    pub(crate) fn table(all: &[Measurement]) -> String {
        let mut text = String::new();
        if all.is_empty() {
            return text;
        }
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\n{:<58} {:>10} {:>10} {:>8}", "", "time µs", "GB/s", "of copy");
        for Measurement { what, bytes, microseconds, gigabytes_per_second, share_of_copy } in all {
            let rate = if *bytes > 0 { format!("{gigabytes_per_second:.1}") } else { String::new() };
            let share = share_of_copy.map_or(String::new(), |share| format!("{share:.2}"));
            let _ = writeln!(text, "{what:<58} {microseconds:>10.1} {rate:>10} {share:>8}");
        }
        text.push('\n');
        text
    }
}

/// Measures everything.
///
/// # Errors
/// What a device refuses, such as memory.
pub fn measure(gpus: &Gpus, effort: Effort) -> Result<Vec<Measurement>> {
    let (mut all, ceiling) = copies::measure(gpus, effort)?;
    all.extend(kernels::measure(gpus, effort, ceiling)?);
    all.extend(collectives::measure(gpus, effort, ceiling)?);
    Ok(all)
}

/// The median time of what `enqueue` enqueues; it is told how often it was called, to take turns with buffers.
fn median(stream: &CudaStream, repeats: usize, mut enqueue: impl FnMut(usize) -> Result<()>) -> Result<Duration> {
    let mut times = Vec::with_capacity(repeats);
    // The first ones compile kernels and wake the GPU.
    for turn in 0..repeats + 3 {
        let before = stream.time()?;
        enqueue(turn)?;
        let after = stream.time()?;
        times.push(before.until(&after, deadline())?);
    }
    let mut times = times.split_off(3);
    times.sort();
    Ok(times[times.len() / 2])
}

/// How many sets of buffers take turns, so that none is in the cache when its turn comes.
fn turns(gpus: &Gpus, set_bytes: usize) -> usize {
    let cache = gpus.infos().first().map_or(0, |info| info.l2_bytes as usize);
    (4 * cache).div_ceil(set_bytes.max(1)).clamp(1, 8)
}

fn mib(bytes: usize) -> String {
    if bytes < 1 << 20 { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) }
}
