//! Short runs of the examples, as users start them. They are in the target folder; see `tests/mnist.rs`.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use distribute_testkit::{Job, JobBuilder, Outcome, Ports, Signal, target_binary};

pub(crate) const DEADLINE: Duration = Duration::from_secs(120);
pub(crate) const TWO: &str = "CPU:0,CPU:1";

pub(crate) fn example(name: &str, args: &[&str]) -> JobBuilder {
    Job::builder(target_binary(name).unwrap()).args(args).env("RAYON_NUM_THREADS", "1")
}

/// Runs a job to its end; returns what each task printed.
#[track_caller]
pub(crate) fn run(job: JobBuilder) -> Vec<Outcome> {
    let outcomes = job.start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(outcomes.iter().all(Outcome::success), "{outcomes:?}");
    outcomes
}

/// Runs an example on one replica, on two replicas, and as two processes; returns what the first process of each
/// printed.
#[track_caller]
pub(crate) fn in_every_arrangement(name: &str, args: &[&str]) -> [Outcome; 3] {
    let two = [args, &["--devices", TWO]].concat();
    [example(name, args), example(name, &two), two_workers(example(name, args))].map(|job| run(job).remove(0))
}

/// Makes two workers of a job, on free ports.
fn two_workers(job: JobBuilder) -> JobBuilder {
    let addresses = Ports::reserve(2).unwrap().addresses();
    job.tasks(2).task_env(move |rank| {
        let task = format!(r#"{{"type": "worker", "index": {rank}}}"#);
        vec![("TF_CONFIG".to_owned(), format!(r#"{{"cluster": {{"worker": {addresses:?}}}, "task": {task}}}"#))]
    })
}

/// Returns the numbers of the line that begins with `label`.
#[track_caller]
pub(crate) fn numbers(outcome: &Outcome, label: &str) -> Vec<f64> {
    let line = outcome.stdout.lines().find(|line| line.trim_start().starts_with(label));
    let line = line.unwrap_or_else(|| panic!("no {label:?} in {}", outcome.stdout));
    let words = line.trim_start()[label.len()..].split_whitespace();
    words.filter_map(|word| word.trim_matches([',', ':']).parse().ok()).collect()
}

#[test]
fn every_example_prints_its_options_and_refuses_others() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let files = fs::read_dir(examples).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|end| end == "rs"));
    // Of the features that examples need, this program is built with all others.
    let has = |name: &str| match name {
        "data_service" => cfg!(feature = "data-service"),
        "tpu" => cfg!(feature = "pjrt"),
        _ => true,
    };
    let names: Vec<String> = files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/examples.md")).unwrap();
    let missing: Vec<&String> = names.iter().filter(|name| !page.contains(&format!("/{name}.rs)"))).collect();
    assert_eq!(missing, Vec::<&String>::new(), "docs/examples.md");
    let folder = tempfile::tempdir().unwrap();
    for name in names.iter().filter(|name| has(name)) {
        let program = target_binary(name).unwrap();
        let ended = |flag: &str| {
            let command = "cd \"$FOLDER\" && exec \"$0\" \"$1\"";
            let job = Job::builder("sh").args(["-c", command]).arg(&program).arg(flag);
            let mut job = job.env("FOLDER", folder.path().to_str().unwrap()).start().unwrap();
            job.wait(0, DEADLINE).unwrap()
        };
        let printed = ended("--help");
        assert!(printed.success() && printed.stdout.contains("Usage: "), "{name}: {printed:?}");
        let refused = ended("--no-such-flag");
        assert_eq!(refused.code, Some(2), "{name}: {refused:?}");
        assert!(refused.stderr.contains("unexpected argument '--no-such-flag'"), "{name}: {refused:?}");
    }
    assert_eq!(entries(folder.path()), 0, "files are left");
}

#[test]
fn ledger_describes_every_step() {
    let outcomes = run(two_workers(example("ledger", &["--steps", "4", "--pause", "0"])));
    let of = |outcome: &Outcome, begin: &str| outcome.stdout.lines().filter(|line| line.starts_with(begin)).count();
    for outcome in &outcomes {
        assert_eq!(of(outcome, "step "), 4, "{outcome:?}");
        // 48 examples a step.
        assert_eq!(of(outcome, "end 4 examples 192 "), 1, "{outcome:?}");
    }
}

#[test]
fn custom_loop_learns_the_same_on_two_replicas() {
    let [one, two] = ["CPU:0", TWO].map(|devices| run(example("custom_loop", &[devices, "1"])).remove(0));
    for outcome in [&one, &two] {
        assert!(numbers(outcome, "test accuracy")[0] > 85.0, "{outcome:?}");
    }
    let loss = |outcome| *numbers(outcome, "epoch 1").last().unwrap();
    assert!((loss(&one) - loss(&two)).abs() < 1e-3, "{one:?} {two:?}");
}

#[test]
fn the_loss_of_an_epoch_counts_the_examples_of_a_short_batch_once() {
    // Untrained models among ten classes, or of an item that is met or not; the last batch is a fraction of the others.
    let classes = 1.9..3.0;
    for (name, args, label, expected) in [
        ("mnist", "--batch 12000 --learning-rate 0", "loss=", &classes),
        ("densenet", "--size 8 --images 20 --batch 16 --depth 10 --growth 4 --learning-rate 0", "loss=", &classes),
        ("ncf", "--users 20 --items 200 --batch 600 --learning-rate 0", "loss=", &(0.68..0.7)),
        ("mixed_precision", "--images 80", "loss of the last epoch", &classes),
        ("local_sgd", "--images 80 --batch 64 --learning-rate 0", "loss ", &classes),
    ] {
        let args: Vec<&str> = args.split(' ').chain(["--epochs", "1"]).collect();
        let outcome = run(example(name, &args)).remove(0);
        let printed = format!("{}{}", outcome.stdout, outcome.stderr);
        let after = printed.split(label).nth(1).unwrap_or_default();
        let loss = after.split_whitespace().next().and_then(|loss| loss.trim_matches(',').parse::<f64>().ok());
        assert!(loss.is_some_and(|loss| expected.contains(&loss)), "{name}: {loss:?} of {outcome:?}");
    }
}

#[test]
fn keras_mnist_learns_by_fit_and_logs_what_it_needs() {
    let outcome = run(example("keras_mnist", &[TWO])).remove(0);
    // It stops where the loss on the test data no longer falls, in the second epoch at the earliest.
    let row = |line: &str| line.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>().ok();
    let last = outcome.stdout.lines().filter_map(row).rfind(|row| !row.is_empty()).unwrap_or_default();
    assert!(last.len() == 7 && last[0] >= 2.0 && last[5] > 0.93, "{outcome:?}");
    assert!(outcome.stdout.contains("the first ten test digits are"), "{outcome:?}");
    assert!(outcome.stderr.contains("memory of a replica: parameters 397.5 KiB"), "{outcome:?}");
}

#[test]
fn two_models_with_an_optimizer_each_learn_the_same_on_two_replicas() {
    let [one, two] = ["CPU:0", TWO].map(|devices| {
        run(example("gan", &["--devices", devices, "--steps", "40", "--discriminator-steps", "3"])).remove(0)
    });
    let losses = |outcome| numbers(outcome, "step 40");
    let (one, two) = (losses(&one), losses(&two));
    assert_eq!((one.len(), two.len()), (2, 2));
    assert!(one.iter().zip(&two).all(|(one, two)| (one - two).abs() < 1e-3), "{one:?} {two:?}");
    // The discriminator has learnt more than a coin knows.
    assert!(one[0] < 0.6, "{one:?}");
}

#[test]
fn a_strategy_of_ones_own_trains_apart() {
    let args = ["--images", "1000", "--epochs", "2", "--every", "4"];
    let [one, two, workers] = in_every_arrangement("local_sgd", &args);
    // Exchanges, steps, loss and accuracy of each training.
    let lines = |outcome: &Outcome| {
        let lines = outcome.stdout.lines().filter(|line| line.contains("exchanges"));
        let words =
            |line: &str| line.split_whitespace().filter_map(|word| word.trim_matches(',').parse().ok()).collect();
        lines.map(words).collect::<Vec<Vec<f64>>>()
    };
    let (of_one, of_two) = (lines(&one), lines(&two));
    assert_eq!([of_one[0][0], of_one[1][0]], [16.0, 4.0], "{one:?}");
    assert_eq!(of_one[0][2..], of_one[1][2..], "one replica has nobody to be apart from");
    assert!(of_two[1][2] != of_two[0][2] && (of_two[1][2] - of_two[0][2]).abs() < 0.1, "{two:?}");
    assert!((of_one[0][2] - of_two[0][2]).abs() < 1e-3, "{one:?} {two:?}");
    assert_eq!(of_two, lines(&workers));
}

#[test]
fn mnist_compares_batches_and_replicas() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("picture.svg");
    let compare = |args: &[&str]| {
        let outcome =
            run(example("mnist", &["--epochs", "1", "--plot", picture.to_str().unwrap()]).args(args)).remove(0);
        let rows = outcome
            .stdout
            .lines()
            .rev()
            .take(2)
            .map(|line| line.split_whitespace().filter_map(|word| word.parse().ok()).collect::<Vec<f64>>());
        let rows: Vec<Vec<f64>> = rows.collect();
        let drawn = fs::read_to_string(&picture).unwrap();
        assert!(drawn.starts_with("<svg") && drawn.matches("<circle").count() == 4, "{drawn}");
        // What is compared, steps, time, samples/s and accuracy.
        assert!(rows.iter().all(|row| row.len() == 5 && row[4] > 75.0), "{outcome:?}");
        rows.into_iter().rev().map(|row| (row[0], row[1], row[4])).collect::<Vec<_>>()
    };
    let batches = compare(&["--batch-sweep", "--batches", "256,1000"]);
    assert_eq!(batches.iter().map(|row| (row.0, row.1)).collect::<Vec<_>>(), [(256.0, 63.0), (1000.0, 16.0)]);
    assert!(batches[0].2 > batches[1].2, "more steps learn more: {batches:?}");
    let replicas = compare(&["--compare-one-and-many", "--devices", TWO, "--batch", "256"]);
    assert_eq!(replicas.iter().map(|row| (row.0, row.1)).collect::<Vec<_>>(), [(1.0, 63.0), (2.0, 63.0)]);
    assert!((replicas[0].2 - replicas[1].2).abs() < 1.0, "the same global batch learns the same: {replicas:?}");
    let alone = example("mnist", &["--compare-one-and-many"]).start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(alone.code == Some(1) && alone.stderr.contains("give --devices CPU:0,CPU:1"), "{alone:?}");
}

#[test]
fn a_process_of_several_does_not_train_alone() {
    let ranks = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")];
    let vertex = r#"{"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]},
        "task": {"type": "workerpool1", "index": 0}}"#;
    let mirrored = &["--strategy", "mirrored", "--epochs", "1"][..];
    for (args, variables, words) in [
        (
            mirrored,
            &ranks[..],
            "but this one is worker:0 of 2 processes, by RANK and WORLD_SIZE; use MultiWorkerMirrored",
        ),
        (
            mirrored,
            &[("CLUSTER_SPEC", vertex)],
            "MirroredStrategy trains in one process, but this one is worker:0 of 2 processes, by CLUSTER_SPEC",
        ),
        (&["--epochs", "1"], &[("JAX_NUM_PROCESSES", "2")], "JAX_NUM_PROCESSES is set, but JAX_PROCESS_ID is not"),
        (&["--epochs", "1"], &[("PMI_SIZE", "2")], "PMI_SIZE is set, but PMI_RANK is not"),
    ] {
        let job = |more: &[(&str, &str)]| {
            let variables = [variables, more].concat();
            let job = variables.iter().fold(example("mnist", args), |job, (name, value)| job.env(*name, *value));
            job.start().unwrap().wait_all(DEADLINE).unwrap().remove(0)
        };
        let refused = job(&[]);
        assert!(refused.code == Some(2) && refused.stderr.contains(words), "{refused:?}");
        assert!(!refused.stdout.contains("accuracy"), "{refused:?}");
    }
    let alone = example("mnist", mirrored).env("RANK", "0").env("WORLD_SIZE", "2").env("DISTRIBUTE_ALONE", "1");
    assert!(numbers(&run(alone)[0], "test accuracy")[0] > 85.0);
}

#[test]
fn multi_worker_goes_on_from_what_its_chief_has_saved() {
    let folder = tempfile::tempdir().unwrap();
    let job = |epochs: &str| {
        let folder = folder.path().join("checkpoints").to_str().unwrap().to_owned();
        run(two_workers(example("multi_worker", &["--epochs", epochs, "--checkpoints", &folder])))
    };
    let first = job("1");
    assert!(numbers(&first[0], "test accuracy")[0] > 85.0, "{first:?}");
    assert_eq!(numbers(&first[0], "workers"), [2.0]);
    assert_eq!((&*first[1].stdout, &*first[1].stderr), ("", ""), "only the chief speaks");
    let second = job("2");
    assert!(second[0].stderr.contains("resuming after step 125"), "{second:?}");
    assert!(numbers(&second[0], "test accuracy") > numbers(&first[0], "test accuracy"), "{first:?} {second:?}");
}

#[test]
fn multi_worker_alone_trains_and_says_how_to_start_two() {
    let outcome = run(example("multi_worker", &["--epochs", "1", "--devices", TWO])).remove(0);
    assert!(outcome.stderr.contains("distribute run --workers 2"), "{outcome:?}");
    assert!(numbers(&outcome, "test accuracy")[0] > 85.0, "{outcome:?}");
    assert_eq!(numbers(&outcome, "replicas"), [2.0]);
}

#[test]
fn mixed_precision_learns_what_full_precision_does() {
    for devices in ["CPU:0", TWO] {
        let outcome =
            run(example("mixed_precision", &["--devices", devices, "--epochs", "1", "--images", "2000"])).remove(0);
        let losses = numbers(&outcome, "loss of the last epoch");
        assert!(losses.len() == 3 && losses.iter().all(|loss| (loss - losses[0]).abs() < 0.02), "{outcome:?}");
        assert!(numbers(&outcome, "test accuracy").iter().all(|accuracy| *accuracy > 60.0), "{outcome:?}");
        assert_eq!(numbers(&outcome, "variables"), [398.0, 199.0, 199.0]);
    }
}

#[test]
fn transfer_learning_beats_learning_from_scratch() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("body.safetensors");
    let brief = ["--known", "100", "--epochs", "8", "--new-epochs", "20", "--width", "8", "--devices", TWO];
    let outcome = run(example("transfer_learning", &brief).args(["--save", path.to_str().unwrap()])).remove(0);
    let accuracy = |label| numbers(&outcome, label)[0];
    // Four digits, and a short training.
    assert!(accuracy("a new head on the body, frozen") > 33.0, "{outcome:?}");
    assert!(accuracy("all of that trained on, gently") > accuracy("from scratch") + 15.0, "{outcome:?}");
    assert!(path.exists());
}

#[test]
fn char_lm_learns_more_than_frequencies_and_writes_the_same_again() {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/clusters.md");
    let mut brief = vec!["--text", text, "--width", "32", "--layers", "1", "--context", "32", "--sample", "40"];
    brief.extend(["--epochs", "1", "--steps", "50"]);
    let [one, two] =
        ["CPU:0", TWO].map(|devices| run(example("char_lm", &brief).args(["--devices", devices])).remove(0));
    // The sample is longer than a window. What the cache keeps is computed again here.
    let again = run(example("char_lm", &brief).args(["--no-cache"])).remove(0);
    let mesh = ["--devices", "CPU:0,CPU:1,CPU:2,CPU:3", "--tensor-parallel", "2"];
    let meshes = [mesh.to_vec(), [&mesh[..], &["--sharded"]].concat()];
    let [mesh, sharded] = meshes.map(|mesh| run(example("char_lm", &brief).args(mesh)).remove(0));
    assert!(sharded.stderr.contains("FullySharded 2 replicas × 2 tensor ranks"), "{sharded:?}");
    for outcome in [&one, &two, &mesh, &sharded] {
        let (bits, unigram) = (numbers(outcome, "bits per character")[0], numbers(outcome, "by frequency alone")[0]);
        assert!(bits < unigram - 0.2, "{outcome:?}");
    }
    let written = |outcome: &Outcome| outcome.stdout.split("by frequency alone").nth(1).unwrap().to_owned();
    assert_eq!(written(&one), written(&again));
    assert!(written(&one).chars().count() >= 40, "{one:?}");
}

#[test]
fn char_lm_refuses_what_it_cannot_read_in_words() {
    let outcome = example("char_lm", &["--text", "/nowhere"]).start().unwrap().wait(0, DEADLINE).unwrap();
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("/nowhere cannot be read"), "{outcome:?}");
    let folder = tempfile::tempdir().unwrap();
    let short = folder.path().join("short.txt");
    fs::write(&short, "Not much to learn from.").unwrap();
    let outcome = example("char_lm", &["--text", short.to_str().unwrap()]).start().unwrap().wait(0, DEADLINE).unwrap();
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("give more text, or a smaller --context"), "{outcome:?}");
}

#[test]
fn texts_with_fewer_windows_than_a_batch_are_refused() {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/clusters.md");
    for name in ["char_lm", "burn_char_lm", "burn_fsdp_lm"] {
        let args = ["--text", text, "--batch", "100000", "--context", "32"];
        let outcome = example(name, &args).start().unwrap().wait(0, DEADLINE).unwrap();
        let words = ["windows of 33 characters", "100000", "--batch"];
        assert!(outcome.code == Some(1) && words.iter().all(|word| outcome.stderr.contains(word)), "{outcome:?}");
    }
}

#[test]
fn fault_tolerant_ends_as_the_undisturbed_run() {
    let folder = tempfile::tempdir().unwrap();
    let job = example("fault_tolerant", &["--steps", "60", "--kills", "2"]);
    let outcome = run(job.env("TMPDIR", folder.path().to_str().unwrap())).remove(0);
    assert_eq!(outcome.stdout.matches("killed after step").count(), 2, "{outcome:?}");
    assert!(outcome.stdout.contains("60 losses from "), "{outcome:?}");
    assert!(outcome.stdout.contains("equal bit for bit, and so are the models"), "{outcome:?}");
    assert_eq!(entries(folder.path()), 0, "files are left");
}

#[test]
fn fault_tolerant_leaves_nothing_when_it_is_interrupted() {
    let folder = tempfile::tempdir().unwrap();
    let job = example("fault_tolerant", &["--steps", "1000000"]).env("TMPDIR", folder.path().to_str().unwrap());
    let mut job = job.start().unwrap();
    let began = Instant::now();
    // Once it has saved, its worker is in the middle of its training.
    while !fs::read_dir(folder.path()).unwrap().any(|entry| entry.unwrap().path().join("checkpoints/latest").exists()) {
        assert!(began.elapsed() < DEADLINE, "no checkpoint: {:?}", job.printed(0));
        std::thread::sleep(Duration::from_millis(20));
    }
    job.kill(0, Signal::INT).unwrap();
    let outcome = job.wait(0, DEADLINE).unwrap();
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("interrupted"), "{outcome:?}");
    job.family().wait_gone(DEADLINE).unwrap();
    assert_eq!(entries(folder.path()), 0, "files are left");
}

fn entries(folder: &Path) -> usize {
    fs::read_dir(folder).unwrap().count()
}
