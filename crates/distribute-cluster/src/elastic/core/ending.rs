//! Why a process gives up, in words.

use super::{Core, Role};

impl Core {
    /// Returns why no generation with this process was decided in time.
    pub(super) fn reason_to_end(&self) -> String {
        let (settings, number) = (&self.settings, self.base.number);
        if let Some(problem) = &self.problem {
            return format!("the register cannot be used: {problem}");
        }
        let (total, quorum) = (self.base.members.len(), self.base.majority());
        let answered = self.attempt.as_ref().map_or(1, |attempt| attempt.answered());
        let is_minority = settings.majority && answered < quorum && self.seat.is_some();
        let ready = match &self.attempt {
            Some(attempt) if number > 0 => attempt.answered().saturating_sub(self.leaving.len()) + self.waiting.len(),
            Some(attempt) => attempt.answered() + self.waiting.len(),
            None => 1 + self.waiting.len(),
        };
        let few = format!("{ready} of the at least {} members that a generation needs are there", settings.min);
        match (self.role, number) {
            (Role::Member, _) if is_minority => {
                format!("{answered} of {total} members of generation {number} answer; a majority is {quorum}")
            }
            (Role::Member, _) => format!("generation {number} is over, and {few}"),
            (_, 0) if is_minority => format!("{answered} of {total} seeds answer; a majority is {quorum}"),
            (_, 0) if self.seat.is_some() && ready < settings.min => few,
            (_, 0) if self.joiner.was_answered => "the members that were asked have decided no generation".to_owned(),
            (_, 0) => {
                let asked = settings.seeds.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
                let seat = match self.seat {
                    Some(_) => String::new(),
                    None => format!("; this process, at {}, is not one of them that may begin", self.own.control),
                };
                format!("no member of the job answers at {asked}{seat}")
            }
            _ if self.joiner.was_answered => {
                let max = settings.max;
                format!("members of generation {number} answer, but did not let it in; at most {max} are allowed")
            }
            _ => format!("no member answers that knows a generation after {}", self.base),
        }
    }
}

/// The number of addresses that are named.
const SHOWN: usize = 8;
