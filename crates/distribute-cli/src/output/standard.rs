//! Writing to the launcher's own standard streams.

use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};

use crate::error::Error;

/// A standard stream. Another process that shares it may have made it non-blocking: then a write waits for room, where
/// a plain one would fail as if the reader were gone.
#[derive(Debug)]
pub(crate) struct Standard<S>(pub(crate) S);

impl<S: Write + AsFd> Standard<S> {
    fn retry<T>(&mut self, mut write: impl FnMut(&mut S) -> io::Result<T>) -> io::Result<T> {
        loop {
            match write(&mut self.0) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => wait_for_room(&self.0)?,
                written => return written,
            }
        }
    }
}

impl<S: Write + AsFd> Write for Standard<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.retry(|stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.retry(Write::flush)
    }
}

/// Prints to standard error. An error, such as that of a reader that is gone, does not change how the program ends.
pub(crate) fn say(text: &str) {
    let _ = Standard(io::stderr()).write_all(text.as_bytes());
}

/// Prints to standard output what a command was started for.
///
/// # Errors
/// [`Error::Write`] if the text cannot be written, unless the reader has read enough and is gone.
pub(crate) fn print(text: &str) -> Result<(), Error> {
    let mut stream = Standard(io::stdout());
    match stream.write_all(text.as_bytes()).and_then(|()| stream.flush()) {
        Err(source) if source.kind() != ErrorKind::BrokenPipe => {
            Err(Error::Write { path: "standard output".into(), source })
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

fn wait_for_room(stream: &impl AsFd) -> io::Result<()> {
    match poll(&mut [PollFd::new(stream, PollFlags::OUT)], None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    #[test]
    fn a_stream_that_does_not_block_loses_nothing() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let text = vec![b'x'; 4 << 20];
        let expected = text.len();
        let writer = thread::spawn(move || Standard(ours).write_all(&text));
        let mut seen = Vec::new();
        theirs.read_to_end(&mut seen).unwrap();
        writer.join().unwrap().unwrap();
        assert_eq!(seen.len(), expected);
    }

    #[test]
    fn a_reader_that_is_gone_is_an_error() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        drop(theirs);
        assert_eq!(Standard(ours).write_all(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}
