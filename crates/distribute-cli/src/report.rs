//! The messages to the user at the end, and when something cannot be started.

use std::fmt::Write;
use std::time::Duration;

use console::Style;
use distribute_train::progress::colors_allowed;
use signal_hook::consts::SIGTERM;

use crate::error::Error;
use crate::hosts::Last;
use crate::job::Task;
use crate::outcome::{Exit, INFRASTRUCTURE, Outcome, Verdict, signal_name};
use crate::supervisor::Note;

/// A task in the report.
#[derive(Debug)]
pub(crate) struct Line<'a> {
    pub(crate) task: Task,
    /// Its host, if the job has several.
    pub(crate) host: Option<String>,
    pub(crate) pid: Option<i32>,
    pub(crate) outcome: Outcome,
    /// How often it was started, if tasks are started again one by one.
    pub(crate) starts: Option<u32>,
    pub(crate) last: &'a Last,
}

/// Formats the table of all tasks and the first cause; empty after a success, unless tasks may have been started again.
pub(crate) fn report(lines: &[Line<'_>], verdict: Verdict) -> String {
    let mut text = match verdict {
        Verdict::Success if lines.iter().all(|line| line.starts.is_none()) => return String::new(),
        Verdict::Success | Verdict::Interrupted(_) | Verdict::Cause(_) => table(lines, verdict),
    };
    let block = match verdict {
        Verdict::Cause(rank) => cause(&lines[rank]),
        _ => String::new(),
    };
    text.push_str(&block);
    text
}

/// Formats an error as a block: the message, then what was given, what was expected and the remedy.
pub(crate) fn error(error: &Error) -> String {
    block(&error.to_string(), &error.details())
}

/// Formats a message while the job runs.
pub(crate) fn note(note: &Note, tasks: &[Task], grace: Duration) -> String {
    let grace = grace.as_secs();
    match note {
        Note::Failed { rank, exit, at, others } => {
            let failed = format!("{} {} after {}", tasks[*rank], ended(*exit), seconds(*at));
            match others {
                0 => failed,
                _ => format!("{failed}; stopping {} (killed after {grace} s)", count(*others, "other task")),
            }
        }
        Note::Forgiven { rank, exit, at } => {
            format!("{} {} after {}; the others continue", tasks[*rank], ended(*exit), seconds(*at))
        }
        Note::Again { rank, exit, at, pause, count, of } => format!(
            "{} {} after {}; starting it again in {} s ({count} of {of}), the others wait for it",
            tasks[*rank],
            ended(*exit),
            seconds(*at),
            pause.as_secs(),
        ),
        Note::GivenUp { rank, why } => format!("{} is not started again alone: {why}", tasks[*rank]),
        Note::Interrupted { signal, tasks } => {
            let name = signal_name(*signal);
            format!("{name}: stopping {} (killed after {grace} s, or at once by Ctrl-C)", count(*tasks, "task"))
        }
        Note::Killing { ranks, asked } => {
            let names: Vec<_> = ranks.iter().map(|rank| tasks[*rank].to_string()).collect();
            let why = if *asked { "interrupted again".into() } else { format!("not stopped within {grace} s") };
            format!("killing {}: {why}", names.join(", "))
        }
        Note::Leftover { rank } => format!("{} has ended; stopping processes that it left behind", tasks[*rank]),
        Note::Stuck { rank } => {
            format!("{} is held by the kernel and cannot be killed; leaving it behind", tasks[*rank])
        }
    }
}

fn table(lines: &[Line<'_>], verdict: Verdict) -> String {
    let mut rows = vec![["task", "host", "exit", "time", "starts", "note"].map(str::to_owned)];
    let coordinated = lines.iter().any(|line| line.task.job == "ps");
    for line in lines {
        let Outcome { exit, at, .. } = line.outcome;
        let is_cause = verdict == Verdict::Cause(line.task.rank);
        let mark = if is_cause { "← first cause: " } else { "" };
        let mut note = format!("{mark}{}", meaning(line, coordinated));
        if note.len() == mark.len() {
            note = note.replace(": ", "");
        }
        let host = line.host.clone().unwrap_or_default();
        let starts = line.starts.map(|starts| starts.to_string()).unwrap_or_default();
        rows.push([line.task.to_string(), host, exit.to_string(), seconds(at), starts, note]);
    }
    let several = lines.iter().any(|line| line.host.is_some());
    let one_by_one = lines.iter().any(|line| line.starts.is_some());
    let is_shown = |column: &usize| (several || *column != 1) && (one_by_one || *column != 4);
    let columns: Vec<usize> = (0..5).filter(is_shown).collect();
    let widths: Vec<usize> =
        columns.iter().map(|column| rows.iter().map(|row| row[*column].len()).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for (at, row) in rows.iter().enumerate() {
        let cells = columns.iter().zip(&widths).map(|(column, width)| format!("{:<width$}  ", row[*column]));
        let row = cells.collect::<String>() + &row[5];
        let row = row.trim_end();
        let style = match (at, verdict) {
            (0, _) => style().dim(),
            (at, Verdict::Cause(rank)) if at == rank + 1 => style().red(),
            _ => style(),
        };
        let _ = writeln!(text, "{}", style.apply_to(row));
    }
    text
}

fn cause(line: &Line<'_>) -> String {
    let Outcome { exit, at, .. } = line.outcome;
    let on_host = line.host.as_ref().map(|host| format!(" on {host}"));
    let place: Vec<String> = line.pid.map(|pid| format!("(pid {pid})")).into_iter().collect();
    let place = place.join(" ") + &on_host.unwrap_or_default();
    let sentence = match exit {
        Exit::Lost => format!("{} {place} was lost with its host after {}", line.task, seconds(at)),
        exit => format!("{} {place} {} after {}", line.task, ended(exit), seconds(at)),
    };
    let sentence = sentence.replace("  ", " ");
    let mut details = Vec::new();
    if let Some(error) = &line.last.error {
        details.push(("said", error.replace('\n', "\n            ")));
    }
    if let Some(hint) = hint(exit) {
        details.push(("hint", hint.to_owned()));
    }
    let mut text = block(&sentence, &details);
    let tail = &line.last.lines[..];
    match tail {
        [] if exit == Exit::Lost => {}
        [] => text.push_str("  it printed nothing\n"),
        [_] => text.push_str("  its last line\n"),
        _ => {
            let _ = writeln!(text, "  its last {} lines", tail.len());
        }
    }
    for line in tail {
        let _ = writeln!(text, "    {line}");
    }
    text
}

fn block(sentence: &str, details: &[(&str, String)]) -> String {
    let mut text = format!("{} {sentence}\n", style().red().bold().apply_to("error:"));
    for (label, detail) in details {
        let _ = writeln!(text, "  {label:<8}  {detail}");
    }
    text
}

pub(crate) fn ended(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("ended with exit code {code}"),
        Exit::Signal(_) => format!("was killed by {exit}"),
        Exit::Lost => "was lost with its host".to_owned(),
    }
}

/// Explains an exit in a few words; empty if there is nothing to explain. If a coordinator directs the other tasks,
/// only it saves.
fn meaning(line: &Line<'_>, coordinated: bool) -> &'static str {
    let outcome = line.outcome;
    match outcome.exit {
        Exit::Code(0) => "",
        exit if outcome.forgiven && !coordinated && exit.answers(SIGTERM) => "told to stop",
        _ if outcome.forgiven => "the others continued",
        Exit::Code(INFRASTRUCTURE) => "lost another task, or a deadline passed",
        Exit::Code(143) if !coordinated || line.task.job == "chief" => "stopped, checkpoint saved",
        _ if outcome.stopped => "stopped by the launcher",
        Exit::Code(2) => "wrong flags or configuration",
        Exit::Code(101) => "panicked",
        Exit::Code(_) => "failed",
        Exit::Lost => "its host was lost",
        Exit::Signal(KILL) => "killed from outside; out of memory?",
        Exit::Signal(_) => "crashed, or killed from outside",
    }
}

fn hint(exit: Exit) -> Option<&'static str> {
    match exit {
        Exit::Signal(KILL) => {
            Some("no task sent it; most often the kernel does when memory runs out: dmesg | grep -i 'out of memory'")
        }
        Exit::Code(INFRASTRUCTURE) => {
            Some("every task that failed says so of another; the first of them is shown, and the job may be run again")
        }
        Exit::Lost => Some("its launcher has ended, or the network between the hosts has; the job may be run again"),
        Exit::Code(126) => Some("a shell says so when it may not execute a program"),
        Exit::Code(127) => Some("a shell says so when it does not find a program"),
        _ => None,
    }
}

/// Formats as `9.7 s`, `2 min 03 s`, `1 h 02 min`.
pub(crate) fn seconds(time: Duration) -> String {
    let whole = time.as_secs_f64().round() as u64;
    match whole {
        0..60 => format!("{:.1} s", time.as_secs_f64()),
        60..3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole / 60 % 60),
    }
}

pub(crate) fn count(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

fn style() -> Style {
    Style::new().force_styling(colors_allowed())
}

const KILL: i32 = signal_hook::consts::SIGKILL;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Roles;

    fn outcome(exit: Exit, ms: u64, stopped: bool) -> Outcome {
        Outcome { exit, at: Duration::from_millis(ms), stopped, forgiven: false, told: false }
    }

    #[test]
    fn the_first_cause_is_marked_and_quoted() {
        let tasks = Roles { chief: 1, workers: 3, ..Roles::default() }.tasks(1);
        let outcomes = [
            outcome(Exit::Code(138), 9800, false),
            outcome(Exit::Signal(9), 9700, false),
            outcome(Exit::Signal(15), 9900, true),
            outcome(Exit::Code(0), 123_000, false),
        ];
        let last = Last { lines: vec!["step 1".to_owned(), "step 2".to_owned()], ..Last::default() };
        let line = |(task, outcome): (&Task, Outcome)| Line {
            task: *task,
            host: None,
            pid: Some(4711),
            outcome,
            starts: None,
            last: &last,
        };
        let lines: Vec<_> = tasks.iter().zip(outcomes).map(line).collect();
        let expected = "\
task      exit     time        note
chief-0   138      9.8 s       lost another task, or a deadline passed
worker-0  SIGKILL  9.7 s       ← first cause: killed from outside; out of memory?
worker-1  SIGTERM  9.9 s       stopped by the launcher
worker-2  0        2 min 03 s
error: worker-0 (pid 4711) was killed by SIGKILL after 9.7 s
  hint      no task sent it; most often the kernel does when memory runs out: dmesg | grep -i 'out of memory'
  its last 2 lines
    step 1
    step 2
";
        assert_eq!(console::strip_ansi_codes(&report(&lines, Verdict::of(&outcomes, None))), expected);
        assert_eq!(report(&lines, Verdict::Success), "");
    }

    #[test]
    fn the_table_of_several_hosts_names_them() {
        let tasks = Roles { workers: 2, ..Roles::default() }.tasks(2);
        let outcomes = [outcome(Exit::Code(138), 9800, false), outcome(Exit::Lost, 9700, false)];
        let last = Last { error: Some("the disk is full".to_owned()), ..Last::default() };
        let line = |(task, outcome): (&Task, Outcome)| {
            let host = Some(["node-a", "b"][task.node].to_owned());
            Line { task: *task, host, pid: None, outcome, starts: None, last: &last }
        };
        let lines: Vec<_> = tasks.iter().zip(outcomes).map(line).collect();
        let expected = "\
task      host    exit  time   note
worker-0  node-a  138   9.8 s  lost another task, or a deadline passed
worker-1  b       lost  9.7 s  ← first cause: its host was lost
error: worker-1 on b was lost with its host after 9.7 s
  said      the disk is full
  hint      its launcher has ended, or the network between the hosts has; the job may be run again
";
        assert_eq!(console::strip_ansi_codes(&report(&lines, Verdict::of(&outcomes, None))), expected);
    }

    #[test]
    fn durations_change_units() {
        let shown = [9_700, 59_400, 59_500, 123_000, 3_720_000].map(|ms| seconds(Duration::from_millis(ms)));
        assert_eq!(shown, ["9.7 s", "59.4 s", "1 min 00 s", "2 min 03 s", "1 h 02 min"]);
    }
}
