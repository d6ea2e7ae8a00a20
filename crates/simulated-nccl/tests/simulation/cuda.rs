//! The functions of CUDA that tests of streams need.

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::ptr;
use std::sync::mpsc::{self, Receiver, Sender};

use libloading::Library;
use nccl_sys::Stream;

/// The result of [`Cuda::query`] for a stream that is not done.
pub(crate) const NOT_READY: c_int = 600;

type HostFunction = unsafe extern "C" fn(*mut c_void);

/// A driver that is never unloaded.
pub(crate) struct Cuda {
    retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int,
    bind: unsafe extern "C" fn(*mut c_void) -> c_int,
    create: unsafe extern "C" fn(*mut Stream, u32) -> c_int,
    query: unsafe extern "C" fn(Stream) -> c_int,
    wait: unsafe extern "C" fn(Stream) -> c_int,
    call: unsafe extern "C" fn(Stream, HostFunction, *mut c_void) -> c_int,
    begin: unsafe extern "C" fn(Stream, u32) -> c_int,
    end: unsafe extern "C" fn(Stream, *mut *mut c_void) -> c_int,
    instantiate: unsafe extern "C" fn(*mut *mut c_void, *mut c_void, u64) -> c_int,
    launch: unsafe extern "C" fn(*mut c_void, Stream) -> c_int,
    allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int,
    pin: unsafe extern "C" fn(*mut *mut c_void, usize, u32) -> c_int,
}

impl Cuda {
    pub(crate) fn open(file: &Path) -> Self {
        // SAFETY: the simulated driver's initialisers may run.
        let library = Box::leak(Box::new(unsafe { Library::new(file) }.unwrap()));
        let init: unsafe extern "C" fn(u32) -> c_int = find(library, "cuInit");
        // SAFETY: 0 is the only valid flag.
        assert_eq!(unsafe { init(0) }, 0);
        Self {
            retain: find(library, "cuDevicePrimaryCtxRetain"),
            bind: find(library, "cuCtxSetCurrent"),
            create: find(library, "cuStreamCreate"),
            query: find(library, "cuStreamQuery"),
            wait: find(library, "cuStreamSynchronize"),
            call: find(library, "cuLaunchHostFunc"),
            begin: find(library, "cuStreamBeginCapture_v2"),
            end: find(library, "cuStreamEndCapture"),
            instantiate: find(library, "cuGraphInstantiateWithFlags"),
            launch: find(library, "cuGraphLaunch"),
            allocate: find(library, "cuMemAlloc_v2"),
            pin: find(library, "cuMemHostAlloc"),
        }
    }

    /// Returns a stream of a device whose context becomes current on the thread.
    pub(crate) fn stream(&self, device: c_int) -> Stream {
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a context is written.
        assert_eq!(unsafe { (self.retain)(&mut context, device) }, 0);
        // SAFETY: the context is valid.
        assert_eq!(unsafe { (self.bind)(context) }, 0);
        // SAFETY: a stream is written.
        assert_eq!(unsafe { (self.create)(&mut stream, 0) }, 0);
        stream
    }

    /// Returns memory of the current device for a number, which is never freed.
    pub(crate) fn memory(&self) -> *mut c_void {
        let mut address = 0;
        // SAFETY: an address is written.
        assert_eq!(unsafe { (self.allocate)(&mut address, size_of::<i32>()) }, 0);
        ptr::with_exposed_provenance_mut(address as usize)
    }

    /// Returns a number in pinned host memory, which is never freed: streams may write it while a test reads it.
    pub(crate) fn value(&self, of: i32) -> *mut i32 {
        let mut memory = ptr::null_mut();
        // SAFETY: an address is written.
        assert_eq!(unsafe { (self.pin)(&mut memory, size_of::<i32>(), 0) }, 0);
        let value = memory.cast::<i32>();
        // SAFETY: it was just allocated with this size, at the beginning of a page.
        unsafe { value.write(of) };
        value
    }

    pub(crate) fn query(&self, stream: Stream) -> c_int {
        // SAFETY: the stream is valid.
        unsafe { (self.query)(stream) }
    }

    pub(crate) fn wait(&self, stream: Stream) {
        // SAFETY: the stream is valid.
        assert_eq!(unsafe { (self.wait)(stream) }, 0);
    }

    /// Blocks a stream until a message is sent.
    pub(crate) fn hold(&self, stream: Stream) -> Sender<()> {
        unsafe extern "C" fn held(receiver: *mut c_void) {
            // SAFETY: it is the box created below, passed once.
            let receiver = unsafe { Box::from_raw(receiver.cast::<Receiver<()>>()) };
            let _ = receiver.recv();
        }
        let (sender, receiver) = mpsc::channel();
        // SAFETY: the function takes ownership of the box.
        assert_eq!(unsafe { (self.call)(stream, held, Box::into_raw(Box::new(receiver)).cast()) }, 0);
        sender
    }

    /// Returns an executable graph of the work that a body enqueues.
    pub(crate) fn capture(&self, stream: Stream, body: impl FnOnce()) -> *mut c_void {
        const RELAXED: u32 = 2;
        let (mut graph, mut ready) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the stream is valid.
        assert_eq!(unsafe { (self.begin)(stream, RELAXED) }, 0);
        body();
        // SAFETY: a graph is written.
        assert_eq!(unsafe { (self.end)(stream, &mut graph) }, 0);
        // SAFETY: an executable graph is written.
        assert_eq!(unsafe { (self.instantiate)(&mut ready, graph, 0) }, 0);
        ready
    }

    pub(crate) fn launch(&self, graph: *mut c_void, stream: Stream) {
        // SAFETY: the graph was created by `capture`.
        assert_eq!(unsafe { (self.launch)(graph, stream) }, 0);
    }
}

fn find<F: Copy>(library: &Library, name: &str) -> F {
    // SAFETY: the driver's header gives these functions the requested types.
    *unsafe { library.get::<F>(name) }.unwrap()
}
