//! Splitting bytes into lines, and cleaning them for display.

use std::borrow::Cow;

use console::AnsiCodeIterator;

/// Collects bytes until a line is complete, so that characters are whole however the bytes arrive.
#[derive(Debug, Default)]
pub(crate) struct Splitter {
    pending: Vec<u8>,
    returned: Option<Returned>,
}

/// The previous byte was a `\r`, to which a following `\n` belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Returned {
    AfterText,
    AfterBlank,
}

impl Splitter {
    /// Adds bytes; returns the lines that they complete. Both `\n` and `\r` end a line. Blank lines that end in `\r`
    /// are dropped, since programs use them to redraw a line in place.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        for byte in bytes {
            match (byte, self.returned.take()) {
                (b'\n', Some(Returned::AfterText)) => {}
                (b'\n', _) => lines.push(self.take()),
                (b'\r', _) if self.pending.trim_ascii().is_empty() => {
                    self.pending.clear();
                    self.returned = Some(Returned::AfterBlank);
                }
                (b'\r', _) => {
                    lines.push(self.take());
                    self.returned = Some(Returned::AfterText);
                }
                (byte, _) => self.pending.push(*byte),
            }
            if self.pending.len() > LONGEST {
                let rest = self.pending.split_off(whole_characters(&self.pending));
                lines.push(self.take());
                self.pending = rest;
            }
        }
        lines
    }

    /// Returns the last line, if it was not ended.
    pub(crate) fn finish(&mut self) -> Option<String> {
        (!self.pending.is_empty()).then(|| self.take())
    }

    fn take(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Removes control characters except tabs; keeps colours if wanted, and resets them at the end.
pub(crate) fn clean(line: &str, colors: bool) -> Cow<'_, str> {
    if !line.chars().any(|c| c.is_control() && c != '\t') {
        return Cow::Borrowed(line);
    }
    let mut clean = String::with_capacity(line.len());
    let mut colored = false;
    for (part, is_code) in AnsiCodeIterator::new(line) {
        if !is_code {
            clean.extend(part.chars().filter(|c| !c.is_control() || *c == '\t'));
        } else if colors && part.starts_with("\x1b[") && part.ends_with('m') {
            // All other sequences move the cursor or change the terminal's state.
            clean.push_str(part);
            colored = true;
        }
    }
    if colored {
        clean.push_str("\x1b[0m");
    }
    Cow::Owned(clean)
}

/// Returns the number of bytes that make whole characters; all of them if they are not UTF-8.
fn whole_characters(bytes: &[u8]) -> usize {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => error.valid_up_to(),
        _ => bytes.len(),
    }
}

/// Longer lines are split, so that no program can fill the launcher's memory.
const LONGEST: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(chunks: &[&[u8]]) -> Vec<String> {
        let mut splitter = Splitter::default();
        let mut lines: Vec<_> = chunks.iter().flat_map(|chunk| splitter.push(chunk)).collect();
        lines.extend(splitter.finish());
        lines
    }

    #[test]
    fn both_ends_of_line_are_known() {
        assert_eq!(split(&[b"one\ntwo\r\n\nthree"]), ["one", "two", "", "three"]);
        assert_eq!(split(&[b"\r 10%\r 20%\r    \rdone\n"]), [" 10%", " 20%", "done"]);
        assert_eq!(split(&[b"a\r", b"\nb\r", b"c"]), ["a", "b", "c"]);
        assert_eq!(split(&[b"\r\n", b"\r", b"\n"]), ["", ""]);
    }

    #[test]
    fn bytes_that_are_no_text_are_marked() {
        assert_eq!(split(&[b"a\xffb\xc3\n"]), ["a\u{fffd}b\u{fffd}"]);
    }

    #[test]
    fn an_endless_line_is_cut_between_characters() {
        let line = "ä".repeat(LONGEST);
        let lines = split(&[b"x", line.as_bytes()]);
        assert!(lines.len() > 1);
        assert_eq!(lines.concat(), format!("x{line}"));
        assert!(split(&[&vec![0xff; 3 * LONGEST]]).iter().all(|line| line.chars().count() <= LONGEST + 1));
    }

    #[test]
    fn control_characters_never_reach_the_terminal() {
        let line = "\x1b[2K\x1b[1;32mok\x1b[0m\x07\tend\x1b]0;title\x07 \x1b[3A";
        assert_eq!(clean(line, false), "ok\tend ");
        assert_eq!(clean(line, true), "\x1b[1;32mok\x1b[0m\tend \x1b[0m");
        assert!(matches!(clean("plain │ ✓", false), Cow::Borrowed(_)));
        assert_eq!(clean("half \x1b[", true), "half [");
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_how_bytes_arrive(
            text in "[a-cä│\r\n ]{0,60}",
            cuts in proptest::collection::vec(0..200_usize, 0..8),
        ) {
            let bytes = text.as_bytes();
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let chunks: Vec<_> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(split(&chunks), split(&[bytes]));
        }

        #[test]
        fn cleaned_lines_hold_no_control_characters(line in any::<String>()) {
            prop_assert!(clean(&line, false).chars().all(|c| !c.is_control() || c == '\t'));
        }
    }
}
