//! The job and the faults that a seed stands for. Times are in microseconds.

use std::time::Duration;

use distribute_testkit::simulation::{self, Random, without_each};

pub(super) const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(200);
pub(super) const HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(1500);
pub(super) const JOIN_TIMEOUT: Duration = Duration::from_secs(12);

/// How long an exchange waits for the others.
pub(super) const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(3);

/// A step of the simulation: the precision of the times at which bytes arrive.
pub(super) const STEP: u64 = 10_000;

/// A job and what happens to it.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) seed: u64,
    pub(super) ranks: u32,
    /// Whether the job has a secret.
    pub(super) secret: bool,
    /// The number of exchanges.
    pub(super) rounds: u32,
    /// Whether the clocks of processes run at different speeds.
    pub(super) clocks: bool,
    /// Whether some exchanges are given up before their time, and begun again.
    pub(super) impatient: bool,
    /// When each rank starts.
    pub(super) starts: Vec<u64>,
    pub(super) faults: Vec<Fault>,
}

/// A fault. Processes are numbered as they are described: first the ranks, then those of faults.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// A process is killed; its machine stays.
    Kill { process: usize, at: u64 },
    /// A machine is gone: nothing of it arrives any more.
    Vanish { process: usize, at: u64 },
    /// A rank is started again, on another machine.
    Restart { rank: u32, at: u64 },
    /// A process is stopped for a while.
    Freeze { process: usize, from: u64, until: u64 },
    /// A process and its clock stand still for the others, as a machine that is suspended: for itself, time leaps.
    Leap { process: usize, at: u64, by: u64 },
    /// Nothing gets from one machine to another; nor back, unless it is one way.
    Cut { one: usize, other: usize, one_way: bool, from: u64, until: u64 },
    /// Messages take up to this long.
    Slow { from: u64, until: u64, most: u64 },
    /// A connection of a process breaks.
    Break { process: usize, at: u64, draw: u64 },
    /// A caller that is not a member.
    Stranger { kind: Stranger, at: u64 },
}

/// A caller at the leader's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stranger {
    /// It sends random bytes.
    Garbage,
    /// It says nothing.
    Silent,
    /// It sends what another has sent on its connection.
    Replay,
    /// A member of another job, with this one's secret, as which rank.
    OtherJob {
        rank: u32,
    },
    /// A second process of a rank.
    Twin {
        rank: u32,
    },
    /// It does not know the secret.
    NoSecret {
        rank: u32,
    },
    WrongSecret {
        rank: u32,
    },
    /// It proves the secret as one rank, and joins as another.
    FalseClaim {
        rank: u32,
    },
}

/// The end of the time in which faults begin.
const FAULTS: u64 = 6_000_000;

impl simulation::Scenario for Scenario {
    fn draw(seed: u64) -> Scenario {
        let random = &mut Random::new(seed);
        let ranks = random.between(2, 6) as u32;
        let mut scenario = Scenario {
            seed,
            ranks,
            secret: random.percent(60),
            rounds: random.between(2, 6) as u32,
            clocks: random.percent(50),
            impatient: random.percent(40),
            starts: (0..ranks).map(|_| random.between(0, 1_500_000)).collect(),
            faults: Vec::new(),
        };
        let processes = u64::from(ranks);
        for _ in 0..random.between(0, 5) {
            let from = random.between(0, FAULTS);
            let until = from + random.between(50_000, 4_000_000);
            let (process, other) = (random.between(0, processes) as usize, random.between(0, processes) as usize);
            let rank = random.between(0, processes) as u32;
            let fault = match random.between(0, 20) {
                0 | 1 => Fault::Kill { process, at: from },
                2 | 3 => Fault::Vanish { process, at: from },
                4 => Fault::Restart { rank, at: from },
                5 | 6 => Fault::Freeze { process, from, until },
                7 => Fault::Leap { process, at: from, by: random.between(100_000, 20_000_000) },
                8 | 9 => Fault::Cut { one: process, other, one_way: random.percent(50), from, until },
                10 => Fault::Slow { from, until, most: random.between(100_000, 1_500_000) },
                11 => Fault::Break { process, at: from, draw: random.number() },
                12 => {
                    // A rank whose process is gone is started again while the others join.
                    let at = random.between(0, 2_000_000);
                    scenario.faults.push(Fault::Kill { process, at });
                    Fault::Restart { rank: process as u32, at: at + random.between(10_000, 1_000_000) }
                }
                _ => Fault::Stranger { kind: Stranger::draw(random, rank), at: random.between(0, FAULTS) },
            };
            scenario.faults.push(fault);
        }
        scenario
    }

    /// Returns the scenarios that have one fault or exchange less.
    fn shorter(&self) -> impl Iterator<Item = Scenario> + '_ {
        let without_fault = without_each(&self.faults).map(|faults| Scenario { faults, ..self.clone() });
        let rounds = (self.rounds > 1).then(|| Scenario { rounds: self.rounds - 1, ..self.clone() });
        let clocks = self.clocks.then(|| Scenario { clocks: false, ..self.clone() });
        without_fault.chain(rounds).chain(clocks)
    }
}

impl Stranger {
    fn draw(random: &mut Random, rank: u32) -> Stranger {
        match random.between(0, 9) {
            0 => Stranger::Garbage,
            1 => Stranger::Silent,
            2 | 3 => Stranger::Replay,
            4 => Stranger::OtherJob { rank },
            5 => Stranger::Twin { rank },
            6 => Stranger::NoSecret { rank },
            7 => Stranger::WrongSecret { rank },
            _ => Stranger::FalseClaim { rank },
        }
    }
}
