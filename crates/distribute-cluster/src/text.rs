//! Text from elsewhere, made fit for a sentence.

/// A text of a peer, a file or the environment as part of a log line: at most `max_chars` characters, and none that would
/// begin a new line, move the cursor or hide what follows; those are escaped.
pub(crate) fn clean(text: &str, max_chars: usize) -> String {
    let mut cleaned = String::new();
    for (place, c) in text.chars().enumerate() {
        if place == max_chars {
            cleaned.push('…');
            break;
        }
        match c {
            _ if c == ' ' || c.is_ascii_graphic() => cleaned.push(c),
            _ if c.is_control() || !is_visible(c) => cleaned.extend(c.escape_default()),
            _ => cleaned.push(c),
        }
    }
    cleaned
}

/// Whether a character that is no control character shows as itself: formatting characters change the order or the look of
/// others, and separators of lines and paragraphs begin new lines in some terminals and log viewers.
fn is_visible(c: char) -> bool {
    !matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        && !matches!(c, '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// The longest text of a peer in a sentence, in characters.
pub(crate) const LONGEST: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_stays_one_line() {
        assert_eq!(clean("disk full: 3 % of “größe” → ok", LONGEST), "disk full: 3 % of “größe” → ok");
        assert_eq!(clean("a\nINFO b\r\u{1b}[31m\0", LONGEST), "a\\nINFO b\\r\\u{1b}[31m\\u{0}");
        assert_eq!(clean("a\u{202e}b\u{2028}c\u{85}", LONGEST), "a\\u{202e}b\\u{2028}c\\u{85}");
        assert_eq!(clean("abcd", 3), "abc…");
        assert_eq!(clean("abc", 3), "abc");
    }
}
