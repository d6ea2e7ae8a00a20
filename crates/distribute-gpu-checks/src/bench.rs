//! The speed of copies, kernels and collectives, relative to a copy within the GPU's memory in the same run.

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
    /// The operation.
    pub what: String,
    /// Bytes read and written, each counted once; 0 if only the time is of interest.
    pub bytes: u64,
    /// The median time of one operation.
    pub microseconds: f64,
    /// Bytes over time, in units of 1e9.
    pub gigabytes_per_second: f64,
    /// The rate relative to the best copy within the GPU's memory in this run.
    pub share_of_copy: Option<f64>,
}

/// The extent of the measurements.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Sizes of buffers.
    pub sizes: &'static [usize],
    /// How often each operation is repeated.
    pub repeats: usize,
    /// How many operations of a GPU alone are enqueued between two times of the clock, so that it does not wait for the
    /// host.
    pub in_row: usize,
}

impl Effort {
    /// For a GPU: buffers of 64 MiB to 1 GiB.
    pub const FULL: Effort = Effort { sizes: &[64 << 20, 256 << 20, 1 << 30], repeats: 30, in_row: 10 };

    /// For a simulated GPU, on which the figures are meaningless: everything once, small.
    pub const TINY: Effort = Effort { sizes: &[1 << 20], repeats: 3, in_row: 1 };
}

impl Measurement {
    fn new(what: String, bytes: u64, time: Duration, ceiling: Option<f64>) -> Measurement {
        let seconds = time.as_secs_f64().max(1e-9);
        let gigabytes_per_second = bytes as f64 / seconds / 1e9;
        let share_of_copy = ceiling.filter(|_| bytes > 0).map(|ceiling| gigabytes_per_second / ceiling);
        Measurement { what, bytes, microseconds: seconds * 1e6, gigabytes_per_second, share_of_copy }
    }

    /// Formats measurements as a table.
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
/// The device's error, for example if there is not enough memory.
pub fn measure(gpus: &Gpus, effort: Effort) -> Result<Vec<Measurement>> {
    let (mut all, ceiling) = copies::measure(gpus, effort)?;
    all.extend(kernels::measure(gpus, effort, ceiling)?);
    all.extend(collectives::measure(gpus, effort, ceiling)?);
    Ok(all)
}

/// Returns the median time of the work that one call of `enqueue` enqueues; it is passed its number of previous calls,
/// to rotate buffers. `in_row` calls are timed together.
fn median(
    stream: &CudaStream,
    (repeats, in_row): (usize, usize),
    mut enqueue: impl FnMut(usize) -> Result<()>,
) -> Result<Duration> {
    let mut times = Vec::with_capacity(repeats);
    // The first calls compile kernels and wake the GPU.
    for round in 0..repeats + 3 {
        let before = stream.time()?;
        (round * in_row..(round + 1) * in_row).try_for_each(&mut enqueue)?;
        let after = stream.time()?;
        times.push(before.until(&after, deadline())? / in_row as u32);
    }
    let mut times = times.split_off(3);
    times.sort();
    Ok(times[times.len() / 2])
}

/// Returns how many sets of buffers are rotated, so that none is in the cache when it is used again.
fn turns(gpus: &Gpus, set_bytes: usize) -> usize {
    let cache = gpus.infos().first().map_or(0, |info| info.l2_bytes as usize);
    (4 * cache).div_ceil(set_bytes.max(1)).clamp(1, 8)
}

fn mib(bytes: usize) -> String {
    if bytes < 1 << 20 { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) }
}
