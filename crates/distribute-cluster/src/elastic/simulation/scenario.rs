//! The job and the faults that a seed stands for.

use distribute_testkit::simulation::{self, Random, without_each};

/// A job and what happens to it. Times are in microseconds.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) seed: u64,
    pub(super) seeds: usize,
    pub(super) min: usize,
    pub(super) max: usize,
    pub(super) majority: bool,
    /// Whether the clocks of processes run at different speeds.
    pub(super) clocks: bool,
    /// The longest time that a state takes from one process to another.
    pub(super) transfer: u64,
    /// A defect of the processes, which the simulator is to find.
    pub(super) defect: Option<Defect>,
    pub(super) faults: Vec<Fault>,
}

/// A defect in how processes continue with a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Defect {
    /// They train without the state of the newest generation that has trained.
    Unchecked,
    /// They begin to train in a generation although they have proposed the next one.
    Unfenced,
    /// They take those with as many steps for equally far, whatever generations made them.
    StepsAlone,
}

/// A fault. Processes are numbered as they start.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// Messages are lost.
    Loss {
        from: u64,
        until: u64,
        percent: u64,
    },
    /// Messages come twice.
    Twice {
        from: u64,
        until: u64,
        percent: u64,
    },
    /// Messages take up to this long, and overtake each other.
    Slow {
        from: u64,
        until: u64,
        most: u64,
    },
    /// Nothing gets from the processes with a bit in `side` to the others; nor back, unless it is one way.
    Partition {
        from: u64,
        until: u64,
        side: u64,
        one_way: bool,
    },
    /// Nothing gets from one process to another.
    Cut {
        from: u64,
        until: u64,
        sender: usize,
        receiver: usize,
    },
    /// A process is stopped for a while.
    Freeze {
        node: usize,
        from: u64,
        until: u64,
    },
    Kill {
        node: usize,
        at: u64,
    },
    /// A process is killed in the middle of sending: at this message of a vote or a decision, counted over all.
    KillAmid {
        message: u64,
    },
    /// A process stops in the middle of sending such a message, and sends it and the rest when it wakes up.
    StallAmid {
        message: u64,
        pause: u64,
    },
    /// A process is killed, or stopped for a while, when it begins to send its state: at this transfer of all.
    KillSending {
        transfer: u64,
    },
    FreezeSending {
        transfer: u64,
        pause: u64,
    },
    /// A process is started, at an address of its own or at that of one that was killed.
    Start {
        at: u64,
        replaces: Option<usize>,
    },
    /// A process believes another to be gone that is there.
    Suspect {
        node: usize,
        rank: u32,
        at: u64,
    },
    Leave {
        node: usize,
        at: u64,
    },
    /// The register fails; what it was asked for may be done nevertheless.
    Register {
        from: u64,
        until: u64,
    },
}

/// The end of the time in which faults begin.
const FAULTS: u64 = 8_000_000;

impl simulation::Scenario for Scenario {
    fn draw(seed: u64) -> Scenario {
        let random = &mut Random::new(seed);
        let seeds = random.between(1, 8) as usize;
        let majority = random.percent(65);
        let min = random.between(1, seeds as u64 / 2 + 2) as usize;
        let max = seeds + random.between(0, 4) as usize;
        let (clocks, transfer, defect, faults) = (random.percent(50), 20_000, None, Vec::new());
        let mut scenario = Scenario { seed, seeds, min, max, majority, clocks, transfer, defect, faults };
        // The later ones are drawn for processes that start meanwhile, too.
        let mut nodes = seeds as u64;
        for _ in 0..random.between(0, 9) {
            let from = random.between(0, FAULTS);
            let until = from + random.between(50_000, 3_000_000);
            let node = random.between(0, nodes) as usize;
            let fault = match random.between(0, 15) {
                0 => Fault::Loss { from, until, percent: random.between(5, 80) },
                1 => Fault::Twice { from, until, percent: random.between(5, 60) },
                2 => Fault::Slow { from, until, most: random.between(10_000, 1_500_000) },
                3 | 4 => Fault::Partition { from, until, side: random.number(), one_way: random.percent(40) },
                5 | 6 => Fault::Freeze { node, from, until },
                7 => Fault::Kill { node, at: from },
                8 => Fault::KillAmid { message: random.between(1, 60) },
                9 | 10 => {
                    nodes += 1;
                    let replaces = random.percent(40).then_some(node);
                    Fault::Start { at: from, replaces }
                }
                11 => Fault::StallAmid { message: random.between(1, 60), pause: random.between(500_000, 5_000_000) },
                12 | 13 => Fault::Suspect { node, rank: random.between(0, nodes) as u32, at: from },
                _ if !majority && random.percent(60) => Fault::Register { from, until },
                _ => Fault::Leave { node, at: from },
            };
            scenario.faults.push(fault);
        }
        if random.percent(30) {
            // Several believe different others to be gone, at about one time, while messages take long.
            let from = random.between(0, FAULTS);
            let (until, most) = (from + 4_000_000, random.between(100_000, 2_000_000));
            scenario.faults.push(Fault::Slow { from, until, most });
            for _ in 0..random.between(2, 5) {
                let at = from + random.between(0, 600_000);
                let (node, rank) = (random.between(0, nodes) as usize, random.between(0, nodes) as u32);
                scenario.faults.push(Fault::Suspect { node, rank, at });
            }
        }
        if random.percent(20) {
            // Two propose at about one time, and one of them does not hear of the other.
            let from = random.between(3_000_000, FAULTS);
            let (until, most) = (from + 5_000_000, random.between(10_000, 900_000));
            let (sender, receiver) = (random.between(0, nodes) as usize, random.between(0, nodes) as usize);
            scenario.faults.push(Fault::Cut { from, until, sender, receiver });
            scenario.faults.push(Fault::Slow { from, until, most });
            for node in [sender, receiver] {
                let at = from + random.between(0, 1_200_000);
                scenario.faults.push(Fault::Suspect { node, rank: random.between(0, nodes) as u32, at });
            }
        }
        if random.percent(20) {
            // Processes join one after the other, while messages take long.
            let from = random.between(2_000_000, FAULTS);
            let most = random.between(100_000, 900_000);
            scenario.faults.push(Fault::Slow { from, until: from + 6_000_000, most });
            for _ in 0..random.between(2, 6) {
                scenario.faults.push(Fault::Start { at: from + random.between(0, 4_000_000), replaces: None });
            }
        }
        scenario.transfer = random.between(2_000, 800_000);
        for _ in 0..random.between(0, 3) {
            let transfer = random.between(1, 8);
            scenario.faults.push(match random.percent(50) {
                true => Fault::KillSending { transfer },
                false => Fault::FreezeSending { transfer, pause: random.between(500_000, 5_000_000) },
            });
        }
        scenario
    }

    fn shorter(&self) -> impl Iterator<Item = Scenario> + '_ {
        without_each(&self.faults).map(|faults| Scenario { faults, ..self.clone() })
    }
}

impl Scenario {
    /// Returns when the last fault is over.
    pub(super) fn quiet(&self) -> u64 {
        let end = |fault: &Fault| match fault {
            Fault::Loss { until, .. }
            | Fault::Twice { until, .. }
            | Fault::Partition { until, .. }
            | Fault::Cut { until, .. }
            | Fault::Freeze { until, .. }
            | Fault::Register { until, .. } => *until,
            // The last of them arrives later.
            Fault::Slow { until, most, .. } => until + most,
            Fault::Kill { at, .. } | Fault::Start { at, .. } | Fault::Suspect { at, .. } => *at,
            Fault::Leave { at, .. } => *at,
            Fault::KillAmid { .. } | Fault::KillSending { .. } => FAULTS,
            Fault::StallAmid { pause, .. } | Fault::FreezeSending { pause, .. } => FAULTS + pause,
        };
        self.faults.iter().map(end).max().unwrap_or(0)
    }
}
