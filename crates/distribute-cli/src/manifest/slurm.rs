//! A script for sbatch.

use std::borrow::Cow;
use std::fmt::Write;

use super::args::Slurm;
use crate::error::Error;

/// Returns the script.
///
/// # Errors
/// [`Error::Manifest`] if workers do not fill their nodes, or CPUs are not whole.
///
/// # Source
/// Slurm's manual pages sbatch(1), srun(1) and scontrol(1).
pub(super) fn file(job: &Slurm) -> Result<String, Error> {
    let (workers, each) = (job.program.workers, job.tasks_per_node);
    if !workers.is_multiple_of(each) {
        return Err(Error::Manifest {
            problem: "the last node would have fewer workers than the others".into(),
            given: format!("{workers} workers, {each} on each node"),
            expected: "a multiple".into(),
            remedy: format!("give --workers {}, or another --tasks-per-node", workers.next_multiple_of(each)),
        });
    }
    let mut text = String::from("#!/bin/bash\n# Workers of a distributed job. Start: sbatch FILE\n");
    for (option, value) in options(job)? {
        // Writing to a String does not fail.
        let _ = writeln!(text, "#SBATCH --{option}={value}");
    }
    text.push_str(
        "# Restarts by Slurm itself after the loss of a node, and by this script below.\n#SBATCH --requeue\n\n",
    );
    for variable in &job.program.env {
        let _ = writeln!(text, "export {}={}", variable.name, quoted(&variable.value)?);
    }
    if let Some(port) = job.port {
        let _ = writeln!(text, "# The port of rank 0, on the first node.\nexport DISTRIBUTE_PORT={port}");
    }
    if job.program.has_records() {
        text.push_str(
            "# A job that is requeued keeps its number, and the register's records are those of one start.\n\
             export DISTRIBUTE_JOB_ID=\"slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}\"\n",
        );
    }
    let cpus = job.resources.cpus.and_then(|cpus| cpus.whole());
    let cpus = cpus.map_or_else(String::new, |cpus| format!(" --cpus-per-task={cpus}"));
    let program = job.program.program.iter().map(|part| quoted(part)).collect::<Result<Vec<_>, _>>()?.join(" ");
    let restarts = job.restarts.restarts;
    let _ = write!(
        text,
        r#"# A task that fails ends the others itself, with an exit code of the same kind. If srun killed them,
# its own exit code, the highest of all, would be that of the signal.
{note}srun --kill-on-bad-exit=0{cpus} -- {program}
code=$?

# From 128 on a restart helps: 138 after the loss of another task, 143 when told to stop.
if [ "$code" -ge 128 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    echo "exit code $code: requeued" >&2
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
"#,
        note = if cpus.is_empty() { "" } else { "# srun does not inherit the number of CPUs from sbatch.\n" },
    );
    Ok(text)
}

/// Returns the options of sbatch. Their values are numbers or of letters that need no quotes.
fn options(job: &Slurm) -> Result<Vec<(&'static str, Cow<'static, str>)>, Error> {
    let number = |number: u32| Cow::Owned(number.to_string());
    let mut options = vec![
        ("job-name", Cow::Owned(job.program.name.to_string())),
        ("nodes", number(job.program.workers / job.tasks_per_node)),
        ("ntasks", number(job.program.workers)),
        ("ntasks-per-node", number(job.tasks_per_node)),
    ];
    if let Some(cpus) = job.resources.cpus {
        let whole = cpus.whole().ok_or_else(|| Error::Manifest {
            problem: "Slurm gives whole CPUs to tasks".into(),
            given: format!("--cpus {cpus}"),
            expected: "a whole number".into(),
            remedy: "round it up".into(),
        })?;
        options.push(("cpus-per-task", number(whole)));
    }
    if let Some(memory) = job.resources.memory {
        let node = memory.times(job.tasks_per_node).ok_or_else(|| Error::Manifest {
            problem: "a node does not have as much memory".into(),
            given: format!("--memory {memory} --tasks-per-node {}", job.tasks_per_node),
            expected: "less than 16 EiB together".into(),
            remedy: "give less --memory".into(),
        })?;
        options.push(("mem", Cow::Owned(format!("{}M", node.mebibytes()))));
    }
    if job.resources.gpus > 0 {
        options.push(("gpus-per-task", number(job.resources.gpus)));
    }
    let time = job.time_limit.map(|limit| ("time", Cow::Owned(limit.slurm())));
    let partition = job.partition.as_ref().map(|name| ("partition", Cow::Owned(name.0.clone())));
    let account = job.account.as_ref().map(|name| ("account", Cow::Owned(name.0.clone())));
    options.extend(time.into_iter().chain(partition).chain(account));
    options.push(("signal", Cow::Owned(format!("TERM@{}", job.grace))));
    options.push(("open-mode", Cow::Borrowed("append")));
    Ok(options)
}

/// Returns a text as one argument for the shell.
fn quoted(text: &str) -> Result<Cow<'_, str>, Error> {
    shlex::try_quote(text).map_err(|_| Error::Manifest {
        problem: "no shell can pass a zero byte".into(),
        given: text.escape_debug().to_string(),
        expected: "text without zero bytes".into(),
        remedy: "leave it out".into(),
    })
}
