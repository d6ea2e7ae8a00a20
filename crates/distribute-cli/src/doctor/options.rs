//! The variables that set options of groups and of progress.

use distribute_collectives::{Options, TransportKind};
use distribute_train::Error as TrainError;
use distribute_train::progress::Form;

use super::report::Check;
use super::seen::Seen;

/// Checks the options that a group of this process would have, and returns its transport; invalid ones keep every
/// program from starting.
pub(crate) fn options(seen: &Seen, progress: Result<Form, TrainError>) -> (Check, TransportKind) {
    let mut problems = Vec::new();
    let mut set = Vec::new();
    for name in VARIABLES {
        let Some(value) = seen.variable(name) else { continue };
        // One at a time, since an error may not name its variable.
        match Options::from_vars(|asked| (asked == name).then(|| value.to_owned())) {
            Ok(_) => set.push(format!("{name}={value}")),
            Err(error) => problems.push(error.to_string()),
        }
    }
    problems.extend(progress.err().map(|error| error.to_string()));
    let options =
        Options::from_vars(|name| seen.variable(name).filter(|_| VARIABLES.contains(&name)).map(str::to_owned));
    let options = options.unwrap_or_default();
    let found = format!(
        "transport {}, algorithm {}, timeout {} s",
        options.transport.name(),
        seen.variable("DISTRIBUTE_ALGORITHM").unwrap_or("auto"),
        options.timeout.as_secs_f64()
    );
    let check = match (problems.as_slice(), set.as_slice()) {
        ([], []) => Check::ok("options", found).why("the defaults"),
        ([], set) => Check::ok("options", found).why(format!("by {}", set.join(", "))),
        (problems, _) => Check::fail("options", problems.join("; "))
            .why("every program that reads it ends at once")
            .remedy("correct the variable, or unset it"),
    };
    (check, options.transport)
}

const VARIABLES: [&str; 4] = ["DISTRIBUTE_TRANSPORT", "DISTRIBUTE_ALGORITHM", "DISTRIBUTE_LINK", "DISTRIBUTE_TIMEOUT"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Status;

    #[test]
    fn what_is_set_is_named_and_what_is_wrong_fails() {
        let options = |variables: &[(&str, &str)]| options(&Seen::variables_only(variables), Ok(Form::Auto));
        let (check, transport) = options(&[]);
        assert_eq!(
            (check.found.as_str(), transport),
            ("transport auto, algorithm auto, timeout 300 s", TransportKind::Auto)
        );
        let (check, transport) = options(&[("DISTRIBUTE_TRANSPORT", "tcp"), ("DISTRIBUTE_TIMEOUT", "2.5")]);
        assert_eq!(
            (check.found.as_str(), transport),
            ("transport tcp, algorithm auto, timeout 2.5 s", TransportKind::Tcp)
        );
        assert_eq!(check.why.unwrap(), "by DISTRIBUTE_TRANSPORT=tcp, DISTRIBUTE_TIMEOUT=2.5");
        let (check, _) = options(&[("DISTRIBUTE_TRANSPORT", "udp"), ("DISTRIBUTE_ALGORITHM", "ring")]);
        assert_eq!(check.status, Status::Fail);
        assert!(check.found.starts_with("DISTRIBUTE_TRANSPORT \"udp\""), "{check:?}");
    }

    #[test]
    fn a_wrong_form_of_progress_fails_too() {
        let given = "rainbow".to_owned();
        let (check, _) = options(&Seen::variables_only(&[]), Err(TrainError::UnknownForm { given }));
        assert_eq!(check.status, Status::Fail);
        assert!(check.found.contains("DISTRIBUTE_PROGRESS is \"rainbow\""), "{check:?}");
    }
}
