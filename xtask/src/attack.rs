//! `cargo xtask attack`: attacks on the examples `mnist`, `parameter_server` and `elastic`, as real processes on
//! loopback.

mod checkpoints;
mod containers;
mod elastic;
mod environment;
mod jobs;
mod kills;
mod servers;
mod settings;
mod stage;
mod strangers;
mod verdict;

use std::time::{Duration, Instant};

use clap::Args;

use stage::Stage;
use verdict::{Held, Verdict};

use crate::examples::Profile;

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Runs only attacks whose names contain this.
    #[arg(long)]
    only: Option<String>,
    /// Prints the attacks' names and what they do, and runs none.
    #[arg(long)]
    list: bool,
    /// Which build of the examples is attacked; it is made first.
    #[arg(long, value_enum, default_value = "release")]
    profile: Profile,
    /// Attacks the examples as they lie in the target folder, without building them.
    #[arg(long)]
    no_build: bool,
    /// Seed of the moments at which processes are killed; printed, so that a run can be repeated.
    #[arg(long)]
    seed: Option<u64>,
}

/// One attack. It returns what was seen where all it expects holds, and else what did not.
struct Attack {
    name: &'static str,
    what: &'static str,
    /// Seconds within which it must be over, with the release build.
    bound_s: u64,
    run: fn(&Stage) -> Verdict,
}

const fn attack(name: &'static str, bound_s: u64, run: fn(&Stage) -> Verdict, what: &'static str) -> Attack {
    Attack { name, what, bound_s, run }
}

const ATTACKS: &[Attack] = &[
    attack("containers-alone", 20, containers::alone, "4 workers, each process 1 of its pid namespace"),
    attack("containers-ring", 20, containers::ring, "2 pid namespaces with 3 ranks in turns, and a ring"),
    attack("option-algorithm", 10, settings::algorithm, "DISTRIBUTE_ALGORITHM differs between workers"),
    attack("option-link", 10, settings::link, "DISTRIBUTE_LINK differs between workers"),
    attack("option-transport", 10, settings::transport, "DISTRIBUTE_TRANSPORT differs between workers"),
    attack("setting-model", 10, settings::model, "another model on one worker"),
    attack("setting-learning-rate", 15, settings::learning_rate, "another learning rate on one worker"),
    attack("setting-batch", 15, settings::batch, "another batch on one worker"),
    attack("setting-seed", 15, settings::seed, "another seed on one worker"),
    attack("setting-epochs", 15, settings::epochs, "more epochs on one worker"),
    attack("setting-compress", 15, settings::compress, "compressed gradients on one worker"),
    attack("setting-zero1", 15, settings::zero1, "optimizer state in parts on one worker"),
    attack("environment-not-utf8", 5, environment::not_utf8, "TF_CONFIG is not UTF-8"),
    attack("environment-no-workers", 5, environment::no_workers, "TF_CONFIG has an empty worker list"),
    attack("environment-repeated-key", 5, environment::repeated_key, "TF_CONFIG has a key twice"),
    attack("environment-index", 5, environment::index, "TF_CONFIG has a task index that is none"),
    attack("environment-many-tasks", 5, environment::many_tasks, "TF_CONFIG of all tasks that a variable can hold"),
    attack("environment-transport", 5, environment::transport, "DISTRIBUTE_TRANSPORT has a typo"),
    attack("strangers", 20, strangers::training, "silence, HTTP, zeros and half a TLS hello at the leader's port"),
    attack("descriptors", 30, strangers::descriptors, "a leader with 64 file descriptors, and 80 silent strangers"),
    attack("two-jobs", 20, jobs::two, "a worker of another job at the leader's port"),
    attack("kill-worker", 15, kills::worker, "SIGKILL of a worker within an epoch"),
    attack("kill-chief", 15, kills::chief, "SIGKILL of the chief within an epoch"),
    attack("stop-worker", 20, kills::stopped, "SIGSTOP of a worker, with a deadline of 4 s"),
    attack(
        "elastic-killed",
        90,
        elastic::killed,
        "SIGKILL of one of 4 elastic workers every 2 s, the chief among them",
    ),
    attack("elastic-frozen", 90, elastic::frozen, "SIGKILL and SIGSTOP of elastic workers in turns"),
    attack("checkpoints-of-two-runs", 15, checkpoints::two_runs, "a folder with higher steps of another run"),
    attack("kill-saving", 25, checkpoints::killed, "SIGKILL while checkpoints are written, three times"),
    attack("disk-full", 10, checkpoints::full, "checkpoints on a file system of 1 MiB"),
    attack("disk-read-only", 10, checkpoints::read_only, "checkpoints on a read-only file system"),
    attack("servers-strangers", 20, servers::strangers, "garbage, silence and raw Attend calls at all tasks' ports"),
    attack("servers-other-job", 20, servers::other_job, "a chief of another job attends the servers"),
    attack("servers-killed", 20, servers::killed, "SIGKILL of a parameter server; it and the chief are started again"),
];

/// Builds what is attacked, runs the attacks one after another, and prints a table of how they ended.
pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let chosen: Vec<&Attack> =
        ATTACKS.iter().filter(|attack| flags.only.as_ref().is_none_or(|part| attack.name.contains(part))).collect();
    if chosen.is_empty() {
        let only = flags.only.as_deref().unwrap_or_default();
        return Err(format!("no attack's name contains {only:?}; cargo xtask attack --list shows all names"));
    }
    if flags.list {
        chosen.iter().for_each(|attack| println!("{:<26} {}", attack.name, attack.what));
        return Ok(());
    }
    let names = ["mnist", "parameter_server", "elastic"];
    let programs = flags.profile.examples(&names, "full", flags.no_build)?;
    let seed = flags.seed.unwrap_or_else(seed_of_now);
    println!("seed {seed}");
    println!("{:<26} | {:<7} | {:>7} | {:>5}", "attack", "result", "time", "bound");
    let mut failed = Vec::new();
    let began = Instant::now();
    for attack in &chosen {
        // What is not optimised takes longer; promises of time are measured within the attacks and stay as they are.
        let bound = Duration::from_secs(attack.bound_s) * if flags.profile == Profile::Dev { 3 } else { 1 };
        let (verdict, took) = on_its_own_thread(attack.run, Stage::new(programs.clone(), bound, seed)?);
        let (result, words) = match verdict {
            Ok(Held::Skipped(why)) => ("skipped", why),
            Ok(Held::Yes(seen)) if took <= bound => ("held", seen),
            Ok(Held::Yes(seen)) => ("FAILED", format!("it took longer than its bound; else: {seen}")),
            Err(problem) => ("FAILED", problem),
        };
        let (took, bound) = (took.as_secs_f64(), bound.as_secs());
        println!("{:<26} | {result:<7} | {took:>5.1} s | {bound:>3} s", attack.name);
        println!("    {}", words.trim().replace('\n', "\n    "));
        if result == "FAILED" {
            failed.push(attack.name);
        }
    }
    println!("{} attacks in {:.0} s, {} failed", chosen.len(), began.elapsed().as_secs_f64(), failed.len());
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("these attacks did not end as they must: {}", failed.join(", "))),
    }
}

/// Processes end with the thread that starts them, and a panic ends no more than one attack.
fn on_its_own_thread(run: fn(&Stage) -> Verdict, stage: Stage) -> (Verdict, Duration) {
    let began = Instant::now();
    let verdict = std::thread::scope(|scope| scope.spawn(move || run(&stage)).join());
    let verdict = verdict.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("the attack panicked").to_owned())
    });
    (verdict, began.elapsed())
}

fn seed_of_now() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(1, |since| since.as_millis() as u64)
}
