//! The results of the checks, independent of their presentation.

use serde::Serialize;

/// The status of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    Ok,
    /// It works, but not as well as it could, or not as probably intended.
    Warn,
    /// A job on this machine, or with these variables, will fail.
    Fail,
    /// It does not apply to this machine or build.
    Skipped,
}

impl Status {
    pub(crate) const ALL: [Self; 4] = [Self::Fail, Self::Warn, Self::Ok, Self::Skipped];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
            Self::Skipped => "skipped",
        }
    }
}

/// One line of the report. Its fields are the keys of `--json`, which is a stable format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Check {
    pub(crate) topic: String,
    pub(crate) status: Status,
    /// The finding.
    pub(crate) found: String,
    /// The consequence, or the reason.
    pub(crate) why: Option<String>,
    /// The remedy.
    pub(crate) remedy: Option<String>,
    /// Lines shown by `--verbose` only.
    pub(crate) details: Vec<String>,
}

impl Check {
    pub(crate) fn new(status: Status, topic: &str, found: impl Into<String>) -> Self {
        Self { topic: topic.to_owned(), status, found: found.into(), why: None, remedy: None, details: Vec::new() }
    }

    pub(crate) fn ok(topic: &str, found: impl Into<String>) -> Self {
        Self::new(Status::Ok, topic, found)
    }

    pub(crate) fn warn(topic: &str, found: impl Into<String>) -> Self {
        Self::new(Status::Warn, topic, found)
    }

    pub(crate) fn fail(topic: &str, found: impl Into<String>) -> Self {
        Self::new(Status::Fail, topic, found)
    }

    pub(crate) fn skipped(topic: &str, found: impl Into<String>) -> Self {
        Self::new(Status::Skipped, topic, found)
    }

    pub(crate) fn why(self, why: impl Into<String>) -> Self {
        Self { why: Some(why.into()), ..self }
    }

    pub(crate) fn remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }

    pub(crate) fn details(self, details: impl IntoIterator<Item = String>) -> Self {
        Self { details: details.into_iter().collect(), ..self }
    }
}

/// All checks, in the order in which they are shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Report {
    /// The version of this program.
    pub(crate) version: &'static str,
    pub(crate) checks: Vec<Check>,
}

impl Report {
    pub(crate) fn new(checks: Vec<Check>) -> Self {
        Self { version: env!("CARGO_PKG_VERSION"), checks }
    }

    pub(crate) fn count(&self, status: Status) -> usize {
        self.checks.iter().filter(|check| check.status == status).count()
    }

    /// Formats the counts that are not 0 as `1 fail, 2 warn, 15 ok`, the worst first.
    pub(crate) fn summary(&self) -> String {
        let counts = Status::ALL.map(|status| (self.count(status), status.name()));
        let shown = counts.iter().filter(|(count, _)| *count > 0).map(|(count, name)| format!("{count} {name}"));
        shown.collect::<Vec<_>>().join(", ")
    }

    pub(crate) fn exit_code(&self) -> u8 {
        u8::from(self.count(Status::Fail) > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_failure_ends_with_1() {
        let checks = vec![Check::ok("a", "x"), Check::warn("b", "y"), Check::skipped("c", "z")];
        let mut report = Report::new(checks);
        assert_eq!((report.summary().as_str(), report.exit_code()), ("1 warn, 1 ok, 1 skipped", 0));
        report.checks.push(Check::fail("d", "w"));
        assert_eq!((report.summary().as_str(), report.exit_code()), ("1 fail, 1 warn, 1 ok, 1 skipped", 1));
    }
}
