//! The state of a job as text.

use std::fmt::Write;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use console::Style;

use super::answer::{Answer, Collective, LONG_S, Rank, Source, Task};

/// Describes a job; `colors` marks what deserves attention.
pub(super) fn describe(source: &Source, answer: &Answer, colors: bool) -> String {
    let style = |style: Style| style.force_styling(colors);
    let (bold, alert, dim) = (style(Style::new().bold()), style(Style::new().yellow()), style(Style::new().dim()));
    let mut text = format!("{}\n", bold.apply_to(heading(source, answer)));
    let _ = writeln!(text, "{}", table(&answer.tasks));
    let long: Vec<&Collective> = answer.collectives.iter().filter(|collective| collective.is_long()).collect();
    let reporting = answer.tasks.iter().filter(|task| task.heard_s.is_some()).count();
    text.push('\n');
    if reporting == 0 {
        text.push_str(
            "no task has reported yet; tasks report if they use a Trainer or Progress, and those of a job on several \
             hosts if it was started with --status\n",
        );
    } else if long.is_empty() {
        let _ = writeln!(text, "{}", dim.apply_to(format!("no rank has waited for {LONG_S} s in a collective")));
    }
    for collective in long {
        let _ = writeln!(text, "{}", alert.apply_to(waiting(collective)));
        let _ = writeln!(
            text,
            "  entered {} of {}: {}",
            collective.entered.len(),
            collective.world_size,
            of_ranks(&collective.entered)
        );
        if collective.missing_count == 0 {
            text.push_str("  all ranks have entered: values are being exchanged, or a connection is slow\n");
        } else {
            let _ = writeln!(text, "  missing {}:", collective.missing_count);
        }
        for rank in &collective.missing {
            let _ = writeln!(text, "    {}", alert.apply_to(missing(rank)));
        }
        let more = collective.missing_count.saturating_sub(collective.missing.len());
        if more > 0 {
            let _ = writeln!(text, "    and {more} more");
        }
    }
    for error in answer.errors.iter().take(3) {
        let task = error.task.as_deref().unwrap_or("job");
        let _ = writeln!(text, "error after {}: {}: {}", seconds(error.at_s), clean(task), clean(&error.text));
    }
    text
}

fn heading(source: &Source, answer: &Answer) -> String {
    let job = &answer.job;
    let title = if job.title.is_empty() { &job.name } else { &job.title };
    let mut parts = vec![clean(title), clean(&job.state), seconds(job.elapsed_s)];
    match (job.epoch, job.epochs) {
        (Some(epoch), Some(epochs)) => parts.push(format!("epoch {epoch} of {epochs}")),
        (Some(epoch), None) => parts.push(format!("epoch {epoch}")),
        _ => {}
    }
    parts.extend(job.step.map(|step| format!("{step} steps")));
    parts.push(match source.launcher {
        Some(launcher) => format!("launcher {launcher}"),
        None => clean(&source.place.to_string()),
    });
    parts.join(" · ")
}

fn table(tasks: &[Task]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["task", "state", "steps", "step", "own", "data", "peers", "memory", "restarts", "heard", ""]);
    let time = |value: Option<f64>| value.map_or(NONE.to_owned(), seconds);
    for task in tasks {
        let state = match task.ended.as_ref().or(task.lost.as_ref()) {
            Some(why) => format!("{}: {}", task.state, why.chars().take(40).collect::<String>()),
            None => task.state.clone(),
        };
        table.add_row([
            clean(&task.task),
            clean(&state),
            task.steps.map_or(NONE.to_owned(), |steps| steps.to_string()),
            time(task.step_s.as_ref().map(|spread| spread.p50)),
            time(task.own_s),
            time(task.input_wait_s),
            time(task.peer_wait_s),
            task.memory_bytes.map_or(NONE.to_owned(), bytes),
            task.restarts.to_string(),
            task.heard_s.map_or(NONE.to_owned(), |heard| format!("{} ago", seconds(heard))),
            if task.straggler { "▲ straggler".to_owned() } else { String::new() },
        ]);
    }
    for column in table.column_iter_mut().skip(2).take(8) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.to_string().lines().map(|line| format!("{}\n", line.trim_end())).collect::<String>().trim_end().to_owned()
}

fn waiting(collective: &Collective) -> String {
    let size = if collective.bytes == 0 { String::new() } else { format!(" ({})", bytes(collective.bytes)) };
    let ranks = if collective.waiting.len() == 1 { "rank has" } else { "ranks have" };
    format!(
        "{}{size} of group {}: {} {ranks} waited for up to {}",
        clean(&collective.call),
        clean(&collective.group),
        collective.waiting.len(),
        seconds(collective.waiting_s),
    )
}

/// Says what is known of a rank that others wait for.
fn missing(rank: &Rank) -> String {
    let name = rank.name.as_deref().map(|name| format!(" ({})", clean(name))).unwrap_or_default();
    let mut parts = vec![format!("rank {}{name}", rank.rank)];
    match (&rank.task, &rank.state) {
        (Some(_), Some(state)) => parts.push(clean(state)),
        _ => parts.push("its task has not reported this group".to_owned()),
    }
    if rank.straggler {
        parts.push("▲ straggler".to_owned());
    }
    if let Some(call) = &rank.waits_in {
        parts.push(format!("waits in {}", clean(call)));
    }
    match (&rank.last, rank.last_ago_s) {
        (Some(last), Some(ago)) => parts.push(format!("finished {} {} ago", clean(last), seconds(ago))),
        _ if rank.task.is_some() => parts.push("has finished no call of this group".to_owned()),
        _ => {}
    }
    parts.extend(rank.heard_s.map(|heard| format!("last heard {} ago", seconds(heard))));
    parts.join(" · ")
}

/// Formats ranks as `ranks 0, 2-5`.
fn of_ranks(ranks: &[u32]) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for rank in ranks {
        match ranges.last_mut() {
            Some((_, end)) if end.checked_add(1) == Some(*rank) => *end = *rank,
            _ => ranges.push((*rank, *rank)),
        }
    }
    let shown = ranges.iter().take(MOST_RANGES).map(|(start, end)| match end - start {
        0 => start.to_string(),
        _ => format!("{start}-{end}"),
    });
    let shown = shown.collect::<Vec<_>>().join(", ");
    let more = if ranges.len() > MOST_RANGES { ", …" } else { "" };
    match ranks.len() {
        0 => "none".to_owned(),
        1 => format!("rank {shown}"),
        _ => format!("ranks {shown}{more}"),
    }
}

/// Formats as `0 s`, `31 ms`, `9.7 s`, `2 min 03 s`.
fn seconds(s: f64) -> String {
    if !s.is_finite() || s < 0.0 {
        return NONE.to_owned();
    }
    let ms = s * 1e3;
    match s {
        0.0 => "0 s".to_owned(),
        0.0..0.000_999_5 => format!("{:.0} µs", s * 1e6),
        0.0..0.01 => format!("{ms:.1} ms"),
        0.0..0.999_5 => format!("{ms:.0} ms"),
        _ => crate::report::seconds(std::time::Duration::from_secs_f64(s.min(1e9))),
    }
}

fn bytes(bytes: u64) -> String {
    let of = |unit: u64| bytes as f64 / unit as f64;
    match bytes {
        0..1_024 => format!("{bytes} B"),
        1_024..1_048_576 => format!("{:.1} KiB", of(1 << 10)),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", of(1 << 20)),
        _ => format!("{:.1} GiB", of(1 << 30)),
    }
}

/// Removes what a terminal would take for a command: the texts come from other processes.
pub(super) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

const NONE: &str = "–";

const MOST_RANGES: usize = 16;

#[cfg(test)]
mod tests {
    use distribute_train::status::Place;

    use super::*;
    use crate::top::answer::{Job, Spread};

    fn source() -> Source {
        Source { place: Place::Address("127.0.0.1:80".into()), launcher: None }
    }

    fn answer() -> Answer {
        let task = |rank: u32| Task {
            task: format!("worker:{rank}"),
            state: "training".into(),
            steps: Some(57),
            step_s: Some(Spread { p50: 0.0314 }),
            own_s: Some(0.001),
            peer_wait_s: Some(0.0),
            memory_bytes: Some(12 << 20),
            heard_s: Some(0.25),
            straggler: rank == 1,
            ..Task::default()
        };
        let missing = Rank {
            rank: 1,
            name: Some("worker:1".into()),
            task: Some("worker:1".into()),
            state: Some("training".into()),
            straggler: true,
            last: Some("barrier #56".into()),
            last_ago_s: Some(12.4),
            heard_s: Some(0.25),
            ..Rank::default()
        };
        let collective = Collective {
            group: "world".into(),
            world_size: 4,
            call: "all_reduce #57 of 1024 f32, sum".into(),
            bytes: 4096,
            waiting_s: 12.3,
            waiting: vec![0, 2, 3],
            entered: vec![0, 2, 3],
            missing_count: 1,
            missing: vec![missing],
        };
        let job = Job {
            name: "toy".into(),
            state: "training".into(),
            elapsed_s: 65.0,
            epoch: Some(1),
            step: Some(57),
            ..Job::default()
        };
        Answer { job, tasks: vec![task(0), task(1)], collectives: vec![collective], errors: Vec::new() }
    }

    #[test]
    fn who_waits_for_whom_is_said() {
        let expected = "\
toy · training · 1 min 05 s · epoch 1 · 57 steps · 127.0.0.1:80
task       state     steps   step    own     data  peers    memory  restarts       heard
worker:0   training     57  31 ms  1.0 ms     –    0 s  12.0 MiB         0  250 ms ago";
        let text = describe(&source(), &answer(), false);
        assert_eq!(text.lines().next(), expected.lines().next());
        for words in [
            "worker:1",
            "▲ straggler",
            "all_reduce #57 of 1024 f32, sum (4.0 KiB) of group world: 3 ranks have waited for up to 12.3 s",
            "  entered 3 of 4: ranks 0, 2-3\n  missing 1:\n    rank 1 (worker:1) · training · ▲ straggler · finished \
             barrier #56 12.4 s ago · last heard 250 ms ago",
        ] {
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn short_waits_are_normal_and_silence_is_explained() {
        let mut answer = answer();
        answer.collectives[0].waiting_s = 0.5;
        assert!(describe(&source(), &answer, false).contains("no rank has waited for 2 s in a collective"));
        answer.tasks.iter_mut().for_each(|task| task.heard_s = None);
        assert!(describe(&source(), &answer, false).contains("no task has reported yet"));
    }

    #[test]
    fn texts_of_a_job_do_not_command_the_terminal() {
        let mut answer = answer();
        answer.job.title = "a\u{1b}[2Jb".into();
        answer.collectives[0].call = "x\u{1b}]0;y\u{7}".into();
        answer.tasks[0].task = "\u{9b}31m".into();
        let text = describe(&source(), &answer, false);
        assert!(!text.contains(['\u{1b}', '\u{7}', '\u{9b}']), "{text:?}");
    }

    #[test]
    fn ranks_and_numbers_are_short() {
        assert_eq!(of_ranks(&[]), "none");
        assert_eq!(of_ranks(&[3]), "rank 3");
        assert_eq!(of_ranks(&[0, 1, 2, 5, 7, 8]), "ranks 0-2, 5, 7-8");
        let even: Vec<u32> = (0..100).map(|rank| 2 * rank).collect();
        assert!(of_ranks(&even).ends_with("28, 30, …"));
        assert_eq!(
            [0.0, 2e-5, 0.0042, 0.31, 9.71, 75.0].map(seconds),
            ["0 s", "20 µs", "4.2 ms", "310 ms", "9.7 s", "1 min 15 s"]
        );
        assert_eq!([f64::NAN, -1.0].map(seconds), [NONE, NONE]);
        assert_eq!([12, 2048, 3 << 20, 5 << 30].map(bytes), ["12 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]);
    }
}
