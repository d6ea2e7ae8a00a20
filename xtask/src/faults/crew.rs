//! The tasks of one job, and the ledgers that they print.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use distribute_testkit::{Job, Outcome, Signal};

use crate::error::text;

/// How a task is started.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) name: String,
    /// Program and arguments.
    pub(super) command: Vec<String>,
    pub(super) env: Vec<(String, String)>,
}

impl Task {
    pub(super) fn env(mut self, name: &str, value: impl Into<String>) -> Task {
        self.env.push((name.to_owned(), value.into()));
        self
    }

    /// Has another program start this one, such as `ip netns exec HOST`.
    pub(super) fn within(mut self, outer: &[&str]) -> Task {
        self.command.splice(..0, outer.iter().map(|word| (*word).to_owned()));
        self
    }
}

/// A line of a ledger. Times are milliseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line {
    Begins {
        at: u64,
    },
    Joined {
        members: u32,
        chief: bool,
        at: u64,
    },
    Step {
        step: u64,
        members: u32,
        at: u64,
    },
    /// A step that a peer has computed and thrown away.
    Dropped {
        at: u64,
    },
    Works {
        at: u64,
    },
    Noticed {
        at: u64,
    },
    End(End),
}

/// How a training ended, apart from its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) steps: u64,
    /// The number of examples, the sum of their numbers, and that of the squares.
    pub(super) seen: [u64; 3],
    pub(super) weights: String,
}

pub(super) fn parse(line: &str) -> Option<Line> {
    let words: Vec<&str> = line.split(' ').collect();
    let after = |name: &str| words.iter().position(|word| *word == name).and_then(|at| words.get(at + 1).copied());
    let number = |name: &str| after(name)?.trim_end_matches(':').parse::<u64>().ok();
    let at = number("at");
    Some(match *words.first()? {
        "begins" => Line::Begins { at: at? },
        "joined" => Line::Joined { members: number("members")? as u32, chief: after("chief")? == "true", at: at? },
        "step" => Line::Step { step: number("step")?, members: number("members")? as u32, at: at? },
        "dropped" => Line::Dropped { at: at? },
        "works" => Line::Works { at: at? },
        "noticed" => Line::Noticed { at: at? },
        "end" => {
            let seen = words.get(3..6)?.iter().map(|number| number.parse().ok()).collect::<Option<Vec<u64>>>()?;
            Line::End(End {
                steps: number("end")?,
                seen: [seen[0], seen[1], seen[2]],
                weights: after("weights")?.to_owned(),
            })
        }
        _ => return None,
    })
}

/// Returns the milliseconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

/// A task that was started. It is killed on drop.
pub(super) struct Member {
    pub(super) task: Task,
    job: Job,
    /// How it ended.
    pub(super) outcome: Option<Outcome>,
    /// When this was seen.
    pub(super) ended_at: u64,
}

impl Member {
    pub(super) fn start(task: Task) -> Result<Member, String> {
        let (program, arguments) = task.command.split_first().ok_or("a task without a command")?;
        let job = Job::builder(program).args(arguments).without_env("TF_CONFIG");
        let job = task.env.iter().fold(job, |job, (name, value)| job.env(name, value));
        Ok(Member { job: job.start().map_err(text)?, task, outcome: None, ended_at: 0 })
    }

    pub(super) fn signal(&self, signal: Signal) -> Result<(), String> {
        self.job.kill(0, signal).map_err(text)
    }

    pub(super) fn pid(&self) -> Result<u32, String> {
        self.job.pid(0).map_err(text)
    }

    pub(super) fn printed(&self) -> String {
        self.job.printed(0).unwrap_or_default()
    }

    pub(super) fn lines(&self) -> Vec<Line> {
        self.printed().lines().filter_map(parse).collect()
    }

    /// Returns whether the task has ended.
    pub(super) fn has_ended(&mut self) -> bool {
        if self.outcome.is_none() {
            self.outcome = self.job.wait(0, Duration::ZERO).ok();
            self.ended_at = now();
        }
        self.outcome.is_some()
    }

    /// Returns the first step, and when it was made.
    pub(super) fn first_step(&self) -> Option<(u64, u64)> {
        self.lines().into_iter().find_map(|line| match line {
            Line::Step { step, at, .. } => Some((step, at)),
            _ => None,
        })
    }

    /// Returns the last step, and when it was made.
    pub(super) fn last_step(&self) -> Option<(u64, u64)> {
        self.lines().iter().rev().find_map(|line| match line {
            Line::Step { step, at, .. } => Some((*step, *at)),
            _ => None,
        })
    }

    pub(super) fn end(&self) -> Option<End> {
        self.lines().into_iter().find_map(|line| if let Line::End(end) = line { Some(end) } else { None })
    }

    /// Returns the members of its present generation, and whether it is the chief.
    pub(super) fn standing(&self) -> Option<(u32, bool)> {
        self.lines().iter().rev().find_map(|line| match line {
            Line::Joined { members, chief, .. } => Some((*members, *chief)),
            _ => None,
        })
    }

    /// Returns when it has first said after a moment that another task is lost.
    pub(super) fn noticed(&self, since: u64) -> Option<u64> {
        self.lines().into_iter().find_map(|line| match line {
            Line::Noticed { at } if at >= since => Some(at),
            _ => None,
        })
    }

    /// Returns when it has made the first step with a larger number after a moment.
    pub(super) fn step_after(&self, since: u64, step: u64) -> Option<u64> {
        self.lines().into_iter().find_map(|line| match line {
            Line::Step { step: other, at, .. } if at >= since && other > step => Some(at),
            _ => None,
        })
    }

    /// Returns the exit code; -1 for a signal.
    pub(super) fn code(&self) -> Option<i32> {
        self.outcome.as_ref().map(|outcome| outcome.code.unwrap_or(-1))
    }
}

/// Waits until something is found among tasks.
pub(super) fn until<T>(
    members: &mut [Member],
    limit: Duration,
    what: &str,
    mut find: impl FnMut(&mut [Member]) -> Option<T>,
) -> Result<T, String> {
    let end = Instant::now() + limit;
    loop {
        if let Some(found) = find(members) {
            return Ok(found);
        }
        if Instant::now() > end {
            return Err(format!("{what} did not happen within {limit:?}; {}", last_words(members)));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits for the end of all tasks.
pub(super) fn until_ended(members: &mut [Member], limit: Duration) -> Result<(), String> {
    let ended = |members: &mut [Member]| {
        let mut all = true;
        members.iter_mut().for_each(|member| all &= member.has_ended());
        all.then_some(())
    };
    until(members, limit, "the end of all tasks", ended)
}

/// Returns what each task said last.
pub(super) fn last_words(members: &[Member]) -> String {
    let of = |member: &Member| {
        let printed = member.printed();
        let lines: Vec<&str> = printed.lines().collect();
        let code = member.code().map_or_else(|| "runs".to_owned(), |code| format!("exit code {code}"));
        format!("{} ({code}): {}", member.task.name, lines[lines.len().saturating_sub(2)..].join(" / "))
    };
    members.iter().map(of).collect::<Vec<_>>().join("; ")
}
