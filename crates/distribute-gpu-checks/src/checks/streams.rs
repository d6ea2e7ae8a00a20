//! Memory, copies, streams and events.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use distribute_device::{Device, Error as DeviceError, HostBuffer, Stream};

use crate::Result;
use crate::check::{Entry, Outcome, ensure, passed};
use crate::gpu::{Gpus, deadline, get, put};
use crate::values::{Random, same};

pub(super) const CHECKS: [Entry; 8] = [
    ("memory: new memory is zero and counted against its device's limit", memory),
    ("memory: memory that is dropped while it is used lives until that has ended", dropped),
    ("memory: host memory for copies is pinned and zero", pinned),
    ("copies: bytes arrive, also where ranges overlap", copies),
    ("copies: bytes go from one device to another", peers),
    ("streams: an event orders one stream behind another", ordered),
    ("streams: a host function that fails is reported to all that wait behind it", failing),
    ("streams: waits end at their deadlines", deadlines),
];

const MIB: usize = 1 << 20;

fn memory(gpus: &Gpus) -> Result<Outcome> {
    let device = gpus.on_first(1, Some(8 * MIB as u64))?.remove(0);
    let stream = device.stream()?;
    for round in 0..4 {
        let buffer = device.allocate(5 * MIB)?;
        ensure(get(&device, &stream, &buffer)?.iter().all(|byte| *byte == 0), || format!("round {round}: not zero"))?;
        ensure(device.memory_use().used_bytes == 5 * MIB as u64, || format!("{:?}", device.memory_use()))?;
        let refused = device.allocate(4 * MIB);
        ensure(matches!(refused, Err(DeviceError::DeviceMemory { .. })), || "the limit was exceeded".to_owned())?;
        // The next round may get the same memory.
        stream.fill(&buffer, 0xff)?;
        stream.synchronize(deadline())?;
    }
    ensure(device.memory_use().used_bytes == 0, || format!("something is left: {:?}", device.memory_use()))?;
    let whole = gpus.on_first(1, None)?.remove(0);
    let (_, total) = whole.free_and_total_bytes()?;
    let refused = whole.allocate(total as usize * 2);
    ensure(matches!(refused, Err(DeviceError::DeviceMemory { .. })), || format!("{refused:?}"))?;
    ensure(whole.allocate(0)?.is_empty(), || "nothing is something".to_owned())?;
    passed("four rounds, a limit of 8 MiB, twice the GPU's memory, none")
}

fn dropped(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let mut random = Random::fresh();
    let bytes = random.bytes(MIB);
    let result = device.allocate(MIB)?;
    let sources = (0..3).map(|_| put(&device, &stream, &bytes)).collect::<Result<Vec<_>>>()?;
    // On a GPU without memory pools, dropping waits for the users of the memory, so the stream continues by itself.
    stream.launch_host(Box::new(|| {
        thread::sleep(Duration::from_millis(200));
        Ok(())
    }))?;
    for source in sources {
        stream.copy(&source, &result)?;
        drop(source);
        // Memory that was freed too early would be reused here.
        let other = device.allocate(MIB)?;
        device.create_stream()?.fill(&other, 0x11)?;
    }
    same("the copy", &get(&device, &stream, &result)?, &bytes)?;
    passed("three buffers")
}

fn pinned(gpus: &Gpus) -> Result<Outcome> {
    let (device, _) = gpus.first()?;
    let buffer = device.allocate_host(MIB + 3)?;
    ensure(buffer.is_pinned(), || "it is not pinned".to_owned())?;
    ensure(buffer.as_bytes().iter().all(|byte| *byte == 0), || "it is not zero".to_owned())?;
    ensure(device.allocate_host(0)?.is_empty(), || "nothing is something".to_owned())?;
    passed("1 MiB and 3 bytes")
}

fn copies(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let mut random = Random::fresh();
    let bytes = random.bytes(3 * MIB + 7);
    let buffer = put(&device, &stream, &bytes)?;
    same("to the GPU and back", &get(&device, &stream, &buffer)?, &bytes)?;
    let pageable = HostBuffer::from_slice(&bytes)?;
    let copy = device.allocate(1000)?;
    let pageable = stream.copy_from_host(pageable, 17, &copy)?.wait(deadline())?;
    same("a part of pageable memory", &get(&device, &stream, &copy)?, &bytes[17..1017])?;
    let read = stream.copy_to_host(&buffer.slice(5..105)?, pageable, 3)?.wait(deadline())?;
    same("into the middle of pageable memory", &read.as_bytes()[3..103], &bytes[5..105])?;

    stream.copy(&buffer.slice(0..2 * MIB)?, &buffer.slice(MIB..3 * MIB)?)?;
    let mut expected = bytes.clone();
    expected.copy_within(0..2 * MIB, MIB);
    same("an overlapping copy", &get(&device, &stream, &buffer)?, &expected)?;
    stream.fill(&buffer.slice(3..3 + MIB)?, 0x42)?;
    expected[3..3 + MIB].fill(0x42);
    same("a fill", &get(&device, &stream, &buffer)?, &expected)?;
    let refused = stream.copy(&buffer.slice(0..4)?, &buffer.slice(0..5)?);
    ensure(matches!(refused, Err(DeviceError::CopyLength { .. })), || format!("{refused:?}"))?;
    passed("whole, parts, overlaps, fills")
}

fn peers(gpus: &Gpus) -> Result<Outcome> {
    let mut random = Random::fresh();
    let mut pairs = vec![gpus.on_first(2, None)?];
    pairs.extend(gpus.on_each(2)?);
    for pair in &pairs {
        let bytes = random.bytes(MIB + 5);
        let (there, here) = (pair[0].stream()?, pair[1].stream()?);
        let (a, b) = (put(&pair[0], &there, &bytes)?, pair[1].allocate(MIB + 5)?);
        let arrived = pair[0].create_event()?;
        there.copy_peer(&a, &b)?;
        there.record(&*arrived)?;
        here.wait(&*arrived)?;
        same("the copy", &get(&pair[1], &here, &b)?, &bytes)?;
        let refused = here.copy(&a, &b);
        ensure(matches!(refused, Err(DeviceError::Foreign { .. })), || format!("{refused:?}"))?;
    }
    passed(if pairs.len() > 1 { "within one GPU and between two" } else { "within one GPU" })
}

fn ordered(gpus: &Gpus) -> Result<Outcome> {
    let (device, first) = gpus.first()?;
    let second = device.stream()?;
    let mut random = Random::fresh();
    let (a, b) = (device.allocate(MIB)?, device.allocate(MIB)?);
    for round in 0..10 {
        let byte = random.bytes(1)[0];
        let gate = Gate::close(&first)?;
        first.fill(&a, byte)?;
        let filled = device.create_event()?;
        ensure(filled.is_ready()?, || "an event is waited for before it is recorded".to_owned())?;
        first.record(&*filled)?;
        second.wait(&*filled)?;
        second.copy(&a, &b)?;
        ensure(!filled.is_ready()?, || format!("round {round}: the event is ready before its stream came to it"))?;
        gate.open();
        same("the copy", &get(&device, &second, &b)?, &vec![byte; MIB])?;
        ensure(filled.is_ready()?, || format!("round {round}: the event is not ready"))?;
    }
    passed("ten rounds")
}

fn failing(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let other = device.stream()?;
    let (before, after) = (device.create_event()?, device.create_event()?);
    stream.record(&*before)?;
    let gate = Gate::close(&stream)?;
    stream.launch_host(Box::new(|| Err("the disk is full".into())))?;
    let ran = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&ran);
    stream.launch_host(Box::new(move || {
        flag.store(true, Ordering::SeqCst);
        Ok(())
    }))?;
    stream.record(&*after)?;
    other.wait(&*after)?;
    gate.open();
    let told = stream.synchronize(deadline()).err().map_or(String::new(), chain);
    ensure(told.contains("a host function failed") && told.contains("the disk is full"), || told.clone())?;
    ensure(!ran.load(Ordering::SeqCst), || "a host function behind the failed one was run".to_owned())?;
    before.wait(deadline())?;
    ensure(after.wait(deadline()).is_err(), || "an event behind the failure is fine".to_owned())?;
    ensure(other.synchronize(deadline()).is_err(), || "a stream that waited for the failed one is fine".to_owned())?;
    let third = device.stream()?;
    third.launch_host(Box::new(|| Ok(())))?;
    third.synchronize(deadline())?;
    third.launch_host(Box::new(|| panic!("as this check wants it")))?;
    let told = third.synchronize(deadline()).err().map_or(String::new(), chain);
    ensure(told.contains("panicked: as this check wants it"), || told.clone())?;
    passed("an error and a panic")
}

fn deadlines(gpus: &Gpus) -> Result<Outcome> {
    let (device, stream) = gpus.first()?;
    let gate = Gate::close(&stream)?;
    let buffer = device.allocate(64)?;
    let mut transfer = stream.copy_to_host(&buffer, device.allocate_host(64)?, 0)?;
    let soon = || Instant::now() + Duration::from_millis(20);
    let outcomes = [stream.synchronize(soon()).err(), transfer.wait(soon()).err()];
    gate.open();
    for outcome in outcomes {
        ensure(matches!(outcome, Some(DeviceError::Deadline { .. })), || format!("{outcome:?}"))?;
    }
    transfer.wait(deadline())?;
    passed("a stream's and a copy's")
}

/// Formats an error with its causes.
fn chain(error: DeviceError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

/// Blocks a stream.
struct Gate(Arc<AtomicBool>);

impl Gate {
    fn close(stream: &dyn Stream) -> Result<Gate> {
        let open = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&open);
        stream.launch_host(Box::new(move || {
            let end = deadline();
            while !seen.load(Ordering::SeqCst) && Instant::now() < end {
                thread::sleep(Duration::from_micros(50));
            }
            Ok(())
        }))?;
        Ok(Gate(open))
    }

    fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
