//! Short runs of the examples that are transformers, under every arrangement of replicas, and of what they share.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use distribute_testkit::{JobBuilder, Outcome, Ports};

use crate::examples::{DEADLINE, TWO, example, numbers, run};

#[path = "../../examples/shared/beam.rs"]
mod beam;
#[path = "../../examples/shared/pairs.rs"]
#[expect(dead_code, reason = "tests use a part of it")]
mod pairs;
#[path = "../../examples/shared/word_pieces.rs"]
#[expect(dead_code, reason = "tests use a part of it")]
mod word_pieces;

/// Two workers, with a TF_CONFIG.
fn workers(job: JobBuilder) -> JobBuilder {
    let addresses = Ports::reserve(2).unwrap().addresses();
    job.tasks(2).task_env(move |rank| {
        let task = format!(r#"{{"type": "worker", "index": {rank}}}"#);
        vec![("TF_CONFIG".to_owned(), format!(r#"{{"cluster": {{"worker": {addresses:?}}}, "task": {task}}}"#))]
    })
}

/// Runs an example on one device, on two replicas of a process, and as two workers; returns what their chiefs printed.
fn everywhere(name: &str, args: &[&str]) -> [Outcome; 3] {
    let two = run(example(name, args).args(["--devices", TWO])).remove(0);
    [run(example(name, args)).remove(0), two, run(workers(example(name, args))).remove(0)]
}

#[track_caller]
fn near(one: &[f64], other: &[f64], tolerance: f64) {
    let is_near = one.len() == other.len() && one.iter().zip(other).all(|(a, b)| (a - b).abs() <= tolerance);
    assert!(is_near, "{one:?} {other:?}");
}

const SMALL: [&str; 8] = ["--width", "16", "--heads", "2", "--layers", "1", "--batch", "16"];

#[test]
fn seq2seq_learns_the_same_on_one_device_two_replicas_and_two_workers() {
    let brief = ["--dates", "600", "--held-out", "40", "--epochs", "1", "--steps", "20", "--warm-up", "20"];
    let [one, two, workers] = everywhere("seq2seq", &[&SMALL[..], &brief, &["--samples", "3"]].concat());
    let loss = |outcome| numbers(outcome, "held-out loss");
    near(&loss(&one), &loss(&two), 2e-4);
    near(&loss(&two), &loss(&workers), 0.0);
    // By guessing among ten digits and a dash: ln 11.
    assert!(loss(&one)[0] < 2.39, "{one:?}");
    assert!(one.stdout.contains("% of 40 pairs"), "{one:?}");
    assert_eq!(one.stdout.matches(" → ").count(), 3, "{one:?}");
}

#[test]
fn seq2seq_translates_pairs_of_a_file_and_writes_the_same_without_a_cache() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pairs.tsv");
    let words = [("one", "eins"), ("two", "zwei"), ("three", "drei"), ("four", "vier"), ("five", "fünf")];
    let mut lines = String::new();
    for ((a, x), (b, y)) in words.iter().flat_map(|a| words.iter().map(move |b| (a, b))) {
        for (c, z) in words {
            lines += &format!("{a} {b}, {c}!\t{x} {y}, {z}!\ta third column\n");
        }
    }
    fs::write(&path, &lines).unwrap();
    let brief = ["--held-out", "12", "--epochs", "40", "--warm-up", "60", "--learning-rate", "0.4", "--beam", "3"];
    let args =
        [&SMALL[..], &brief, &["--smoothing", "0", "--samples", "12", "--pairs", path.to_str().unwrap()]].concat();
    let [cached, computed] = [&[][..], &["--no-cache"]].map(|more| run(example("seq2seq", &args).args(more)).remove(0));
    let written = |outcome: &Outcome| outcome.stdout.split("\n\n").nth(1).unwrap().to_owned();
    assert_eq!(written(&cached), written(&computed));
    assert!(written(&cached).contains(" , "), "{cached:?}");
    assert!(numbers(&cached, "exact matches")[0] > 80.0, "{cached:?}");
    assert!(cached.stdout.contains("pairs: 113 to train on, 12 held out; 0 "), "{cached:?}");

    let few = [&args[..6], &args[8..], &["--batch", "200"]].concat();
    let refused = example("seq2seq", &few).start().unwrap().wait(0, DEADLINE).unwrap();
    let words = ["113 pairs", "--batch 200", "--held-out", "--length"];
    assert!(refused.code == Some(1) && words.iter().all(|word| refused.stderr.contains(word)), "{refused:?}");
    fs::write(&path, "a line without a tab\n").unwrap();
    let refused = example("seq2seq", &args).start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(refused.code == Some(1) && refused.stderr.contains("line 1 has no tab"), "{refused:?}");
}

/// Writes three pages, each with words of its own among those of all.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let words = ["the ring sends parts", "a server keeps rows", "this lamp burns oil"].map(|page| page.split(' '));
    let write = |(number, words): (usize, std::str::Split<'_, char>)| {
        let words: Vec<&str> = words.chain(["and", "then", "it", "stops", "."]).collect();
        let text: Vec<&str> = (0..600usize).map(|at| words[(at * at + at / 7 + number) % words.len()]).collect();
        let path = folder.join(format!("page{number}.txt"));
        fs::write(&path, text.join(" ")).unwrap();
        path
    };
    words.into_iter().enumerate().map(write).collect()
}

#[test]
fn bert_learns_the_same_everywhere_and_its_checkpoint_has_the_names_of_hugging_face() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let texts = pages(folder.path());
    let texts: Vec<&str> = texts.iter().map(|path| path.to_str().unwrap()).collect();
    let brief = ["--length", "12", "--steps", "20", "--classes", "3", "--examples", "6", "--epochs", "2"];
    let args = [&SMALL[..], &brief, &["--text"], &texts].concat();
    let saved = path("model.safetensors");
    let plain = [&args[..], &["--dropout", "0", "--save", &saved]].concat();
    let [one, two, workers] = everywhere("bert", &plain);
    let losses = |outcome: &Outcome| {
        ["pre-training: loss", "from scratch", "from the checkpoint"].map(|label| numbers(outcome, label)).concat()
    };
    assert_eq!(losses(&one).len(), 6, "{one:?}");
    near(&losses(&one), &losses(&two), 0.02);
    near(&losses(&two), &losses(&workers), 0.0);

    let names = names(Path::new(&saved));
    for name in [
        "bert.embeddings.word_embeddings.weight",
        "bert.embeddings.position_embeddings.weight",
        "bert.embeddings.token_type_embeddings.weight",
        "bert.embeddings.LayerNorm.weight",
        "bert.encoder.layer.0.attention.self.query.weight",
        "bert.encoder.layer.0.attention.self.key.bias",
        "bert.encoder.layer.0.attention.self.value.weight",
        "bert.encoder.layer.0.attention.output.dense.weight",
        "bert.encoder.layer.0.attention.output.LayerNorm.bias",
        "bert.encoder.layer.0.intermediate.dense.weight",
        "bert.encoder.layer.0.output.dense.bias",
        "bert.encoder.layer.0.output.LayerNorm.weight",
        "bert.pooler.dense.weight",
        "cls.predictions.bias",
        "cls.predictions.transform.dense.weight",
        "cls.predictions.transform.LayerNorm.bias",
        "cls.seq_relationship.weight",
    ] {
        assert!(names.contains_key(name), "{name} is not in {names:?}");
    }
    assert_eq!(names.len(), 3 + 2 + 16 + 2 + 1 + 4 + 2, "{names:?}");

    let config: serde_json::Value = serde_json::from_slice(&fs::read(path("config.json")).unwrap()).unwrap();
    for (key, value) in [("num_hidden_layers", 1), ("num_attention_heads", 2), ("hidden_size", 16)] {
        assert_eq!(config[key], value, "{config}");
    }
    assert_eq!(config["hidden_act"], "gelu");

    // A checkpoint of old, whose normalisations have the names that TensorFlow gave them, and one of the encoder alone.
    let (older, encoder, vocabulary) = (path("older.safetensors"), path("encoder.safetensors"), path("vocab.txt"));
    rename(&saved, &older, &[("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")]);
    rename(&saved, &encoder, &[("\"bert.", "\"")]);
    for file in [&older, &encoder] {
        let load = [&args[..], &["--dropout", "0", "--vocabulary", &vocabulary, "--load", file]].concat();
        let loaded = run(example("bert", &load)).remove(0);
        assert!(!loaded.stdout.contains("pre-training"), "{loaded:?}");
        let tuned = numbers(&loaded, "from the checkpoint");
        near(&tuned, &numbers(&one, "from the checkpoint"), 0.02);
    }
}

#[test]
fn checkpoints_of_another_bert_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let texts = pages(folder.path());
    let texts: Vec<&str> = texts.iter().map(|path| path.to_str().unwrap()).collect();
    let (saved, vocabulary, config) = (path("model.safetensors"), path("vocab.txt"), path("config.json"));
    let brief = "--width 16 --batch 16 --length 12 --steps 1 --classes 3 --examples 2 --epochs 1".split(' ');
    let args: Vec<&str> = brief.chain(["--text"]).chain(texts).collect();
    run(example("bert", &args).args(["--heads", "2", "--layers", "1", "--save", &saved]));
    let outcome = |flags: &str| {
        let load = ["--vocabulary", &vocabulary, "--load", &saved];
        let job = example("bert", &args).args(load).args(flags.split_whitespace());
        job.start().unwrap().wait(0, DEADLINE).unwrap()
    };
    let refused = |flags: &str, words: &[&str]| {
        let outcome = outcome(flags);
        let says = words.iter().all(|word| outcome.stderr.contains(word));
        assert!(outcome.code == Some(1) && says && outcome.stdout.is_empty(), "{flags} {words:?}: {outcome:?}");
    };
    refused("--layers 1", &["config.json", "num_attention_heads is 2", "give --heads 2"]);
    refused("--layers 2 --heads 2", &["config.json", "num_hidden_layers is 1", "give --layers 1"]);
    assert!(outcome("--layers 1 --heads 2").success());
    let other = fs::read_to_string(&config).unwrap().replace("\"gelu\"", "\"relu\"");
    fs::write(&config, other).unwrap();
    refused("--layers 1 --heads 2", &["hidden_act is \"relu\""]);
    // Names tell the number of layers, but no shape the number of heads.
    fs::remove_file(&config).unwrap();
    refused("--layers 1", &["config.json", "give --heads"]);
    for layers in [0, 2] {
        refused(&format!("--heads 2 --layers {layers}"), &["model.safetensors", "give --layers 1"]);
    }
    assert!(outcome("--layers 1 --heads 2").success());
}

#[test]
fn dropout_of_bert_differs_between_replicas_and_not_between_processes() {
    let folder = tempfile::tempdir().unwrap();
    let texts = pages(folder.path());
    let texts: Vec<&str> = texts.iter().map(|path| path.to_str().unwrap()).collect();
    let brief = ["--length", "12", "--steps", "8", "--classes", "3", "--examples", "2", "--epochs", "1"];
    let args = [&SMALL[..], &brief, &["--dropout", "0.3", "--text"], &texts].concat();
    let [one, two, workers] = everywhere("bert", &args).map(|outcome| outcome.stdout);
    assert_eq!(two, workers);
    assert_ne!(one, two);
}

/// Returns the header of a safetensors file, by the names of its tensors.
fn names(path: &Path) -> BTreeMap<String, serde_json::Value> {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut names: BTreeMap<String, serde_json::Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    names.remove("__metadata__");
    names
}

/// Copies a safetensors file with other names.
fn rename(from: &str, to: &str, names: &[(&str, &str)]) {
    let bytes = fs::read(from).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + length]).unwrap().to_owned();
    let header = names.iter().fold(header, |header, (old, new)| header.replace(old, new));
    // Tensors begin at a multiple of eight bytes.
    let header = format!("{header:width$}", width = header.len().next_multiple_of(8));
    fs::write(to, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[8 + length..]].concat()).unwrap();
}

/// A decoder whose next token depends on the two before it, by a table.
struct Table(Vec<[u32; 2]>);

const TOKENS: usize = 4;
const END: u32 = 0;

fn log_probability([before, last]: [u32; 2], next: u32) -> f32 {
    let weight = |token: u32| 1.0 + f32::from((before * 7 + last * 5 + token * 3 + before * last * token) as u16 % 11);
    (weight(next) / (0..TOKENS as u32).map(weight).sum::<f32>()).ln()
}

impl beam::Decoder for Table {
    fn step(&mut self, tokens: &[u32]) -> candle_core::Result<Vec<Vec<f32>>> {
        self.0.iter_mut().zip(tokens).for_each(|(row, token)| *row = [row[1], *token]);
        let all = |row: &[u32; 2]| (0..TOKENS as u32).map(|token| log_probability(*row, token)).collect();
        Ok(self.0.iter().map(all).collect())
    }

    fn reorder(&mut self, rows: &[u32]) -> candle_core::Result<()> {
        self.0 = rows.iter().map(|row| self.0[*row as usize]).collect();
        Ok(())
    }
}

/// Returns the best of all sequences of up to `length` tokens that end, or have this length.
fn best(begin: u32, length: usize) -> Vec<u32> {
    let (mut best, mut rest) = ((f32::NEG_INFINITY, Vec::new()), vec![(0.0, vec![begin, begin])]);
    while let Some((log, tokens)) = rest.pop() {
        let count = tokens.len() - 2;
        if count == length || (count > 0 && tokens.last() == Some(&END)) {
            let score = log / ((5.0 + count as f32) / 6.0).powf(0.6);
            if score > best.0 {
                best = (score, tokens[2..].iter().copied().filter(|token| *token != END).collect());
            }
            continue;
        }
        let last = [tokens[count], tokens[count + 1]];
        let longer = |next| (log + log_probability(last, next), [&tokens[..], &[next]].concat());
        rest.extend((0..TOKENS as u32).map(longer));
    }
    best.1
}

#[test]
fn a_wide_beam_finds_what_a_search_of_all_sequences_finds() {
    for begin in 1..TOKENS as u32 {
        let search = |beam| {
            let search = beam::Search { beam, length: 4, begin, end: END };
            search.run(2, &mut Table(vec![[begin; 2]; 2 * beam])).unwrap()
        };
        let widest = search(TOKENS.pow(4));
        assert_eq!(widest, [best(begin, 4), best(begin, 4)]);
        let greedy = search(1);
        let mut row = [begin; 2];
        for token in &greedy[0] {
            let of = |token: &u32| log_probability(row, *token);
            let likeliest = (0..TOKENS as u32).max_by(|a, b| of(a).total_cmp(&of(b))).unwrap();
            assert_eq!(*token, likeliest);
            row = [row[1], *token];
        }
    }
}

#[test]
fn dates_are_written_in_ten_forms_with_their_weekdays() {
    let weekdays = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
    let mut long_ones = 0;
    for (written, iso) in pairs::dates(3000, 1) {
        let [year, month, day] = [&iso[..4], &iso[5..7], &iso[8..]].map(|number| number.parse::<usize>().unwrap());
        assert!((1950..2050).contains(&year), "{iso}");
        assert!(
            written.contains(&format!("{:02}", year % 100)) && written.contains(&day.to_string()),
            "{written} {iso}"
        );
        if let Some(weekday) = weekdays.iter().position(|weekday| written.starts_with(weekday)) {
            // January 1, 1950 was a Sunday.
            let february = if year.is_multiple_of(4) { 29 } else { 28 };
            let months = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
            let years = 365 * (year - 1950) + (1950..year).filter(|year| year.is_multiple_of(4)).count();
            let days = years + months[..month - 1].iter().sum::<usize>() + day - 1;
            assert!(day <= months[month - 1] && weekday == days % 7, "{written} {iso}");
            long_ones += 1;
        }
    }
    assert!(long_ones > 200, "{long_ones}");
}

#[test]
fn words_are_divided_into_the_longest_pieces() {
    let texts = ["Sharded shards, sharded!".to_owned(), "a shard".to_owned()];
    let pieces = word_pieces::WordPieces::new(&texts, 24).unwrap();
    let folder = tempfile::tempdir().unwrap();
    pieces.write(&folder.path().join("vocab.txt")).unwrap();
    let again = word_pieces::WordPieces::read(&folder.path().join("vocab.txt")).unwrap();
    assert_eq!(again.len(), pieces.len());
    let vocabulary = fs::read_to_string(folder.path().join("vocab.txt")).unwrap();
    let vocabulary: Vec<&str> = vocabulary.lines().collect();
    let read =
        |text: &str| -> Vec<&str> { again.encode(text).into_iter().map(|token| vocabulary[token as usize]).collect() };
    assert_eq!(read("SHARDED, shades: a"), ["sharded", ",", "s", "##h", "##a", "##d", "##e", "##s", "[UNK]", "a"]);
}

#[test]
fn texts_are_divided_into_the_words_of_bert() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vocab.txt");
    let read = |words: &[&str], text: &str| -> Vec<String> {
        let vocabulary = [&["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], words].concat();
        fs::write(&path, vocabulary.join("\n")).unwrap();
        let tokens = word_pieces::WordPieces::read(&path).unwrap().encode(text);
        tokens.into_iter().map(|token| vocabulary[token as usize].to_owned()).collect()
    };
    // The blackboard letter has no lower case, and is in published vocabularies without upper case.
    let uncased = ["cafe", "paris", "a", "b", "ab", "中", "文", "5", "##€", "+", "_", "ℝ"];
    assert_eq!(read(&uncased, "Café CAFE\u{301} PARIS"), ["cafe", "cafe", "paris"]);
    assert_eq!(read(&uncased, "a中文b"), ["a", "中", "文", "b"]);
    // A byte order mark, a soft hyphen, a form feed, and the replacement character.
    assert_eq!(read(&uncased, "\u{feff}a\u{ad}b a\u{c}b a\u{fffd}b"), ["ab", "ab", "ab"]);
    assert_eq!(read(&uncased, "a\tb\nb\ra\u{2009}b"), ["a", "b", "b", "a", "b"]);
    // ASCII's symbols are punctuation, others are parts of words.
    assert_eq!(read(&uncased, "5€ a+b_a"), ["5", "##€", "a", "+", "b", "_", "a"]);
    let cased = ["Paris", "paris", "Café", "cafe", "Cafe"];
    assert_eq!(read(&cased, "Paris paris PARIS Café"), ["Paris", "paris", "[UNK]", "Café"]);
}
