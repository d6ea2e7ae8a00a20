//! Captures and graphs.

use std::sync::Arc;

use crate::error::{Code, Result};
use crate::ffi::{Out, exports};
use crate::graph::{Capture, EXECUTABLES, Executable, GRAPHS, Graph};
use crate::stream::stream;
use crate::work::Work;

exports! {
    fn cuStreamBeginCapture_v2(handle: usize, mode: u32) {
        // The default stream cannot be captured.
        if handle <= 2 {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        Capture::begin(&stream(handle)?, mode)
    }

    fn cuStreamEndCapture(handle: usize, graph: Out<usize>) {
        graph.set(0)?;
        graph.set(Capture::end(&stream(handle)?)?.handle)
    }

    fn cuStreamIsCapturing(handle: usize, status: Out<u32>) {
        status.set(match stream(handle)?.capture() {
            None => 0,
            Some(capture) if !capture.is_invalid() => 1,
            Some(_) => 2,
        })
    }

    fn cuGraphInstantiateWithFlags(executable: Out<usize>, handle: usize, _flags: u64) {
        let work = graph(handle)?.work.clone();
        executable.set(EXECUTABLES.insert(|handle| Executable { handle, work }).handle)
    }

    fn cuGraphLaunch(handle: usize, on: usize) {
        let work = executable(handle)?.work.clone();
        stream(on)?.enqueue(Work::Graph(work))
    }

    fn cuGraphUpload(handle: usize, on: usize) {
        executable(handle)?;
        stream(on)?.context.check()
    }

    fn cuGraphDestroy(handle: usize) {
        GRAPHS.remove(handle).map(drop).ok_or(Code::INVALID_VALUE)
    }

    fn cuGraphExecDestroy(handle: usize) {
        EXECUTABLES.remove(handle).map(drop).ok_or(Code::INVALID_VALUE)
    }
}

fn graph(handle: usize) -> Result<Arc<Graph>> {
    GRAPHS.get(handle).ok_or(Code::INVALID_VALUE)
}

fn executable(handle: usize) -> Result<Arc<Executable>> {
    EXECUTABLES.get(handle).ok_or(Code::INVALID_VALUE)
}
