//! A connection between two launchers.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The sending half of a connection. Empty lines are signs of life, sent while there is nothing else to say.
#[derive(Debug)]
pub(crate) struct Link {
    lines: Sender<Vec<u8>>,
    stream: TcpStream,
    writer: JoinHandle<()>,
}

/// When a connection counts as lost.
#[derive(Debug, Clone, Copy)]
struct Timing {
    /// How often a launcher shows that it lives.
    pulse: Duration,
    /// How long it may be silent.
    silence: Duration,
}

impl Link {
    /// Reads and writes on threads of their own. `received` gets every message, and at the end the reason of it.
    pub(crate) fn start<In: DeserializeOwned + 'static>(
        stream: TcpStream,
        reader: BufReader<TcpStream>,
        received: impl FnMut(Result<In, String>) + Send + 'static,
    ) -> io::Result<Link> {
        Link::with(Timing { pulse: PULSE, silence: SILENCE }, stream, reader, received)
    }

    fn with<In: DeserializeOwned + 'static>(
        timing: Timing,
        stream: TcpStream,
        reader: BufReader<TcpStream>,
        received: impl FnMut(Result<In, String>) + Send + 'static,
    ) -> io::Result<Link> {
        stream.set_write_timeout(Some(timing.silence))?;
        stream.set_read_timeout(Some(timing.silence))?;
        let (lines, queue) = unbounded();
        let output = stream.try_clone()?;
        let writer =
            thread::Builder::new().name("link-writer".into()).spawn(move || write_all(output, &queue, timing.pulse))?;
        thread::Builder::new().name("link-reader".into()).spawn(move || read_all(reader, received))?;
        Ok(Link { lines, stream, writer })
    }

    /// Sends a message without waiting. A connection that is lost is reported by the reader.
    pub(crate) fn send(&self, message: &impl Serialize) {
        if let Ok(line) = line(message) {
            // Fails only when the writer has ended, and then the connection has.
            let _ = self.lines.send(line);
        }
    }

    /// Sends what is queued, and closes the connection.
    pub(crate) fn close(self) {
        let Link { lines, stream, writer } = self;
        drop(lines);
        // Each write has a deadline, so the thread ends.
        let _ = writer.join();
        let _ = stream.shutdown(Shutdown::Both);
    }

    /// Closes the connection at once.
    pub(crate) fn cut(self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

fn line(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

/// Writes one message at once, before there is a link.
pub(crate) fn write_one(mut stream: &TcpStream, message: &impl Serialize) -> io::Result<()> {
    stream.set_write_timeout(Some(SILENCE))?;
    stream.write_all(&line(message)?)
}

/// Reads one message of at most `longest` bytes. Empty lines are skipped.
pub(crate) fn read_one<In: DeserializeOwned>(reader: &mut BufReader<TcpStream>, longest: u64) -> Result<In, String> {
    loop {
        let line = read_line(reader, longest)?;
        if !line.is_empty() {
            return serde_json::from_slice(&line).map_err(|error| format!("it does not speak as a launcher: {error}"));
        }
    }
}

fn write_all(mut stream: TcpStream, queue: &Receiver<Vec<u8>>, pulse: Duration) {
    loop {
        let line = match queue.recv_timeout(pulse) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => vec![b'\n'],
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if stream.write_all(&line).is_err() {
            // The reader reports the end of the connection.
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
    }
}

fn read_all<In: DeserializeOwned>(
    mut reader: BufReader<TcpStream>,
    mut received: impl FnMut(Result<In, String>) + Send + 'static,
) {
    loop {
        let message = read_one(&mut reader, LONGEST);
        let ended = message.is_err();
        received(message);
        if ended {
            return;
        }
    }
}

/// Reads a line without its end. The error says why there is none.
fn read_line(reader: &mut BufReader<TcpStream>, longest: u64) -> Result<Vec<u8>, String> {
    let mut line = Vec::new();
    match reader.by_ref().take(longest).read_until(b'\n', &mut line) {
        Ok(_) if line.pop_if(|byte| *byte == b'\n').is_some() => Ok(line),
        Ok(_) if line.len() as u64 == longest => Err(format!("a message is longer than {} KiB", longest >> 10)),
        Ok(_) => Err("its launcher has ended".to_owned()),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
            let silence = reader.get_ref().read_timeout().ok().flatten().unwrap_or_default();
            Err(format!("no sign of life for {} s", silence.as_secs_f64()))
        }
        Err(error) => Err(error.to_string()),
    }
}

/// The longest message between launchers that know each other, in bytes.
const LONGEST: u64 = 8 << 20;

const PULSE: Duration = Duration::from_secs(2);

/// How long a launcher may be silent. Also the deadline of what happens before two launchers know each other.
pub(crate) const SILENCE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    const SOON: Duration = Duration::from_secs(30);

    fn pair() -> [(TcpStream, BufReader<TcpStream>); 2] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let other = listener.accept().unwrap().0;
        [one, other].map(|stream| (stream.try_clone().unwrap(), BufReader::new(stream)))
    }

    fn link((stream, reader): (TcpStream, BufReader<TcpStream>)) -> (Link, Receiver<Result<Vec<u32>, String>>) {
        let (sender, receiver) = unbounded();
        let timing = Timing { pulse: Duration::from_millis(100), silence: Duration::from_millis(500) };
        let link = Link::with(timing, stream, reader, move |message| sender.send(message).unwrap_or_default());
        (link.unwrap(), receiver)
    }

    #[test]
    fn messages_arrive_in_order_and_the_end_is_told() {
        let [one, other] = pair().map(link);
        (0..100).for_each(|number| one.0.send(&vec![number; 3]));
        one.0.close();
        for number in 0..100 {
            assert_eq!(other.1.recv_timeout(SOON).unwrap(), Ok(vec![number; 3]));
        }
        assert_eq!(other.1.recv_timeout(SOON).unwrap(), Err("its launcher has ended".to_owned()));
        other.0.cut();
    }

    #[test]
    fn silence_ends_a_link_and_signs_of_life_keep_it() {
        let [one, (silent, _reader)] = pair();
        let (kept, messages) = link(one);
        let why = messages.recv_timeout(SOON).unwrap().unwrap_err();
        assert_eq!(why, "no sign of life for 0.5 s");
        // Meanwhile it has sent its own.
        silent.set_nonblocking(true).unwrap();
        let mut seen = [0; 16];
        let count = (&silent).read(&mut seen).unwrap();
        assert!(count >= 2 && seen[..count].iter().all(|byte| *byte == b'\n'), "{count}");
        kept.cut();
    }

    #[test]
    fn nonsense_and_endless_lines_are_refused() {
        let [one, (stream, _reader)] = pair();
        let (_kept, messages) = link(one);
        (&stream).write_all(b"\n\nGET / HTTP/1.1\r\n").unwrap();
        let why = messages.recv_timeout(SOON).unwrap().unwrap_err();
        assert!(why.starts_with("it does not speak as a launcher"), "{why}");

        let [one, (stream, _reader)] = pair();
        let (_kept, messages) = link(one);
        // The peer may close before all is written.
        let _ = thread::spawn(move || (&stream).write_all(&vec![b' '; 9 << 20])).join().unwrap();
        assert_eq!(messages.recv_timeout(SOON).unwrap(), Err("a message is longer than 8192 KiB".to_owned()));
    }
}
