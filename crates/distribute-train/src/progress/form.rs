//! The form of a run's progress output.

use std::io::{self, IsTerminal};

use crate::{Error, environment};

/// The forms of progress output.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Form {
    /// A bar where standard error is a terminal, plain lines where it is not.
    #[default]
    Auto,
    /// One line per epoch, redrawn in place.
    Bar,
    /// `key=value` lines without control bytes.
    Plain,
    /// The plain lines as JSON objects.
    Json,
    /// Messages to the launcher, which draws one bar for all tasks.
    Launcher {
        /// The launcher's address, as `host:port`.
        addr: String,
    },
    /// No progress; the summary is still printed.
    Off,
}

impl Form {
    /// Reads `DISTRIBUTE_PROGRESS` (`auto`, `bar`, `plain`, `json`, `launcher`, `off`),
    /// `DISTRIBUTE_PROGRESS_ADDR` (`host:port`, for `launcher`) and `DISTRIBUTE_LOG` (`text`, or `json`, which turns
    /// plain lines into JSON lines).
    ///
    /// # Errors
    /// [`Error::UnknownForm`], [`Error::UnknownLog`], [`Error::MissingAddress`] or [`Error::BadAddress`] if a variable
    /// is invalid; they name the variable and its valid values.
    pub fn from_env() -> Result<Self, Error> {
        Self::from_vars(environment::text)
    }

    fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let log = var(LOG).unwrap_or_default();
        let json = match log.trim().to_ascii_lowercase().as_str() {
            "" | "text" => false,
            "json" => true,
            _ => return Err(Error::UnknownLog { given: log }),
        };
        let given = var(PROGRESS).unwrap_or_default();
        let form = match given.trim().to_ascii_lowercase().as_str() {
            "" | "auto" => Self::Auto,
            "bar" => Self::Bar,
            "plain" => Self::Plain,
            "json" => Self::Json,
            "off" => Self::Off,
            "launcher" => Self::Launcher { addr: address(var(ADDR).as_deref())? },
            _ => return Err(Error::UnknownForm { given }),
        };
        Ok(if json && matches!(form, Self::Auto | Self::Plain) { Self::Json } else { form })
    }

    /// Replaces `Auto` by the form that suits standard error.
    pub(crate) fn resolved(self) -> Self {
        if self != Self::Auto {
            return self;
        }
        let dumb = environment::text("TERM").is_some_and(|term| term == "dumb");
        if io::stderr().is_terminal() && !dumb { Self::Bar } else { Self::Plain }
    }
}

/// Reads `DISTRIBUTE_STATUS_ADDR`, the address to which this task reports its vital signs.
pub(crate) fn status_address() -> Result<Option<String>, Error> {
    let given = environment::text(STATUS_ADDR).map(|given| given.trim().to_owned());
    match given.filter(|given| !given.is_empty()) {
        Some(given) if is_address(&given) => Ok(Some(given)),
        Some(given) => Err(Error::BadStatusAddress { given }),
        None => Ok(None),
    }
}

/// Returns the name of this host as Windows tells it.
#[cfg(not(unix))]
pub(crate) fn computer_name() -> String {
    environment::text("COMPUTERNAME").unwrap_or_default()
}

fn address(given: Option<&str>) -> Result<String, Error> {
    let given = given.map(str::trim).filter(|given| !given.is_empty()).ok_or(Error::MissingAddress)?;
    if is_address(given) { Ok(given.to_owned()) } else { Err(Error::BadAddress { given: given.to_owned() }) }
}

fn is_address(given: &str) -> bool {
    let port = given.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
    port.and_then(|port| port.parse::<u16>().ok()).is_some_and(|port| port > 0)
}

const PROGRESS: &str = "DISTRIBUTE_PROGRESS";
const ADDR: &str = "DISTRIBUTE_PROGRESS_ADDR";
const STATUS_ADDR: &str = "DISTRIBUTE_STATUS_ADDR";
const LOG: &str = "DISTRIBUTE_LOG";

#[cfg(test)]
mod tests {
    use super::*;

    fn form(vars: &[(&str, &str)]) -> Result<Form, Error> {
        Form::from_vars(|name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn variables_choose_the_form() {
        assert_eq!(form(&[]).unwrap(), Form::Auto);
        assert_eq!(form(&[(PROGRESS, "")]).unwrap(), Form::Auto);
        assert_eq!(form(&[(PROGRESS, " Bar ")]).unwrap(), Form::Bar);
        assert_eq!(form(&[(PROGRESS, "plain")]).unwrap(), Form::Plain);
        assert_eq!(form(&[(PROGRESS, "json")]).unwrap(), Form::Json);
        assert_eq!(form(&[(PROGRESS, "off")]).unwrap(), Form::Off);
        let launcher = form(&[(PROGRESS, "launcher"), (ADDR, "[::1]:4711")]).unwrap();
        assert_eq!(launcher, Form::Launcher { addr: "[::1]:4711".into() });
    }

    #[test]
    fn json_logs_turn_lines_into_json_and_leave_other_forms_alone() {
        assert_eq!(form(&[(LOG, "json")]).unwrap(), Form::Json);
        assert_eq!(form(&[(LOG, "json"), (PROGRESS, "plain")]).unwrap(), Form::Json);
        assert_eq!(form(&[(LOG, "json"), (PROGRESS, "off")]).unwrap(), Form::Off);
        assert_eq!(form(&[(LOG, " Text ")]).unwrap(), Form::Auto);
        assert_eq!(form(&[(LOG, "")]).unwrap(), Form::Auto);
    }

    #[test]
    fn auto_is_decided_by_the_destination() {
        assert!(matches!(Form::Auto.resolved(), Form::Bar | Form::Plain));
        assert_eq!(Form::Json.resolved(), Form::Json);
    }

    #[test]
    fn wrong_variables_are_refused_in_words() {
        let text = |vars: &[(&str, &str)]| form(vars).unwrap_err().to_string();
        let unknown = text(&[(PROGRESS, "fancy")]);
        assert!(unknown.contains(r#"DISTRIBUTE_PROGRESS is "fancy"; set it to auto"#), "{unknown}");
        let unknown = text(&[(LOG, "xml"), (PROGRESS, "off")]);
        assert!(unknown.contains(r#"DISTRIBUTE_LOG is "xml"; set it to json or text"#), "{unknown}");
        let missing = text(&[(PROGRESS, "launcher")]);
        assert!(missing.contains("DISTRIBUTE_PROGRESS_ADDR is not set"), "{missing}");
        for addr in ["localhost", ":4711", "localhost:", "localhost:0", "localhost:70000"] {
            let bad = text(&[(PROGRESS, "launcher"), (ADDR, addr)]);
            assert!(bad.contains(addr) && bad.contains("expected host:port"), "{bad}");
        }
    }
}
