//! Untrusted text, made printable.

/// Makes text of a peer, a file or the environment safe for a log line: keeps at most `max_chars` characters, and
/// escapes those that would begin a new line, move the cursor or hide what follows.
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

/// Returns whether a character other than a control character is displayed as itself. Formatting characters change the
/// order or appearance of others; line and paragraph separators begin new lines in some terminals and log viewers.
fn is_visible(c: char) -> bool {
    !matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        && !matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

pub(crate) use printable as clean;

/// Length limit of a peer's text in a message, in characters.
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
