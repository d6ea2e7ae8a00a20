mod other_backend;
mod program;

use std::error::Error as _;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use super::*;
use crate::mutex::Mutex;
use crate::{Devices, HostFn, Transfer};

/// A deadline longer than any test takes.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn cpus(count: usize) -> Vec<Arc<dyn Device>> {
    let devices = Devices::with_cpus(count).unwrap();
    devices.logical().iter().map(|device| devices.open(device.spec()).unwrap()).collect()
}

fn impatient(queue_len: usize) -> CpuDevice {
    let options = CpuOptions { queue_len, timeout: Duration::from_millis(30) };
    CpuDevice::with_options(Devices::local().logical()[0].clone(), options)
}

fn buffer(device: &dyn Device, elements: &[u32]) -> DeviceBuffer {
    let buffer = device.allocate(size_of_val(elements)).unwrap();
    CpuDevice::with_bytes(&buffer, |bytes| bytes.copy_from_slice(bytemuck::cast_slice(elements))).unwrap();
    buffer
}

fn elements(buffer: &DeviceBuffer) -> Vec<u32> {
    CpuDevice::with_bytes(buffer, |bytes| bytemuck::pod_collect_to_vec(bytes)).unwrap()
}

/// Returns a host function that waits for a signal, with a deadline.
fn gate(signal: Receiver<()>) -> HostFn {
    Box::new(move || Ok(signal.recv_timeout(Duration::from_secs(20))?))
}

/// Returns a host function that logs that it ran.
fn note(log: &Arc<Mutex<Vec<u32>>>, what: u32) -> HostFn {
    let log = Arc::clone(log);
    Box::new(move || {
        log.lock().push(what);
        Ok(())
    })
}

fn fail(words: &'static str) -> HostFn {
    Box::new(move || Err(words.into()))
}

#[test]
fn traits_are_object_safe_and_cross_threads() {
    fn crosses<T: Send + Sync + ?Sized>() {}
    crosses::<dyn Device>();
    crosses::<dyn Stream>();
    crosses::<dyn Event>();
    crosses::<DeviceBuffer>();
    crosses::<Transfer>();
    crosses::<HostBuffer>();
}

#[test]
fn bytes_travel_to_a_device_across_and_back() {
    let devices = cpus(2);
    let (first, second) = (devices[0].create_stream().unwrap(), devices[1].create_stream().unwrap());
    let (a, b) = (devices[0].allocate(16).unwrap(), devices[1].allocate(16).unwrap());
    assert_eq!(elements(&a), [0; 4], "memory begins as zero");

    let host = HostBuffer::from_slice(&[9u32, 1, 2, 3, 4]).unwrap();
    let mut there = first.copy_from_host(host, 4, &a).unwrap();
    first.copy_peer(&a.slice(0..8).unwrap(), &b.slice(8..16).unwrap()).unwrap();
    let arrived = devices[0].create_event().unwrap();
    first.record(&*arrived).unwrap();
    second.wait(&*arrived).unwrap();
    second.fill(&b.slice(0..4).unwrap(), 0xff).unwrap();
    let host = devices[1].allocate_host(24).unwrap();
    let mut back = second.copy_to_host(&b, host, 8).unwrap();

    let host = back.wait(soon()).unwrap();
    assert_eq!(host.as_slice::<u32>().unwrap(), [0, 0, u32::MAX, 0, 1, 2]);
    assert_eq!(there.wait(soon()).unwrap().as_slice::<u32>().unwrap()[0], 9, "the host buffer comes back");
    assert!(matches!(there.wait(soon()), Err(Error::TransferTaken)));
    assert!(back.is_ready().unwrap());
}

#[test]
fn copies_within_a_buffer_may_overlap() {
    let device = &cpus(1)[0];
    let stream = device.create_stream().unwrap();
    let memory = buffer(&**device, &[1, 2, 3, 4]);
    stream.copy(&memory.slice(0..12).unwrap(), &memory.slice(4..16).unwrap()).unwrap();
    stream.synchronize(soon()).unwrap();
    assert_eq!(elements(&memory), [1, 1, 2, 3]);
}

#[test]
fn a_stream_runs_in_order() {
    let device = &cpus(1)[0];
    let stream = device.create_stream().unwrap();
    let log = Arc::default();
    // More than the queue holds.
    for what in 0..3000 {
        stream.launch_host(note(&log, what)).unwrap();
    }
    stream.synchronize(soon()).unwrap();
    assert!(log.lock().iter().copied().eq(0..3000));
}

#[test]
fn an_event_holds_another_stream_back() {
    let devices = cpus(2);
    let (first, second) = (devices[0].create_stream().unwrap(), devices[1].create_stream().unwrap());
    let (open, signal) = channel();
    let log = Arc::default();
    let event = devices[0].create_event().unwrap();
    assert!(event.is_ready().unwrap(), "an event is ready until it is recorded");
    second.wait(&*event).unwrap();
    second.synchronize(soon()).unwrap();

    first.launch_host(gate(signal)).unwrap();
    first.launch_host(note(&log, 1)).unwrap();
    first.record(&*event).unwrap();
    second.wait(&*event).unwrap();
    second.launch_host(note(&log, 2)).unwrap();
    assert!(!event.is_ready().unwrap());
    let error = event.wait(Instant::now()).unwrap_err();
    assert!(matches!(&error, Error::Deadline { .. }) && error.to_string().contains("CPU:0"), "{error}");
    let error = second.synchronize(Instant::now() + Duration::from_millis(5)).unwrap_err();
    assert!(matches!(&error, Error::Deadline { .. }) && error.to_string().contains("stream 0 of CPU:1"), "{error}");
    assert!(log.lock().is_empty());

    open.send(()).unwrap();
    event.wait(soon()).unwrap();
    second.synchronize(soon()).unwrap();
    assert_eq!(*log.lock(), [1, 2]);
}

#[test]
fn recording_again_leaves_earlier_waits_alone() {
    let device = &cpus(1)[0];
    let (early, late, waiter) =
        (device.create_stream().unwrap(), device.create_stream().unwrap(), device.create_stream().unwrap());
    let (open, signal) = channel();
    let event = device.create_event().unwrap();
    early.record(&*event).unwrap();
    waiter.wait(&*event).unwrap();
    late.launch_host(gate(signal)).unwrap();
    late.record(&*event).unwrap();
    waiter.synchronize(soon()).unwrap();
    assert!(!event.is_ready().unwrap(), "it stands for the later record now");
    open.send(()).unwrap();
    event.wait(soon()).unwrap();
}

#[test]
fn a_failure_surfaces_and_stops_what_follows() {
    let devices = cpus(2);
    let (first, second) = (devices[0].create_stream().unwrap(), devices[1].create_stream().unwrap());
    let memory = buffer(&*devices[0], &[5]);
    let event = devices[0].create_event().unwrap();
    first.launch_host(fail("the disk is full")).unwrap();
    first.fill(&memory, 0).unwrap();
    let mut transfer = first.copy_to_host(&memory, HostBuffer::zeroed(4).unwrap(), 0).unwrap();
    first.record(&*event).unwrap();
    second.wait(&*event).unwrap();

    let error = first.synchronize(soon()).unwrap_err();
    assert!(matches!(&error, Error::Stream { operation: "a host function", .. }), "{error}");
    assert!(error.to_string().contains("stream 0 of CPU:0"), "{error}");
    assert!(error.source().unwrap().to_string().contains("the disk is full"));
    assert_eq!(elements(&memory), [5], "the fill after the failure was not run");
    assert!(matches!(transfer.wait(soon()), Err(Error::Stream { operation: "a host function", .. })));
    assert!(matches!(event.is_ready(), Err(Error::Stream { .. })));
    assert!(first.synchronize(soon()).is_err(), "a failed stream stays failed");

    let error = second.synchronize(soon()).unwrap_err();
    assert!(matches!(&error, Error::Stream { operation: "a wait for an event", .. }), "{error}");
    let cause = error.source().unwrap();
    assert!(cause.to_string().contains("stream 0 of CPU:0"), "{cause}");
    assert!(cause.source().unwrap().to_string().contains("the disk is full"));
    devices[0].create_stream().unwrap().synchronize(soon()).unwrap();
}

#[test]
fn a_panic_of_a_host_function_is_an_error() {
    let stream = cpus(1)[0].create_stream().unwrap();
    stream.launch_host(Box::new(|| panic!("index {} is out of range", 3))).unwrap();
    let error = stream.synchronize(soon()).unwrap_err();
    assert!(error.source().unwrap().to_string().contains("index 3 is out of range"), "{error}");
}

#[test]
fn a_full_queue_and_a_late_event_end_in_time() {
    let device = impatient(1);
    let stream = device.create_stream().unwrap();
    let (open, signal) = channel();
    let (started, running) = channel();
    stream.launch_host(Box::new(move || Ok(started.send(())?))).unwrap();
    running.recv_timeout(Duration::from_secs(20)).unwrap();
    stream.launch_host(gate(signal)).unwrap();
    let errors: Vec<Error> = (0..3).filter_map(|_| stream.launch_host(Box::new(|| Ok(()))).err()).collect();
    assert!(matches!(&errors[..], [.., Error::Deadline { .. }]), "{errors:?}");
    assert!(errors[0].to_string().contains("enqueuing a host function on stream 0 of CPU:0"), "{}", errors[0]);

    let event = device.create_event().unwrap();
    let gated = cpus(1)[0].create_stream().unwrap();
    let (open_gated, signal) = channel();
    gated.launch_host(gate(signal)).unwrap();
    gated.record(&*event).unwrap();
    let waiter = device.create_stream().unwrap();
    waiter.wait(&*event).unwrap();
    let error = waiter.synchronize(soon()).unwrap_err();
    assert!(error.source().unwrap().to_string().contains("waiting for an event of CPU:0"), "{error}");
    open.send(()).unwrap();
    open_gated.send(()).unwrap();
}

#[test]
fn memory_is_counted_and_lives_as_long_as_its_copies() {
    let table = Devices::local().split(DeviceKind::Cpu, 0, &[Some(100), None]).unwrap();
    let device = table.open(&"CPU:0".parse().unwrap()).unwrap();
    let held = device.allocate(60).unwrap();
    assert_eq!(device.memory_use(), MemoryUse { used_bytes: 60, limit_bytes: Some(100) });
    let error = device.allocate(41).unwrap_err();
    assert!(matches!(error, Error::DeviceMemory { asked_bytes: 41, used_bytes: 60, limit_bytes: 100, .. }), "{error}");
    let part = held.slice(4..8).unwrap();
    drop(held);
    assert_eq!(device.memory_use().used_bytes, 60, "a part keeps the whole");

    let stream = device.create_stream().unwrap();
    let (open, signal) = channel();
    stream.launch_host(gate(signal)).unwrap();
    stream.fill(&part, 1).unwrap();
    let mut back = stream.copy_to_host(&part, HostBuffer::zeroed(4).unwrap(), 0).unwrap();
    drop(part);
    assert_eq!(device.memory_use().used_bytes, 60, "a queued copy keeps it too");
    open.send(()).unwrap();
    assert_eq!(back.wait(soon()).unwrap().as_bytes(), [1; 4]);
    assert_eq!(device.memory_use().used_bytes, 0);

    let error = table.open(&"CPU:1".parse().unwrap()).unwrap().allocate(usize::MAX).unwrap_err();
    assert!(matches!(error, Error::HostMemory { .. }), "{error}");
}

#[test]
fn dropping_a_stream_lets_its_operations_finish() {
    let device = &cpus(1)[0];
    let memory = device.allocate(4).unwrap();
    let stream = device.create_stream().unwrap();
    let (open, signal) = channel();
    stream.launch_host(gate(signal)).unwrap();
    stream.fill(&memory, 3).unwrap();
    open.send(()).unwrap();
    drop(stream);
    assert_eq!(elements(&memory), [0x0303_0303]);

    // The last handle is dropped on the stream's own thread.
    let stream = device.create_stream().unwrap();
    let (ended, end) = channel();
    let (open, signal) = channel::<()>();
    let own = Arc::clone(&stream);
    stream
        .launch_host(Box::new(move || {
            signal.recv_timeout(Duration::from_secs(20))?;
            drop(own);
            Ok(ended.send(())?)
        }))
        .unwrap();
    drop(stream);
    open.send(()).unwrap();
    end.recv_timeout(Duration::from_secs(5)).unwrap();
}

#[test]
fn copies_in_opposite_directions_do_not_lock_each_other() {
    let devices = cpus(2);
    let (a, b) = (buffer(&*devices[0], &[7; 64]), buffer(&*devices[1], &[7; 64]));
    let streams: Vec<_> = devices.iter().map(|device| device.create_stream().unwrap()).collect();
    for _ in 0..2000 {
        streams[0].copy_peer(&a, &b).unwrap();
        streams[1].copy_peer(&b, &a).unwrap();
    }
    streams.iter().for_each(|stream| stream.synchronize(soon()).unwrap());
    assert_eq!((elements(&a), elements(&b)), (vec![7; 64], vec![7; 64]));
}

#[test]
fn what_does_not_fit_is_refused_when_enqueued() {
    let devices = cpus(2);
    let stream = devices[0].create_stream().unwrap();
    let (a, b) = (devices[0].allocate(8).unwrap(), devices[1].allocate(8).unwrap());
    let host = || HostBuffer::zeroed(8).unwrap();
    assert!(matches!(stream.copy(&a, &a.slice(0..4).unwrap()), Err(Error::CopyLength { source_bytes: 8, .. })));
    assert!(matches!(stream.copy(&a, &b), Err(Error::Foreign { .. })));
    assert!(matches!(stream.copy_peer(&b, &b), Err(Error::Foreign { .. })));
    assert!(matches!(stream.copy_peer(&a, &b.slice(1..1).unwrap()), Err(Error::CopyLength { .. })));
    assert!(matches!(stream.copy_from_host(host(), 0, &b), Err(Error::Foreign { .. })));
    assert!(matches!(stream.copy_from_host(host(), 1, &a), Err(Error::ByteRange { start: 1, end: 9, .. })));
    assert!(matches!(stream.copy_to_host(&a, host(), usize::MAX), Err(Error::ByteRange { end: usize::MAX, .. })));
    let beyond = std::ops::Range { start: 3, end: 2 };
    assert!(matches!(a.slice(beyond), Err(Error::ByteRange { start: 3, end: 2, .. })));
    assert!(matches!(a.slice(0..9), Err(Error::ByteRange { len_bytes: 8, .. })));
    stream.synchronize(soon()).unwrap();
}
