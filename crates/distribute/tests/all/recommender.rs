//! The example ncf: the same in every arrangement, on servers, and from a file of ratings.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;

use candle_core::Tensor;
use clap::Parser;
use distribute::input::Dataset;
use distribute_testkit::{Job, Outcome, Ports, target_binary};

use super::examples::{DEADLINE, example, in_every_arrangement, numbers, run};

#[path = "../../examples/ncf/interactions.rs"]
#[expect(dead_code, reason = "tests use a part of it")]
mod interactions;

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

/// The choice of interactions, as a user makes it.
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    source: interactions::Source,
}

#[test]
fn an_item_to_predict_is_drawn_as_a_negative_in_training_and_what_was_learnt_from_never() {
    let interactions = Arc::new(Flags::parse_from(["ncf", "--users", "20", "--items", "200"]).source.read().unwrap());
    // The user of each row, the item that they have met, and the negatives.
    let rows = |data: &Dataset<(Tensor, Tensor)>| -> Vec<(u32, u32, Vec<u32>)> {
        let rows = data.iter().flat_map(|batch| {
            let (users, items) = batch.unwrap();
            users.to_vec1::<u32>().unwrap().into_iter().zip(items.to_vec2::<u32>().unwrap())
        });
        rows.map(|(user, items)| (user, items[0], items[1..].to_vec())).collect()
    };
    let data = interactions.train(128, 1).unwrap();
    let train: Vec<_> = (0..20).flat_map(|_| rows(&data)).collect();
    let test = rows(&interactions.test().unwrap());
    assert_eq!(test.len(), 20);
    for (user, item, others) in test {
        let of_user = || train.iter().filter(|(other, ..)| *other == user);
        let learnt: BTreeSet<u32> = of_user().map(|(_, item, _)| *item).collect();
        let negatives: BTreeSet<u32> = of_user().flat_map(|(_, _, others)| others).copied().collect();
        assert!(negatives.is_disjoint(&learnt), "user {user}");
        assert!(!learnt.contains(&item) && negatives.contains(&item), "user {user}: {item} is told apart by training");
        assert!(others.iter().all(|other| *other != item && !learnt.contains(other)), "user {user}");
    }
}

#[test]
fn scores_that_are_not_numbers_are_no_hits() {
    let args = ["--users", "60", "--items", "200", "--epochs", "1", "--learning-rate", "1e30"];
    assert_eq!(numbers(&run(example("ncf", &args))[0], QUALITY), [0.0, 0.0]);
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
