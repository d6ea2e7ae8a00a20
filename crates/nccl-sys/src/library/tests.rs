use std::fs;

use super::*;
use crate::ENV_LIBRARY;
use crate::search::NamedBy;

fn failure(search: &Search) -> (String, Vec<Attempt>) {
    let error = Library::open(search).unwrap_err();
    let text = error.to_string();
    match error {
        Error::NotFound { attempts, .. } => (text, attempts),
        other => panic!("{other}"),
    }
}

#[test]
fn a_missing_file_is_told_in_the_loaders_words() {
    let (text, attempts) = failure(&Search::file("/no/such/libnccl.so.2"));
    assert_eq!(
        text,
        "the file that was given for NCCL cannot be used: /no/such/libnccl.so.2: cannot open shared object file: No \
         such file or directory"
    );
    assert!(matches!(&attempts[..], [Attempt { problem: Problem::Loader(_), .. }]));
}

#[test]
fn a_file_that_is_no_library_is_told_in_the_loaders_words() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("libnccl.so.2");
    fs::write(&file, "this is no library, however long it is to be longer than an ELF header").unwrap();
    let (text, _) = failure(&Search::file(&file));
    assert!(text.ends_with("libnccl.so.2: invalid ELF header"), "{text}");
}

#[test]
fn a_library_that_is_not_nccl_is_told_so() {
    let (text, attempts) = failure(&Search::file("libm.so.6"));
    assert!(text.ends_with("libm.so.6: it is a library, but no NCCL: it has no ncclGetVersion"), "{text}");
    assert!(matches!(&attempts[..], [Attempt { problem: Problem::NotNccl, .. }]));
}

#[test]
fn sentences_of_a_search_name_every_file_and_what_to_install() {
    let attempts = || {
        let problems = [Problem::Loader("libnccl.so.2: no".into()), Problem::TooOld(Version::new(2, 15, 5))];
        let files = ["libnccl.so.2", "/opt/libnccl.so"].map(PathBuf::from);
        files.into_iter().zip(problems).map(|(file, problem)| Attempt { file, problem }).collect()
    };
    let text = Error::NotFound { named_by: None, attempts: attempts() }.to_string();
    assert!(text.contains("libnccl.so.2: no; /opt/libnccl.so: it is NCCL 2.15.5, and the oldest"), "{text}");
    assert!(text.contains("install NCCL 2.18.0 or newer") && text.contains("pip install nvidia-nccl-cu1"), "{text}");
    let text = Error::NotFound { named_by: Some(NamedBy::Environment), attempts: attempts() }.to_string();
    assert!(text.contains(&format!("the file that {ENV_LIBRARY} gives")) && text.contains("unset it"), "{text}");
}

#[test]
fn sentences_of_calls_tell_code_name_and_words() {
    let call = |last: Option<&str>| Error::Call {
        function: "ncclAllReduce",
        code: Code::INVALID_USAGE,
        name: "ncclInvalidUsage",
        text: "invalid usage".into(),
        last: last.map(str::to_owned),
    };
    assert_eq!(call(None).to_string(), "ncclAllReduce failed: ncclInvalidUsage (code 5): invalid usage");
    assert!(call(Some("two ranks")).to_string().ends_with("; the last words of NCCL in this process: two ranks"));
    let missing = Error::Missing {
        function: "ncclAlltoAll",
        since: since("ncclAlltoAll"),
        found: Version::new(2, 21, 5),
        path: "/lib/libnccl.so.2".into(),
    };
    assert_eq!(
        missing.to_string(),
        "ncclAlltoAll is not in NCCL 2.21.5 at /lib/libnccl.so.2; it came with NCCL 2.28.0: install that or newer"
    );
}

#[test]
fn libraries_are_shared_between_threads() {
    fn shared<T: Send + Sync + Clone>() {}
    shared::<Library>();
}
