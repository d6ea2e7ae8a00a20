use super::*;

const GOOD: &str = "0123456789abcdef";

fn vars<'a>(pairs: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
    |name| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
}

fn refused(outcome: Result<Option<JobSecret>>) -> String {
    let error = outcome.err().unwrap();
    assert!(matches!(error, Error::Config { .. }), "{error}");
    error.to_string()
}

#[test]
fn the_variable_or_the_file_gives_it_and_both_are_an_error() {
    assert_eq!(JobSecret::from_vars(|_| None).unwrap(), None);
    let text = JobSecret::from_vars(vars(&[("DISTRIBUTE_JOB_SECRET", GOOD)])).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret");
    write(&path, &format!("{GOOD}\n"), 0o600);
    let shown = path.to_str().unwrap();
    assert_eq!(JobSecret::from_vars(vars(&[("DISTRIBUTE_JOB_SECRET_FILE", shown)])).unwrap(), text);
    assert_eq!(text, Some(JobSecret::new(GOOD).unwrap()));
    assert_ne!(text, Some(JobSecret::new("0123456789abcdeg").unwrap()));
    let both = [("DISTRIBUTE_JOB_SECRET", GOOD), ("DISTRIBUTE_JOB_SECRET_FILE", shown)];
    let error = refused(JobSecret::from_vars(vars(&both)));
    assert!(error.contains("DISTRIBUTE_JOB_SECRET is set, too") && !error.contains(GOOD), "{error}");
}

#[test]
fn secrets_of_wrong_lengths_are_refused_without_being_shown() {
    let long = "s".repeat(JobSecret::MAX_BYTES + 1);
    for (given, words) in [("SeCrEt", "6 bytes only"), ("0123456789abcde\n", "15 bytes only"), (&long, "4096 bytes")] {
        let error = refused(JobSecret::from_vars(vars(&[("DISTRIBUTE_JOB_SECRET", given)])));
        assert!(error.contains(words) && !error.contains(given.trim()), "{error}");
    }
    assert!(JobSecret::new(&long[1..]).is_ok());
    // Longer than a block of the hash, they differ by all of their bytes.
    assert_ne!(JobSecret::new(&long[1..]).unwrap(), JobSecret::new(&long[2..]).unwrap());
    assert_eq!(format!("{:?}", JobSecret::new(GOOD).unwrap()), "JobSecret(..)");
}

#[test]
fn files_that_are_not_their_owners_alone_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret");
    let read = || JobSecret::from_vars(vars(&[("DISTRIBUTE_JOB_SECRET_FILE", path.to_str().unwrap())]));
    assert!(refused(read()).contains("No such file"));
    write(&path, GOOD, 0o600);
    assert!(read().is_ok());
    for (mode, shown) in [(0o644, "mode 0644"), (0o640, "mode 0640"), (0o604, "mode 0604"), (0o620, "mode 0620")] {
        write(&path, GOOD, mode);
        let error = refused(read());
        assert!(error.contains("others than its owner") && error.contains(shown), "{error}");
    }
    write(&path, "short", 0o400);
    assert!(refused(read()).contains("5 bytes only"));
    write(&path, &"s".repeat(JobSecret::MAX_BYTES + 1), 0o600);
    assert!(refused(read()).contains("more than 4096"));
    write(&path, &format!("{}\r\n", "s".repeat(JobSecret::MAX_BYTES)), 0o600);
    assert!(read().is_ok());
    let error = refused(JobSecret::from_vars(vars(&[("DISTRIBUTE_JOB_SECRET_FILE", folder.path().to_str().unwrap())])));
    assert!(error.contains("it is not a file"), "{error}");
}

#[test]
fn drawn_secrets_are_their_owners_alone_and_differ() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let paths = ["a", "b"].map(|name| folder.path().join(name));
    let drawn = paths.each_ref().map(|path| {
        JobSecret::create_file(path).unwrap();
        assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        JobSecret::from_file(path).unwrap()
    });
    assert_ne!(drawn[0], drawn[1]);
    assert_eq!(fs::read(&paths[0]).unwrap().len(), 2 * DRAWN_BYTES + 1);
    // An existing file is not replaced.
    assert!(JobSecret::create_file(&paths[0]).is_err());
}

#[test]
fn codes_are_those_of_the_standard() {
    // RFC 4231, test case 6: a key longer than a block.
    let secret = JobSecret::of(&[0xaa; 131]);
    let mut mac = <Hmac<Sha256> as hmac::digest::KeyInit>::new((&**secret.0).into());
    mac.update(b"Test Using Larger Than Block-Size Key - Hash Key First");
    let code: [u8; PROOF_BYTES] = mac.finalize_fixed().into();
    assert!(crate::job::hex(&code).starts_with("60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"));
}

fn write(path: &Path, text: &str, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    if path.exists() {
        fs::remove_file(path).unwrap();
    }
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}
