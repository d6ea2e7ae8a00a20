//! Quotes that a CSV file does not close.

use std::io::{self, Read};

/// A stream of rows that follows the quotes in what is read from it.
pub(super) struct Quoted<R> {
    stream: R,
    /// `None` if quotes are data.
    quotes: Option<Quotes>,
    is_at_end: bool,
}

impl<R> Quoted<R> {
    pub(super) fn new(stream: R, delimiter: u8, quoting: bool) -> Quoted<R> {
        let quotes = Quotes { delimiter, seen: 0, last: None, open: None, closed: None };
        Quoted { stream, quotes: quoting.then_some(quotes), is_at_end: false }
    }

    /// Returns the byte of a quote that is open at the end of the stream, once the end was read.
    pub(super) fn unclosed(&self) -> Option<u64> {
        self.quotes.as_ref().filter(|_| self.is_at_end)?.open
    }
}

impl<R: Read> Read for Quoted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.stream.read(buffer)?;
        self.is_at_end |= got == 0 && !buffer.is_empty();
        if let Some(quotes) = &mut self.quotes {
            quotes.pass(&buffer[..got]);
        }
        Ok(got)
    }
}

/// Whether a text is within quotes, as the csv crate tells it: only the first byte of a field opens them, and a quote
/// within them closes them, unless another one follows directly. Other quotes are data.
struct Quotes {
    delimiter: u8,
    /// The number of bytes so far.
    seen: u64,
    /// The last of them; `None` at the start of the text.
    last: Option<u8>,
    /// The byte of the quote that has opened the field, within quotes.
    open: Option<u64>,
    /// The same for the field whose quotes were closed last, and the byte after them.
    closed: Option<(u64, u64)>,
}

impl Quotes {
    fn pass(&mut self, bytes: &[u8]) {
        // The csv crate skips a byte order mark that is whole in what it reads first.
        let skipped = if self.seen == 0 && bytes.starts_with(MARK) { MARK.len() } else { 0 };
        let text = &bytes[skipped..];
        let start = self.seen + skipped as u64;
        for at in memchr::memchr_iter(b'"', text) {
            let byte = start + at as u64;
            let before = at.checked_sub(1).map_or(self.last, |before| Some(text[before]));
            let is_first = before.is_none_or(|before| before == self.delimiter || before == b'\n' || before == b'\r');
            if let Some(opened) = self.open.take() {
                self.closed = Some((opened, byte + 1));
            } else if let Some((opened, next)) = self.closed
                && next == byte
            {
                self.open = Some(opened);
            } else if is_first {
                self.open = Some(byte);
            }
        }
        self.last = text.last().copied().or(self.last);
        self.seen += bytes.len() as u64;
    }
}

/// UTF-8's byte order mark.
const MARK: &[u8] = b"\xef\xbb\xbf";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reads a text in pieces of `piece` bytes.
    fn unclosed(text: &[u8], piece: usize) -> Option<u64> {
        let mut quotes = Quoted::new(text, b',', true);
        let mut buffer = vec![0; piece];
        while quotes.read(&mut buffer).unwrap() > 0 {}
        quotes.unclosed()
    }

    fn rows(text: &[u8]) -> Vec<csv::ByteRecord> {
        let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(text);
        reader.byte_records().map(|row| row.unwrap()).collect()
    }

    #[test]
    fn the_byte_is_that_of_the_quote_which_opened_the_field() {
        for (text, expected) in [
            ("", None),
            ("\"", Some(0)),
            ("a,\"b\"\"c\n\"", None),
            ("a,\"b\"\"c\nd", Some(2)),
            ("a\"b", None),
            ("\"a\" \"", None),
            ("\u{feff}\"a", Some(3)),
            ("a,\u{feff}\"a", None),
        ] {
            assert_eq!(unclosed(text.as_bytes(), 1 << 10), expected, "{text:?}");
        }
        let mut data = Quoted::new(&b"\"a"[..], b',', false);
        io::copy(&mut data, &mut io::sink()).unwrap();
        assert_eq!(data.unclosed(), None);
    }

    proptest! {
        /// A line that is appended is one of its own, unless it is within quotes.
        #[test]
        fn the_csv_crate_tells_quotes_in_the_same_way(text in "\u{feff}?[\",\n\ra]{0,12}", piece in 3_usize..20) {
            let appended = [text.as_bytes(), b"\nz"].concat();
            let is_own = rows(&appended).last().is_some_and(|row| row.len() == 1 && &row[0] == b"z");
            prop_assert_eq!(unclosed(text.as_bytes(), piece).is_none(), is_own);
        }
    }
}
