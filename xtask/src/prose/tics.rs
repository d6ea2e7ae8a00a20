//! The wordings that are counted, as sequences of words.

/// One wording, and what to write in its place.
pub(super) struct Tic {
    pub(super) what: &'static str,
    pub(super) instead: &'static str,
    /// Sequences of lower-case words and semicolons; each is this wording.
    phrases: &'static [&'static [&'static str]],
    /// Words after which it is right.
    not_after: &'static [&'static str],
    /// Words before which it is right.
    not_before: &'static [&'static str],
}

const fn tic(what: &'static str, instead: &'static str, phrases: &'static [&'static [&'static str]]) -> Tic {
    Tic { what, instead, phrases, not_after: &[], not_before: &[] }
}

/// Wordings that no comment and no document should have.
pub(super) const TICS: &[Tic] = &[
    tic("\"; whether\"", "write \"returns whether\" or a sentence of its own", &[&[";", "whether"]]),
    tic("\"so many\"", "write \"n\" or the quantity's name", &[&["so", "many"]]),
    tic(
        "\"go on\"",
        "write \"continue\" or \"resume\"",
        &[&["go", "on"], &["goes", "on"], &["went", "on"], &["gone", "on"]],
    ),
    Tic {
        what: "\"is no\"",
        instead: "write \"is not a\"",
        phrases: &[&["is", "no"], &["are", "no"]],
        not_after: &["there"],
        not_before: &["different", "fewer", "greater", "larger", "less", "longer", "more", "smaller"],
    },
    tic("\"nobody\"", "name what does not: no process, no thread", &[&["nobody"]]),
    tic("\"whoever\"", "name who: the caller, the thread that", &[&["whoever"], &["whomever"]]),
    tic("\"whom\"", "name who is meant, in a sentence of its own", &[&["whom"]]),
    tic("\"mend\"", "write \"fix\" or \"remedy\"", &[&["mend"], &["mends"], &["mended"], &["mending"]]),
    tic("\"has come\"", "write \"arrived\" or \"happened\"", &[&["has", "come"], &["have", "come"], &["had", "come"]]),
    tic("\"beside\"", "write \"next to\", \"in addition to\" or \"alongside\"", &[&["beside"]]),
    tic(
        "\"master\" or \"slave\"",
        "write \"coordinator\", \"chief\" or \"worker\"",
        &[&["master"], &["slave"], &["slaves"]],
    ),
    tic("\"tower\"", "write \"replica\"", &[&["tower"], &["towers"]]),
    tic("\"allreduce\"", "write \"all-reduce\"", &[&["allreduce"]]),
    tic("\"team\", \"courier\"", "write \"process group\", \"I/O thread\"", &[&["team"], &["courier"], &["couriers"]]),
];

/// First words of a documentation comment that make a fragment of it.
pub(super) const FRAGMENTS: &[(&str, &str, &str)] = &[
    ("of", "begins with \"Of\"", "begin with a verb (\"Returns …\") or with the thing's name"),
    ("those", "begins with \"Those of\"", "say what they are, or name and link them"),
    ("what", "begins with \"What\"", "begin with a verb (\"Returns …\") or with the thing's name"),
];

impl Tic {
    /// The places in a text's words where it begins.
    pub(super) fn places(&self, words: &[&str]) -> Vec<usize> {
        let is_here = |at: &usize| {
            let found = self.phrases.iter().find(|phrase| words[*at..].starts_with(phrase));
            let Some(phrase) = found else { return false };
            let before = at.checked_sub(1).and_then(|before| words.get(before));
            let after = words.get(at + phrase.len());
            !before.is_some_and(|word| self.not_after.contains(word))
                && !after.is_some_and(|word| self.not_before.contains(word))
        };
        (0..words.len()).filter(is_here).collect()
    }
}
