//! Variables that describe no cluster. A task that misunderstands them must not train alone.

use std::time::Instant;

use super::stage::{Stage, Task};
use super::verdict::{CONFIGURATION, Held, Verdict, ended, error_line, says, shortened};

pub(super) fn not_utf8(stage: &Stage) -> Verdict {
    let broken = r#"export TF_CONFIG="$(printf '{"cluster": {"worker": ["\377:1"]}}')""#;
    refused(stage, mnist(stage).after(broken), &["TF_CONFIG", "UTF-8"])
}

pub(super) fn no_workers(stage: &Stage) -> Verdict {
    let config = r#"{"cluster": {"worker": []}, "task": {"type": "worker", "index": 0}}"#;
    refused(stage, mnist(stage).env("TF_CONFIG", config), &["TF_CONFIG", "worker"])
}

pub(super) fn repeated_key(stage: &Stage) -> Verdict {
    let config = r#"{"cluster": {"worker": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]},
        "task": {"type": "worker", "index": 0}}"#;
    refused(stage, mnist(stage).env("TF_CONFIG", config), &["TF_CONFIG", "worker", "twice"])
}

pub(super) fn index(stage: &Stage) -> Verdict {
    let config =
        r#"{"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": "1o"}}"#;
    refused(stage, mnist(stage).env("TF_CONFIG", config), &["TF_CONFIG", "1o", "index"])
}

pub(super) fn transport(stage: &Stage) -> Verdict {
    let task = stage.mnist(&["--epochs", "1", "--devices", "CPU:0,CPU:1"]);
    refused(stage, task.env("DISTRIBUTE_TRANSPORT", "carrier-pigeon"), &["carrier-pigeon", "tcp"])
}

/// Read as a whole, and refused for its index; Linux gives a variable 128 KiB.
pub(super) fn many_tasks(stage: &Stage) -> Verdict {
    let letters = || ('a'..='z').map(String::from);
    let hosts = letters().chain(letters().flat_map(|one| letters().map(move |other| format!("{one}{other}"))));
    let addresses = hosts.flat_map(|host| (1..100).map(move |port| format!("\"{host}:{port}\"")));
    let (mut list, mut count) = (String::new(), 0);
    for address in addresses {
        if list.len() + address.len() > 125 << 10 {
            break;
        }
        list += if count > 0 { "," } else { "" };
        list += &address;
        count += 1;
    }
    let config = format!(r#"{{"cluster":{{"worker":[{list}]}},"task":{{"type":"worker","index":{count}}}}}"#);
    let began = Instant::now();
    refused(stage, mnist(stage).env("TF_CONFIG", config), &["TF_CONFIG", &count.to_string()])?;
    let took = began.elapsed().as_secs_f64();
    match took < 2.0 {
        true => Held::yes(format!("{count} tasks are read and refused within {took:.2} s")),
        false => Err(format!("{count} tasks took {took:.2} s, expected less than 2 s")),
    }
}

fn mnist(stage: &Stage) -> Task {
    stage.mnist(&["--epochs", "1"])
}

fn refused(stage: &Stage, task: Task, words: &[&str]) -> Verdict {
    let outcome = stage.outcomes(vec![task])?.remove(0);
    if outcome.stdout.contains("test accuracy") {
        return Err("it trained alone".to_owned());
    }
    ended("mnist", &outcome, &[CONFIGURATION])?;
    let sentence = error_line(&outcome)?;
    says(sentence, words)?;
    Held::yes(shortened(sentence))
}
