//! Expectations of an attack on the processes that it started.

use distribute_testkit::Outcome;

/// The observation where everything held, else the expectation that did not.
pub(super) type Verdict = Result<Held, String>;

/// An attack whose expectations all hold, or that cannot run here.
pub(super) enum Held {
    Yes(String),
    Skipped(String),
}

impl Held {
    pub(super) fn yes(seen: impl Into<String>) -> Verdict {
        Ok(Held::Yes(seen.into()))
    }
}

/// The exit code of programs that trained.
pub(super) const DONE: i32 = 0;
/// The exit code where a restart changes nothing.
pub(super) const PERMANENT: i32 = 1;
/// The exit code of wrong configurations.
pub(super) const CONFIGURATION: i32 = 2;
/// The exit code of failures after which a restart helps.
pub(super) const RETRYABLE: i32 = 138;

/// Expects one of these exit codes.
pub(super) fn ended(name: &str, outcome: &Outcome, codes: &[i32]) -> Result<(), String> {
    match outcome.code {
        Some(code) if codes.contains(&code) => Ok(()),
        _ => {
            let how = match (outcome.code, outcome.signal) {
                (Some(code), _) => format!("exit code {code}"),
                (None, signal) => format!("signal {}", signal.unwrap_or_default()),
            };
            Err(format!("{name} ended with {how}, expected {codes:?}; it said: {}", last_words(outcome)))
        }
    }
}

/// Expects that all of a job have trained.
pub(super) fn all_done(outcomes: &[Outcome]) -> Result<(), String> {
    outcomes.iter().try_for_each(|outcome| ended(&format!("task {}", outcome.rank), outcome, &[DONE]))
}

/// The one line that says what went wrong.
pub(super) fn error_line(outcome: &Outcome) -> Result<&str, String> {
    let lines: Vec<&str> = outcome.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    match lines.as_slice() {
        [line] if line.contains("  ") => Err(format!("several spaces in a row in: {line}")),
        [line] => Ok(line),
        lines => Err(format!(
            "task {} said {} error sentences, expected 1: {:?}",
            outcome.rank,
            lines.len(),
            last_words(outcome)
        )),
    }
}

/// Expects words in a sentence, in whatever case.
pub(super) fn says(sentence: &str, words: &[&str]) -> Result<(), String> {
    let lower = sentence.to_lowercase();
    match words.iter().find(|word| !lower.contains(&word.to_lowercase())) {
        None => Ok(()),
        Some(word) => Err(format!("no {word:?} in: {sentence}")),
    }
}

/// The accuracy that a chief has printed, in percent.
pub(super) fn accuracy(printed: &str) -> Result<f64, String> {
    let line = printed.lines().find_map(|line| Some(line.split_once("test accuracy")?.1));
    let number = line.and_then(|line| line.split_whitespace().find_map(|word| word.parse().ok()));
    number.ok_or_else(|| format!("no test accuracy in: {}", shortened(printed)))
}

/// Expects nearly the accuracy of an undisturbed training: sums in another order change it little.
pub(super) fn as_accurate(printed: &str, expected: f64) -> Result<f64, String> {
    let accuracy = accuracy(printed)?;
    match (accuracy - expected).abs() <= 1.0 {
        true => Ok(accuracy),
        false => Err(format!("test accuracy {accuracy:.2} %, expected {expected:.2} %")),
    }
}

/// The end of what a task said on standard error, else on standard output.
pub(super) fn last_words(outcome: &Outcome) -> String {
    let said = if outcome.stderr.trim().is_empty() { &outcome.stdout } else { &outcome.stderr };
    shortened(said)
}

/// The last lines of a text.
pub(super) fn shortened(text: &str) -> String {
    let lines: Vec<&str> = text.trim().lines().collect();
    let last = lines[lines.len().saturating_sub(3)..].join(" / ");
    match last.char_indices().rev().nth(LONGEST) {
        Some((at, _)) => format!("…{}", &last[at..]),
        None => last,
    }
}

const LONGEST: usize = 800;

/// Words of an error of the harness, without pages of output.
pub(super) fn text(error: impl std::fmt::Display) -> String {
    let text = error.to_string();
    match text.split_once("; it printed:\n") {
        Some((what, printed)) => format!("{what}; it printed: {}", shortened(printed)),
        None => text,
    }
}
