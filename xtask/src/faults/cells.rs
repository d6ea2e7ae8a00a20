//! The faults, the strategies, and the promise for each pair: docs/reliability.md in numbers.

use clap::ValueEnum;

use super::row::Measured;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// MultiWorkerMirrored, in step.
    Workers,
    /// MultiWorkerMirrored, elastic.
    Elastic,
    /// FullySharded.
    Sharded,
    /// Diloco over MultiWorkerMirrored.
    Diloco,
    /// ParameterServer.
    Servers,
}

impl Kind {
    pub(super) const ALL: [Kind; 5] = [Kind::Workers, Kind::Elastic, Kind::Sharded, Kind::Diloco, Kind::Servers];

    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Workers => "workers",
            Kind::Elastic => "elastic",
            Kind::Sharded => "sharded",
            Kind::Diloco => "diloco",
            Kind::Servers => "servers",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    KillWorker,
    KillChief,
    KillServer,
    Freeze,
    Cut,
    CutOneWay,
    SlowLink,
    Reset,
    DiskFull,
    DiskReadOnly,
    Terminate,
    Join,
}

impl Fault {
    pub(super) const ALL: [Fault; 12] = [
        Fault::KillWorker,
        Fault::KillChief,
        Fault::KillServer,
        Fault::Freeze,
        Fault::Cut,
        Fault::CutOneWay,
        Fault::SlowLink,
        Fault::Reset,
        Fault::DiskFull,
        Fault::DiskReadOnly,
        Fault::Terminate,
        Fault::Join,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Fault::KillWorker => "kill-worker",
            Fault::KillChief => "kill-chief",
            Fault::KillServer => "kill-server",
            Fault::Freeze => "freeze",
            Fault::Cut => "cut",
            Fault::CutOneWay => "cut-one-way",
            Fault::SlowLink => "slow-link",
            Fault::Reset => "reset",
            Fault::DiskFull => "disk-full",
            Fault::DiskReadOnly => "disk-read-only",
            Fault::Terminate => "terminate",
            Fault::Join => "join",
        }
    }

    /// Whether it needs hosts with a network of their own.
    pub(super) fn is_of_network(self) -> bool {
        matches!(self, Fault::Cut | Fault::CutOneWay | Fault::SlowLink)
    }

    pub(super) fn is_of_disk(self) -> bool {
        matches!(self, Fault::DiskFull | Fault::DiskReadOnly)
    }
}

/// Bounds of what a fault may cost. Times are milliseconds after the fault.
#[derive(Clone, Copy, Debug)]
pub(super) struct Promise {
    /// Until the first other task has noticed.
    pub(super) detect: Option<u64>,
    /// Until all other tasks have ended, if they do.
    pub(super) end: Option<u64>,
    /// Until the next step, where the others train on.
    pub(super) recover: Option<u64>,
    /// Until a task that joins, or joins again, makes its first step, from its start or the end of its fault.
    pub(super) join: Option<u64>,
    /// Steps that are made again, at most.
    pub(super) steps_lost: u64,
    /// The exit codes of the others.
    pub(super) codes: &'static [i32],
    /// Whether the final weights equal those of the same training without faults, bit for bit.
    pub(super) equal: bool,
}

const EVERY: u64 = super::stage::EVERY;
const ENDS: Promise = Promise {
    detect: Some(1000),
    end: Some(1000),
    recover: None,
    join: None,
    steps_lost: EVERY,
    codes: &[138],
    equal: true,
};
const GOES_ON: Promise =
    Promise { detect: None, end: None, recover: Some(250), join: None, steps_lost: 0, codes: &[0], equal: true };

/// Returns the promise of a cell; `None` where the strategy does not have the fault. `silence` is in milliseconds.
pub(super) fn promise(fault: Fault, kind: Kind, silence: u64) -> Option<Promise> {
    let noticed_by_silence = Promise { detect: Some(silence + 1500), end: Some(silence + 2500), ..ENDS };
    Some(match (kind, fault) {
        (Kind::Workers | Kind::Sharded | Kind::Diloco, fault) => match fault {
            Fault::KillServer | Fault::Join => return None,
            Fault::KillWorker | Fault::KillChief | Fault::Reset => ENDS,
            Fault::Freeze | Fault::Cut | Fault::CutOneWay => noticed_by_silence,
            Fault::SlowLink => Promise { recover: Some(silence), ..GOES_ON },
            // The error comes with the next save.
            Fault::DiskFull | Fault::DiskReadOnly => {
                Promise { detect: None, end: Some(5000), codes: &[1], steps_lost: 2 * EVERY, ..ENDS }
            }
            Fault::Terminate => Promise { detect: None, end: Some(2000), codes: &[143], steps_lost: 0, ..ENDS },
        },
        (Kind::Elastic, fault) => match fault {
            Fault::KillServer => return None,
            Fault::KillWorker | Fault::KillChief => Promise { join: Some(2000), ..GOES_ON },
            Fault::Freeze | Fault::Cut | Fault::CutOneWay => {
                Promise { recover: Some(silence + 250), join: Some(10_000), ..GOES_ON }
            }
            Fault::SlowLink => Promise { recover: Some(silence), ..GOES_ON },
            Fault::Reset => Promise { recover: Some(silence + 250), ..GOES_ON },
            Fault::DiskFull | Fault::DiskReadOnly => {
                Promise { detect: None, end: Some(5000), codes: &[1], steps_lost: 0, equal: false, ..ENDS }
            }
            Fault::Terminate => GOES_ON,
            // The next step of all is that with the joiner.
            Fault::Join => Promise { recover: None, join: Some(2000), ..GOES_ON },
        },
        (Kind::Servers, fault) => {
            // Updates are made in the order in which they come.
            let goes_on = Promise { equal: false, ..GOES_ON };
            match fault {
                Fault::KillWorker | Fault::Terminate => Promise { recover: Some(2000), join: Some(5000), ..goes_on },
                Fault::Freeze | Fault::Cut | Fault::CutOneWay => {
                    Promise { recover: Some(silence + 1500), join: Some(10_000), ..goes_on }
                }
                Fault::Reset => Promise { recover: Some(2000), ..goes_on },
                Fault::SlowLink => Promise { recover: Some(silence), ..goes_on },
                Fault::KillServer => Promise { recover: Some(15_000), steps_lost: EVERY, ..goes_on },
                // The steps that were under way, which are made again without effect.
                Fault::KillChief => Promise { recover: Some(15_000), steps_lost: 4, ..goes_on },
                Fault::DiskFull | Fault::DiskReadOnly => {
                    Promise { recover: None, end: Some(5000), codes: &[1], steps_lost: 2 * EVERY, ..goes_on }
                }
                Fault::Join => Promise { recover: None, join: Some(5000), ..goes_on },
            }
        }
    })
}

impl Promise {
    /// Returns the first bound that a measurement exceeds. Times may be `slack` times as long.
    pub(super) fn broken_by(&self, measured: &Measured, slack: u64) -> Option<String> {
        let times = [
            ("noticed", self.detect, measured.detect_ms),
            ("the others ended", self.end, measured.end_ms),
            ("the next step", self.recover, measured.recover_ms),
            ("the joiner's first step", self.join, measured.join_ms),
        ];
        for (what, promised, took) in times {
            match (promised, took) {
                (Some(promised), Some(took)) if took > promised * slack => {
                    return Some(format!("{what} after {took} ms, promised: {} ms", promised * slack));
                }
                (Some(_), None) => return Some(format!("{what}: never")),
                _ => {}
            }
        }
        if measured.steps_lost > self.steps_lost {
            return Some(format!("{} steps lost, promised: at most {}", measured.steps_lost, self.steps_lost));
        }
        if measured.examples_lost != 0 {
            return Some(format!("{} examples lost (negative: repeated), promised: 0", measured.examples_lost));
        }
        if let Some(code) = measured.codes.iter().find(|code| !self.codes.contains(code)) {
            return Some(format!("an exit code {code} of {:?}, promised: {:?}", measured.codes, self.codes));
        }
        match measured.equal {
            Some(false) if self.equal => {
                Some("the weights differ from those of the training without faults".to_owned())
            }
            None if self.equal => Some("the weights were not compared".to_owned()),
            _ => None,
        }
    }
}
