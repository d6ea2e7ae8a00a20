use super::*;

fn spec(workers: &[&str]) -> ClusterSpec {
    ClusterSpec::new().with_job(TaskType::Worker, workers.iter().copied()).unwrap()
}

#[test]
fn names_are_bounded_and_printable() {
    let longest = "x".repeat(JobId::MAX_BYTES);
    for good in ["a", "3fa8-11/x@y", "{}\"", &longest] {
        let job = JobId::new(good).unwrap();
        assert_eq!((job.to_string().as_str(), job.is_derived()), (good, false));
    }
    let long = "x".repeat(JobId::MAX_BYTES + 1);
    for (bad, words) in [
        ("", "it is empty"),
        ("a b", "the character ' '"),
        ("a\nb", "the character '\\n'"),
        ("\u{1b}[31m", "the character '\\u{1b}'"),
        ("ä", "the character 'ä'"),
        (&long, "it has 129 bytes"),
    ] {
        let text = JobId::new(bad).unwrap_err().to_string();
        assert!(text.contains(words) && text.contains("DISTRIBUTE_JOB_ID") && !text.contains('\u{1b}'), "{text}");
        assert!(text.lines().count() == 1, "{text}");
    }
}

#[test]
fn a_variable_gives_it() {
    let from = |value: Option<&str>| JobId::from_vars(|_| value.map(str::to_owned));
    assert_eq!(from(None).unwrap(), None);
    assert_eq!(from(Some(" ")).unwrap(), None);
    assert_eq!(from(Some(" a ")).unwrap(), Some(JobId::new("a").unwrap()));
    assert!(from(Some("a b")).is_err());
}

#[test]
fn descriptions_have_one_identity_each() {
    let two = JobId::of_cluster(&spec(&["a:1", "b:1"]));
    assert!(two.is_derived() && two.to_string().starts_with("derived-"), "{two}");
    assert_eq!(two, JobId::of_cluster(&spec(&["A:1", "b:1"])));
    // Neither the order of jobs nor an evaluator affects the identity.
    let with = |spec: ClusterSpec, kind| spec.with_job(kind, ["c:1"]).unwrap();
    assert_eq!(two, JobId::of_cluster(&with(spec(&["a:1", "b:1"]), TaskType::Evaluator)));
    let ps_first = with(ClusterSpec::new(), TaskType::Ps).with_job(TaskType::Worker, ["a:1", "b:1"]).unwrap();
    assert_eq!(JobId::of_cluster(&ps_first), JobId::of_cluster(&with(spec(&["a:1", "b:1"]), TaskType::Ps)));
    let others = [
        JobId::of_cluster(&spec(&["b:1", "a:1"])),
        JobId::of_cluster(&spec(&["a:1", "b:2"])),
        JobId::of_cluster(&spec(&["a:1"])),
        JobId::of_cluster(&ps_first),
        JobId::unknown(),
        JobId::of_ranks(2, "a:1"),
        JobId::of_ranks(3, "a:1"),
        JobId::of_ranks(2, "a:2"),
        JobId::new(two.name()).unwrap(),
    ];
    for (place, job) in others.iter().enumerate() {
        assert!(job.to_bytes() != two.to_bytes() && others[..place].iter().all(|other| other != job), "{place}");
    }
    assert_eq!(JobId::of_ranks(2, "localhost:7"), JobId::of_ranks(2, "job-master-0:7"));
}

#[test]
fn random_ones_differ() {
    assert_ne!(JobId::random().unwrap(), JobId::random().unwrap());
    let incarnation = Incarnation::random().unwrap();
    assert_ne!(incarnation, Incarnation::random().unwrap());
    assert_eq!(Incarnation::from_bytes(incarnation.to_bytes()), incarnation);
    assert_eq!(incarnation.to_string().len(), 8);
}
