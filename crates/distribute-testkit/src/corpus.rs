//! Inputs of fuzz targets, run again without a fuzzer.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::simulation::Random;

/// A fuzz target: decodes the bytes, checks what it decoded, and returns whether they were accepted.
pub type FuzzTarget = fn(&[u8]) -> bool;

/// Runs a fuzz target on messages that its encoder wrote, which it must accept, on the files of `fuzz/corpus/<name>`,
/// on every beginning of the shorter ones, and on `mutations` seeded changes of them. `DISTRIBUTE_TEST_MUTATIONS` sets
/// another number, and `DISTRIBUTE_TEST_CORPUS` a folder into which the messages are written as a corpus.
///
/// # Panics
/// If the target panics, after its input has been printed; if it refuses a message; and if there is no corpus.
pub fn replay(name: &str, target: FuzzTarget, messages: &[Vec<u8>], mutations: usize) {
    if let Some(folder) = std::env::var_os("DISTRIBUTE_TEST_CORPUS") {
        write(&Path::new(&folder).join(name), messages);
    }
    let corpus = read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name));
    for message in messages {
        let _shown = Shown { name, input: message };
        assert!(target(message), "{name}: a message of the encoder is refused");
    }
    let inputs: Vec<&[u8]> = messages.iter().chain(&corpus).map(Vec::as_slice).collect();
    assert!(!corpus.is_empty(), "fuzz/corpus/{name} has no files");
    let run = |input: &[u8]| {
        let _shown = Shown { name, input };
        target(input);
    };
    for input in &inputs {
        run(input);
        let beginnings = if input.len() <= SHORT { input.len() } else { 0 };
        (0..beginnings).for_each(|len| run(&input[..len]));
    }
    let given = std::env::var("DISTRIBUTE_TEST_MUTATIONS").ok().and_then(|given| given.parse().ok());
    let mut random = Random::new(0x9e37_79b9_7f4a_7c15);
    for _ in 0..given.unwrap_or(mutations) {
        let mut input = random.of(&inputs).to_vec();
        for _ in 0..1 + random.below(4) {
            random.change(&mut input, &inputs);
        }
        run(&input);
    }
}

/// Inputs up to this length are cut at every byte.
const SHORT: usize = 256;

/// The longest input after changes.
const LONGEST: usize = 16 << 10;

fn write(folder: &Path, messages: &[Vec<u8>]) {
    fs::create_dir_all(folder).expect("the folder of the corpus can be created");
    for (number, message) in messages.iter().enumerate() {
        fs::write(folder.join(format!("message-{number:02}")), message).expect("the corpus can be written");
    }
}

/// Returns the contents of a folder's files in the order of their names.
fn read(folder: &Path) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<(OsString, PathBuf)> = entries.map(|entry| (entry.file_name(), entry.path())).collect();
    files.sort();
    files.iter().map(|(_, path)| fs::read(path).expect("a file of the corpus can be read")).collect()
}

/// Prints the input of a target that panics.
struct Shown<'a> {
    name: &'a str,
    input: &'a [u8],
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            crate::skip::line(format_args!("the input of {}: b\"{}\"\n", self.name, self.input.escape_ascii()));
        }
    }
}

impl Random {
    /// Returns a number below `end`; 0 if that is 0.
    fn below(&mut self, end: usize) -> usize {
        self.between(0, end as u64) as usize
    }

    fn of<'a>(&mut self, inputs: &[&'a [u8]]) -> &'a [u8] {
        inputs[self.below(inputs.len())]
    }

    fn range(&mut self, len: usize) -> std::ops::Range<usize> {
        let start = self.below(len + 1);
        start..start + self.below((len - start).min(64) + 1)
    }

    /// Changes an input at one place, as fuzzers do.
    fn change(&mut self, input: &mut Vec<u8>, inputs: &[&[u8]]) {
        let at = self.below(input.len());
        match self.below(8) {
            0 => input.truncate(at),
            1 => drop(input.drain(self.range(input.len()))),
            2 => input.insert(at, EDGES[self.below(EDGES.len())]),
            3 => {
                let other = self.of(inputs);
                let piece = other[self.range(other.len())].to_vec();
                input.splice(at..at, piece);
            }
            4 => {
                let piece = input[self.range(input.len())].to_vec();
                input.splice(at..at, piece);
            }
            5 => {
                // A number that is at the end of its range, or beyond.
                let number = [u64::MAX, 0, 1 << 63, u64::from(u32::MAX), 1 << 31][self.below(5)].to_le_bytes();
                let width = [2, 4, 8][self.below(3)];
                input.iter_mut().skip(at).zip(&number[..width]).for_each(|(byte, other)| *byte = *other);
            }
            6 => input.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << self.below(8)),
            _ => input.iter_mut().skip(at).take(1).for_each(|byte| *byte = EDGES[self.below(EDGES.len())]),
        }
        input.truncate(LONGEST);
    }
}

/// Bytes at which formats branch: ends of ranges, tags and marks of texts.
const EDGES: [u8; 20] =
    [0, 1, 2, 8, 10, 0x12, 0x1a, 0x7f, 0x80, 0xff, b'\n', b'"', b',', b'-', b'0', b':', b'[', b']', b'{', b'}'];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_repeat_and_reach_every_kind_of_input() {
        let inputs: [&[u8]; 2] = [b"one message", b""];
        let all = |seed| -> Vec<Vec<u8>> {
            let mut random = Random::new(seed);
            let changed = |_| {
                let mut input = random.of(&inputs).to_vec();
                random.change(&mut input, &inputs);
                input
            };
            (0..2000).map(changed).collect()
        };
        let changed = all(7);
        assert_eq!(changed, all(7));
        assert!(changed.iter().any(Vec::is_empty) && changed.iter().any(|input| input.len() > 14));
        assert!(changed.iter().filter(|input| !inputs.contains(&input.as_slice())).count() > 800);
    }

    #[test]
    #[should_panic(expected = "a message of the encoder is refused")]
    fn a_message_that_is_refused_fails() {
        replay("none", |_| false, &[b"message".to_vec()], 0);
    }
}
