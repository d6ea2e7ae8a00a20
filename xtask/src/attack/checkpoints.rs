//! Folders of checkpoints that are in the way, and disks that end a run.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use distribute_testkit::Signal;

use super::stage::{Stage, Task, start, with_namespaces};
use super::verdict::{DONE, Held, PERMANENT, Verdict, accuracy, all_done, ended, error_line, says, shortened, text};

const TWO_REPLICAS: [&str; 2] = ["--devices", "CPU:0,CPU:1"];

/// A training that saves to a folder.
fn saving(stage: &Stage, folder: &Path, epochs: &str, every: &str) -> Task {
    let folder = folder.to_string_lossy();
    let own = ["--epochs", epochs, "--checkpoint-every", every, "--checkpoints", &folder];
    stage.mnist(&[&TWO_REPLICAS[..], &own].concat())
}

/// Steps of another run, higher than all of this one, in the folder of this one.
pub(super) fn two_runs(stage: &Stage) -> Verdict {
    let [own, other] = ["own", "other"].map(|name| stage.folder().join(name));
    all_done(&stage.outcomes(vec![saving(stage, &own, "1", "40")])?)?;
    all_done(&stage.outcomes(vec![saving(stage, &other, "2", "40")])?)?;
    for entry in fs::read_dir(&other).map_err(text)? {
        let from = entry.map_err(text)?.path();
        let to = own.join(from.file_name().unwrap_or_default());
        if from.is_dir() && !to.exists() {
            fs::rename(from, to).map_err(text)?;
        }
    }
    let before = files(&own)?;
    let outcome = stage.outcomes(vec![saving(stage, &own, "3", "40")])?.remove(0);
    ended("mnist", &outcome, &[PERMANENT])?;
    let sentence = error_line(&outcome)?;
    says(sentence, &["several runs", &own.to_string_lossy()])?;
    let after = files(&own)?;
    match before.iter().find(|(name, bytes)| after.get(*name) != Some(bytes)) {
        Some((name, _)) => Err(format!("{} was changed or removed", name.display())),
        None => Held::yes(format!("{} files are as they were: {}", before.len(), shortened(sentence))),
    }
}

/// All files of checkpoints, with a checksum of what they hold.
fn files(folder: &Path) -> Result<BTreeMap<PathBuf, u64>, String> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let (mut all, mut folders) = (BTreeMap::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).map_err(text)? {
            let path = entry.map_err(text)?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "safetensors" || extension == "json") {
                let mut hasher = DefaultHasher::new();
                fs::read(&path).map_err(text)?.hash(&mut hasher);
                all.insert(path, hasher.finish());
            }
        }
    }
    Ok(all)
}

/// Kills a job three times that saves after every step, so that most moments are within a save. Its results are those
/// of a job that was left alone.
pub(super) fn killed(stage: &Stage) -> Verdict {
    let [calm, killed] = ["calm", "killed"].map(|name| stage.folder().join(name));
    let losses = |name: &str| stage.folder().join(format!("losses-{name}"));
    let task = |folder: &Path, name: &str| {
        let (folder, losses) = (folder.to_string_lossy(), losses(name));
        let own = ["--epochs", "1", "--checkpoint-every", "1", "--checkpoints", &folder];
        stage.mnist(&[&TWO_REPLICAS[..], &own, &["--losses", &losses.to_string_lossy()]].concat())
    };
    let mut job = start(vec![task(&calm, "calm")])?;
    until_saved(stage, &calm)?;
    let began = Instant::now();
    let outcomes = job.wait_all(stage.left()).map_err(text)?;
    let training = began.elapsed();
    all_done(&outcomes)?;
    let expected = accuracy(&outcomes[0].stdout)?;
    let (mut resumed, mut moments) = (0, Vec::new());
    for round in 0..3 {
        let mut job = start(vec![task(&killed, "killed")])?;
        match round {
            0 => until_saved(stage, &killed)?,
            _ => drop(job.wait_for_line(0, "resuming after step", stage.left()).map_err(text)?),
        }
        // Three of them end before the training does.
        let moment = training.mul_f64(0.3 * stage.random());
        std::thread::sleep(moment);
        job.kill(0, Signal::KILL).map_err(text)?;
        let outcome = job.wait(0, stage.left()).map_err(text)?;
        if outcome.signal.is_none() {
            // It was done before, or it has failed by itself.
            ended("mnist", &outcome, &[DONE])?;
        }
        resumed += usize::from(outcome.stderr.contains("resuming after step"));
        moments.push(format!("{:.2} s", moment.as_secs_f64()));
    }
    let outcome = stage.outcomes(vec![task(&killed, "killed")])?.remove(0);
    ended("mnist, started again,", &outcome, &[DONE])?;
    resumed += usize::from(outcome.stderr.contains("resuming after step"));
    let accuracy = accuracy(&outcome.stdout)?;
    let [one, other] = ["calm", "killed"].map(|name| fs::read_to_string(losses(name)));
    if one.map_err(text)? != other.map_err(text)? || accuracy != expected {
        return Err(format!("losses or accuracy ({accuracy:.2} %) differ from those of a calm run ({expected:.2} %)"));
    }
    match resumed {
        0 => Err("no run resumed from a checkpoint".to_owned()),
        _ => Held::yes(format!(
            "killed after {}; {resumed} of 4 runs resumed; all losses as undisturbed, accuracy {accuracy:.2} %",
            moments.join(", ")
        )),
    }
}

/// Waits for the first checkpoint.
fn until_saved(stage: &Stage, folder: &Path) -> Result<(), String> {
    while !folder.join("latest").exists() {
        if stage.left() <= Duration::from_millis(1) {
            return Err(format!("no checkpoint came to {}", folder.display()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

pub(super) fn full(stage: &Stage) -> Verdict {
    on_tmpfs(stage, "size=1m", "space")
}

pub(super) fn read_only(stage: &Stage) -> Verdict {
    on_tmpfs(stage, "ro", "read-only")
}

/// Checkpoints on a file system of the process's own.
fn on_tmpfs(stage: &Stage, options: &str, words: &str) -> Verdict {
    with_namespaces(&["--mount"], || {
        let mount = stage.folder().join("disk");
        fs::create_dir(&mount).map_err(text)?;
        let task = saving(stage, &mount.join("checkpoints"), "1", "10");
        let task = task.with_mounts(&format!("mount -t tmpfs -o {options} tmpfs {}", mount.display()));
        let outcome = stage.outcomes(vec![task])?.remove(0);
        ended("mnist", &outcome, &[PERMANENT])?;
        let sentence = error_line(&outcome)?;
        says(sentence, &[words, &mount.to_string_lossy()])?;
        Held::yes(format!("ended with 1: {}", shortened(sentence)))
    })
}
