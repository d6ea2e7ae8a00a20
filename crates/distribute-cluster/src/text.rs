//! Text from elsewhere, made fit for a sentence.

/// Makes a text of a peer, a file or the environment fit for a log line: at most `max_chars` characters, and none that would
/// begin a new line, move the cursor or hide what follows; those are escaped.
pub fn printable(text: &str, max_chars: usize) -> String {
    let mut shown = String::new();
    for (place, c) in text.chars().enumerate() {
        if place == max_chars {
            shown.push('…');
            break;
        }
        match c {
            _ if c == ' ' || c.is_ascii_graphic() => shown.push(c),
            _ if c.is_control() || !is_visible(c) => shown.extend(c.escape_default()),
            _ => shown.push(c),
        }
    }
    shown
}

/// Whether a character that is no control character shows as itself: formatting characters change the order or the look of
/// others, and separators of lines and paragraphs begin new lines in some terminals and log viewers.
fn is_visible(c: char) -> bool {
    !matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        && !matches!(c, '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

pub(crate) use printable as clean;

/// The longest text of a peer in a sentence, in characters.
pub(crate) const LONGEST: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_stays_one_line() {
        assert_eq!(printable("disk full: 3 % of “größe” → ok", LONGEST), "disk full: 3 % of “größe” → ok");
        assert_eq!(printable("a\nINFO b\r\u{1b}[31m\0", LONGEST), "a\\nINFO b\\r\\u{1b}[31m\\u{0}");
        assert_eq!(printable("a\u{202e}b\u{2028}c\u{85}", LONGEST), "a\\u{202e}b\\u{2028}c\\u{85}");
        assert_eq!(printable("abcd", 3), "abc…");
        assert_eq!(printable("abc", 3), "abc");
    }
}
