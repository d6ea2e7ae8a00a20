//! The rows of the table.

use serde::Serialize;

use crate::error::text;

/// The measurement of a cell. Times are milliseconds after the fault.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Measured {
    pub(super) detect_ms: Option<u64>,
    pub(super) end_ms: Option<u64>,
    pub(super) recover_ms: Option<u64>,
    pub(super) join_ms: Option<u64>,
    pub(super) steps_lost: u64,
    /// Examples that the result lacks; negative if it has some twice.
    pub(super) examples_lost: i64,
    /// Exit codes of the tasks that the fault has not hit.
    pub(super) codes: Vec<i32>,
    /// Whether the weights are those without faults, where they were compared.
    pub(super) equal: Option<bool>,
    /// Remarks.
    pub(super) note: String,
}

#[derive(Serialize)]
pub(super) struct Row {
    pub(super) fault: String,
    /// The strategy, or the peer.
    pub(super) system: String,
    /// `held`, `BROKEN`, `skipped`, or `measured` where nothing is promised.
    pub(super) result: &'static str,
    pub(super) detect_ms: Option<u64>,
    pub(super) end_ms: Option<u64>,
    pub(super) recover_ms: Option<u64>,
    pub(super) join_ms: Option<u64>,
    pub(super) steps_lost: Option<u64>,
    pub(super) examples_lost: Option<i64>,
    pub(super) exit_codes: Vec<i32>,
    pub(super) equal: Option<bool>,
    pub(super) note: String,
    pub(super) seed: u64,
}

impl Row {
    pub(super) fn new(fault: &str, system: &str, seed: u64, result: &'static str, measured: Measured) -> Row {
        let Measured { detect_ms, end_ms, recover_ms, join_ms, steps_lost, examples_lost, codes, equal, note } =
            measured;
        let (fault, system) = (fault.to_owned(), system.to_owned());
        let (steps_lost, examples_lost) = (Some(steps_lost), Some(examples_lost));
        Row {
            fault,
            system,
            result,
            detect_ms,
            end_ms,
            recover_ms,
            join_ms,
            steps_lost,
            examples_lost,
            exit_codes: codes,
            equal,
            note,
            seed,
        }
    }

    /// A row without a measurement.
    pub(super) fn without(fault: &str, system: &str, seed: u64, result: &'static str, note: String) -> Row {
        let row = Row::new(fault, system, seed, result, Measured { note, ..Measured::default() });
        Row { steps_lost: None, examples_lost: None, ..row }
    }

    pub(super) fn print(&self, json: bool) -> Result<(), String> {
        if json {
            println!("{}", serde_json::to_string(self).map_err(text)?);
            return Ok(());
        }
        let seconds = |ms: Option<u64>| ms.map_or("-".to_owned(), |ms| format!("{:.2} s", ms as f64 / 1000.0));
        let steps = self.steps_lost.map_or("-".to_owned(), |steps| steps.to_string());
        let examples = self.examples_lost.map_or("-".to_owned(), |examples| examples.to_string());
        let codes: Vec<String> = self.exit_codes.iter().map(i32::to_string).collect();
        let equal = self.equal.map_or("-", |equal| if equal { "yes" } else { "no" });
        println!(
            "{:<14} {:<11} {:<8} {:>8} {:>8} {:>8} {:>8} {:>6} {:>9} {:<13} {equal}",
            self.fault,
            self.system,
            self.result,
            seconds(self.detect_ms),
            seconds(self.end_ms),
            seconds(self.recover_ms),
            seconds(self.join_ms),
            steps,
            examples,
            codes.join(" "),
        );
        if !self.note.is_empty() {
            println!("    {}", self.note);
        }
        Ok(())
    }
}

pub(super) fn print_header() {
    println!(
        "{:<14} {:<11} {:<8} {:>8} {:>8} {:>8} {:>8} {:>6} {:>9} {:<13} equal",
        "fault", "strategy", "result", "detect", "end", "recover", "join", "steps", "examples", "exit codes"
    );
    println!("{:<14} {:<11} {:<8} {:>8} {:>8} {:>8} {:>8} {:>6} {:>9}", "", "", "", "", "", "", "", "lost", "lost");
}
