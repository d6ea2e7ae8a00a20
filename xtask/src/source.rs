//! Rust sources as text: files of a folder, and where comments and strings begin and end.

use std::fs;
use std::path::{Path, PathBuf};

/// The files below a folder whose names end so, in order; none where there is no such folder.
pub(crate) fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    if folder.is_dir() {
        collect(folder, extension, &mut found)?;
    }
    found.sort();
    Ok(found)
}

pub(crate) fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// The text without comments and without what strings hold; the rest stays on its lines.
pub(crate) fn code(text: &str) -> String {
    let (mut code, mut rest) = (String::new(), text);
    while let Some(first) = rest.chars().next() {
        let len = no_code(rest);
        match (len, first) {
            (0, _) => code.push(first),
            (_, '/') => {}
            // That there is an argument remains.
            _ => code.push('"'),
        }
        code.extend(rest[..len].chars().filter(|kept| *kept == '\n'));
        rest = &rest[len.max(first.len_utf8())..];
    }
    code
}

/// The comments of a text, each with the number of its first line.
pub(crate) fn comments(text: &str) -> Vec<(usize, &str)> {
    outside_code(text, &['/'])
}

/// The string literals of a text with their quotes, each with the number of its first line.
pub(crate) fn strings(text: &str) -> Vec<(usize, &str)> {
    outside_code(text, &['"', 'r'])
}

/// The comments, strings and characters that begin with one of these.
fn outside_code<'a>(text: &'a str, beginnings: &[char]) -> Vec<(usize, &'a str)> {
    let (mut found, mut rest, mut line) = (Vec::new(), text, 1);
    while let Some(first) = rest.chars().next() {
        let len = no_code(rest);
        if len > 0 && beginnings.contains(&first) {
            found.push((line, &rest[..len]));
        }
        let (passed, left) = rest.split_at(len.max(first.len_utf8()));
        line += passed.matches('\n').count();
        rest = left;
    }
    found
}

/// The length of the comment, string or character that the text begins with; 0 where it begins with none.
fn no_code(text: &str) -> usize {
    let until = |from: usize, end: &str| text[from..].find(end).map_or(text.len(), |at| from + at + end.len());
    let mut chars = text.char_indices();
    match chars.next() {
        Some((_, '/')) if text.starts_with("//") => text.find('\n').unwrap_or(text.len()),
        Some((_, '/')) if text.starts_with("/*") => until(2, "*/"),
        Some((_, 'r')) => {
            let hashes = text[1..].chars().take_while(|next| *next == '#').count();
            let is_string = text[1 + hashes..].starts_with('"');
            if is_string { until(2 + hashes, &format!("\"{}", "#".repeat(hashes))) } else { 0 }
        }
        Some((_, '"')) => {
            let mut escaped = false;
            let end = chars.find(|(_, next)| {
                let ends = *next == '"' && !escaped;
                escaped = *next == '\\' && !escaped;
                ends
            });
            end.map_or(text.len(), |(at, _)| at + 1)
        }
        Some((_, '\'')) => match (chars.next(), chars.next()) {
            (Some((_, '\\')), Some(_)) => until(3, "'"),
            (Some(_), Some((at, '\''))) => at + 1,
            // A lifetime.
            _ => 0,
        },
        _ => 0,
    }
}

fn collect(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) -> Result<(), String> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for entry in entries {
        let path = entry.map_err(|error| format!("{}: {error}", folder.display()))?.path();
        if path.is_dir() {
            collect(&path, extension, found)?;
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    Ok(())
}
