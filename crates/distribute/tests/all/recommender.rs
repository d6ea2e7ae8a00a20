//! The example ncf: the same in every arrangement, on servers, and from a file of ratings.

use std::fs;

use distribute_testkit::{Job, Outcome, Ports, target_binary};

use super::examples::{DEADLINE, example, in_every_arrangement, numbers};

const QUALITY: &str = "hit rate and NDCG at 10";

#[test]
fn a_recommender_learns_the_same_in_every_arrangement() {
    let args = ["--users", "60", "--items", "200", "--epochs", "3", "--batch", "128"];
    let [one, two, workers] = in_every_arrangement("ncf", &args);
    let losses = |outcome: &Outcome| -> Vec<f64> {
        outcome.stderr.split("loss=").skip(1).map(|rest| rest.split(' ').next().unwrap().parse().unwrap()).collect()
    };
    let (of_one, of_two) = (losses(&one), losses(&two));
    assert!(of_one.len() == 3 && of_one[2] < of_one[0], "{of_one:?}");
    assert!(of_one.iter().zip(&of_two).all(|(one, two)| (one - two).abs() < 1e-3), "{of_one:?} {of_two:?}");
    assert_eq!(of_two, losses(&workers));
    assert_eq!(numbers(&two, QUALITY), numbers(&workers, QUALITY));
}

#[test]
fn a_recommender_learns_on_servers() {
    const TASKS: [&str; 3] = ["chief", "ps", "worker"];
    let ports = Ports::reserve(TASKS.len()).unwrap();
    let addresses = ports.addresses();
    drop(ports);
    let config = move |rank: u32| {
        let of = |task: usize| format!("{:?}: [{:?}]", TASKS[task], addresses[task]);
        let cluster = format!("{{{}, {}, {}}}", of(0), of(1), of(2));
        let task = format!(r#"{{"type": "{}", "index": 0}}"#, TASKS[rank as usize]);
        vec![("TF_CONFIG".to_owned(), format!(r#"{{"cluster": {cluster}, "task": {task}}}"#))]
    };
    let job = Job::builder(target_binary("ncf").unwrap()).env("RAYON_NUM_THREADS", "1").tasks(3).task_env(config);
    let args = ["--sharded", "--users", "120", "--items", "200", "--epochs", "12", "--learning-rate", "0.01"];
    let outcomes = job.args(args).start().unwrap().wait_all(DEADLINE).unwrap();
    assert!(outcomes.iter().all(Outcome::success), "{outcomes:?}");
    // At random a tenth of all lists of ten have the one of a hundred.
    let (learnt, popularity) = (numbers(&outcomes[0], QUALITY)[0], numbers(&outcomes[0], "by popularity alone")[0]);
    assert!(learnt > popularity + 5.0, "{outcomes:?}");
}

#[test]
fn ratings_are_read_and_what_is_none_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("u.data");
    // Ids from 1, in no order, and a rating that occurs twice.
    let rating = |at: u32| format!("{}\t{}\t{}\t{}\n", 1 + at % 8, 1 + at * 7 % 150, 1 + at % 5, 900_000_000 - at);
    let ratings: String = (0..300).chain([5]).map(rating).collect();
    fs::write(&path, &ratings).unwrap();
    let args = ["--epochs", "1", "--ratings", path.to_str().unwrap()];
    let ended = || example("ncf", &args).start().unwrap().wait(0, DEADLINE).unwrap();
    let read = ended();
    assert!(read.success() && read.stderr.contains("8 users · 150 items"), "{read:?}");
    for (contents, words) in [
        (format!("{ratings}1\t2\n"), "u.data"),
        ("1\t1\t5\t1\n1\t2\t5\t2\n".to_owned(), "99 items that a user has not rated"),
    ] {
        fs::write(&path, contents).unwrap();
        let refused = ended();
        assert!(refused.code == Some(1) && refused.stderr.contains(words), "{words}: {refused:?}");
    }
}
