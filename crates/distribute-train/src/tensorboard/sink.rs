//! The file or the object that an event file is written to.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::objects::{self, Object};

/// Receives the bytes of an event file.
#[derive(Debug)]
pub(super) enum Sink {
    File(File),
    Object(Held),
}

/// An object's bytes, which are uploaded as a whole, since stores cannot append.
#[derive(Debug)]
pub(super) struct Held {
    object: Object,
    bytes: Vec<u8>,
    /// The number of bytes of the last upload, and when it was; none before the first.
    uploaded: Option<(usize, Instant)>,
    every: Duration,
}

/// The least time between two uploads.
const EVERY: Duration = Duration::from_secs(30);

/// An event file of a store is followed by another one beyond this size, so that an upload does not grow without limit.
pub(super) const MOST_BYTES: usize = 8 << 20;

impl Sink {
    /// Creates a file or an object with its first bytes.
    ///
    /// # Errors
    /// Of the kind `AlreadyExists` if there is one of this name; the error of the system or the store.
    pub(super) fn create(path: &Path, first: &[u8]) -> io::Result<Sink> {
        match objects::of(path)? {
            None => {
                let mut file = File::create_new(path)?;
                file.write_all(first)?;
                Ok(Sink::File(file))
            }
            Some(object) => {
                object.create(first)?;
                let uploaded = Some((first.len(), Instant::now()));
                Ok(Sink::Object(Held { object, bytes: first.to_vec(), uploaded, every: EVERY }))
            }
        }
    }

    /// Writes everything out.
    pub(super) fn close(mut self) -> io::Result<()> {
        match &mut self {
            Sink::File(file) => file.flush(),
            Sink::Object(held) => held.upload(),
        }
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Sink::File(file) => file.write(bytes),
            Sink::Object(held) => {
                held.bytes.extend_from_slice(bytes);
                Ok(bytes.len())
            }
        }
    }

    /// Uploads an object if the last upload was long enough ago.
    fn flush(&mut self) -> io::Result<()> {
        match self {
            Sink::File(file) => file.flush(),
            Sink::Object(held) if held.is_due() => held.upload(),
            Sink::Object(_) => Ok(()),
        }
    }
}

impl Held {
    fn is_due(&self) -> bool {
        self.uploaded.is_none_or(|(_, at)| at.elapsed() >= self.every)
    }

    fn upload(&mut self) -> io::Result<()> {
        if self.uploaded.is_none_or(|(length, _)| length < self.bytes.len()) {
            // Also after a failure, the next attempt is not before its time.
            self.uploaded = Some((self.uploaded.map_or(0, |(length, _)| length), Instant::now()));
            self.object.write(&self.bytes)?;
            self.uploaded = Some((self.bytes.len(), Instant::now()));
        }
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Err(error) = self.upload() {
            tracing::warn!("the last events are not uploaded: {error}");
        }
    }
}

#[cfg(all(test, feature = "object-store"))]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_uploaded_when_it_is_due_and_when_it_is_closed() {
        let path = Path::new("memory://sink/events");
        let read = || objects::of(path).unwrap().unwrap().read(1000).unwrap().unwrap();
        let mut sink = Sink::create(path, b"a").unwrap();
        assert_eq!(Sink::create(path, b"b").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        sink.write_all(b"b").unwrap();
        sink.flush().unwrap();
        assert_eq!(read(), b"a");
        let Sink::Object(held) = &mut sink else { panic!("it is an object") };
        held.every = Duration::ZERO;
        sink.flush().unwrap();
        assert_eq!(read(), b"ab");
        let Sink::Object(held) = &mut sink else { panic!("it is an object") };
        held.every = EVERY;
        sink.write_all(b"c").unwrap();
        sink.close().unwrap();
        assert_eq!(read(), b"abc");
        let mut sink = Sink::create(Path::new("memory://sink/dropped"), b"a").unwrap();
        sink.write_all(b"b").unwrap();
        drop(sink);
        let dropped = objects::of(Path::new("memory://sink/dropped")).unwrap().unwrap();
        assert_eq!(dropped.read(1000).unwrap().unwrap(), b"ab");
    }
}
