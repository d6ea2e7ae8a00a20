//! Texts of users reach the program as they were given, whatever they look like.

use proptest::prelude::*;

use super::kubernetes::{job, job_set, tf_job, train_job};
use super::slurm::Stage;
use super::{compose, document, documents, print};

/// Texts that YAML, Kubernetes, Compose or a shell may read as something else.
const ODD: [&str; 40] = [
    "yes",
    "NO",
    "null",
    "~",
    "1e3",
    "0x10",
    "012",
    "-",
    "--",
    "- a",
    "-n",
    "--epochs",
    ":",
    "a: b",
    "a:b",
    "# c",
    "a #c",
    " a ",
    "",
    "'",
    "\"",
    "\\",
    "a\nb",
    "\n",
    "\t",
    "$HOME",
    "$$",
    "$(RANK)",
    "$(TF_CONFIG)",
    "${A}",
    "`id`",
    "$(id)",
    "*",
    "~root",
    "!x",
    "é",
    "日本🦀",
    "\u{85}\u{2028}\u{feff}",
    "\r\n",
    "{{a}}",
];

/// Returns the programs and the values of A that the tasks of each kind get.
fn passed(program: &[&str], value: &str) -> Vec<(&'static str, Vec<String>, String)> {
    let variable = format!("A={value}");
    let flags = ["--name", "no", "--image", "b", "-n", "2", "--env", &variable];
    let kinds = ["job", "jobset", "tfjob", "trainjob", "compose"];
    kinds
        .into_iter()
        .flat_map(|kind| {
            let file = print(kind, &flags, program);
            let pods = match kind {
                "job" => job(&documents(&file)),
                "jobset" => job_set(&document(&file)),
                "tfjob" => tf_job(&document(&file)),
                "trainjob" => train_job(&document(&file)),
                _ => compose::pods(&document(&file)),
            };
            pods.into_iter().map(move |pod| (kind, pod.command, pod.environment["A"].clone()))
        })
        .collect()
}

#[test]
fn odd_texts_reach_the_program() {
    let program = [&["-c"][..], &ODD].concat();
    for (kind, command, _) in passed(&program, "") {
        assert_eq!(command, program, "{kind}");
    }
    for value in ODD {
        assert!(passed(&["c"], value).iter().all(|(_, _, passed)| passed == value), "{value:?}");
    }
}

#[test]
fn odd_texts_reach_the_program_through_the_shell() {
    let stage = Stage::new();
    for value in ODD {
        let program = [&["c"][..], &ODD].concat();
        let ran = stage.run(&program, &[&format!("A={value}")], 0);
        assert_eq!(ran.arguments, program);
        assert_eq!(ran.value, value);
    }
}

proptest! {
    // Each case starts the program five times.
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_text_reaches_the_program(texts in prop::collection::vec("[^\0]*", 1..4), value in "[^\0]*") {
        let program: Vec<&str> = texts.iter().map(String::as_str).collect();
        for (kind, command, passed) in passed(&program, &value) {
            prop_assert_eq!(&command, &program, "{}", kind);
            prop_assert_eq!(&passed, &value, "{}", kind);
        }
    }

    #[test]
    fn any_text_reaches_the_program_through_the_shell(
        texts in prop::collection::vec("[^\0]*", 1..4),
        value in "[^\0]*",
    ) {
        let program: Vec<&str> = texts.iter().map(String::as_str).collect();
        let ran = Stage::new().run(&program, &[&format!("A={value}")], 0);
        prop_assert_eq!(&ran.arguments, &program);
        prop_assert_eq!(&ran.value, &value);
    }
}
