//! The meaning of signals to the launcher.

use signal_hook::consts::{SIGCHLD, SIGUSR1, SIGUSR2};

/// A signal to the launcher, by what it asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signal {
    /// A process has ended: SIGCHLD.
    Child,
    /// A request to the program, such as to save now: SIGUSR1 or SIGUSR2. Where no task runs, it is ignored.
    Request(i32),
    /// A request to end: any other one.
    End(i32),
}

impl From<i32> for Signal {
    fn from(number: i32) -> Self {
        match number {
            SIGCHLD => Self::Child,
            SIGUSR1 | SIGUSR2 => Self::Request(number),
            _ => Self::End(number),
        }
    }
}

#[cfg(test)]
mod tests {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

    use super::*;

    #[test]
    fn only_requests_to_end_end_something() {
        assert_eq!(Signal::from(SIGCHLD), Signal::Child);
        assert!([SIGUSR1, SIGUSR2].into_iter().all(|number| Signal::from(number) == Signal::Request(number)));
        let all = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];
        assert!(all.into_iter().all(|number| Signal::from(number) == Signal::End(number)));
    }
}
