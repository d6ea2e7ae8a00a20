//! The collectives in which ranks wait, and the ranks they wait for, from what all tasks report of their calls.

use std::collections::{BTreeMap, BTreeSet};

use super::peers::finite;
use crate::progress::{CallNow, GroupCall};
use crate::status::{CollectiveView, RankView, State, TaskView};

/// The calls that a task has last reported.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reported<'a> {
    pub(super) task: &'a TaskView,
    pub(super) calls: &'a [GroupCall],
    /// Seconds since the report.
    pub(super) heard_s: f64,
}

/// A rank of a group, as its task has reported it.
#[derive(Debug, Clone, Copy)]
struct Member<'a> {
    call: &'a GroupCall,
    task: &'a TaskView,
    heard_s: f64,
}

/// A group is its name, its members' digest and its size.
type Key<'a> = (&'a str, u64, u32);

/// Returns the collectives in which ranks are blocked, those that have waited longest first.
pub(super) fn collectives(reports: &[Reported<'_>]) -> Vec<CollectiveView> {
    let mut groups: BTreeMap<Key<'_>, BTreeMap<u32, Member<'_>>> = BTreeMap::new();
    // The group in which each named rank is blocked, for ranks that are missing elsewhere.
    let mut blocked: BTreeMap<&str, (&GroupCall, &CallNow)> = BTreeMap::new();
    for Reported { task, calls, heard_s } in reports {
        for call in calls.iter().filter(|call| call.rank < call.world_size) {
            let member = Member { call, task, heard_s: *heard_s };
            groups.entry((&call.group, call.members, call.world_size)).or_default().insert(call.rank, member);
            if let Some(now) = member.blocks() {
                blocked.insert(&call.name, (call, now));
            }
        }
    }
    let mut views: Vec<_> = groups.iter().filter_map(|(key, members)| collective(*key, members, &blocked)).collect();
    views.sort_by(|one, other| other.waiting_s.total_cmp(&one.waiting_s));
    views.truncate(MOST_GROUPS);
    views
}

impl<'a> Member<'a> {
    /// Returns the call in which the rank is blocked, unless its process has ended.
    fn blocks(&self) -> Option<&'a CallNow> {
        let lives = !matches!(self.task.state, State::Ended | State::Failed);
        self.call.now.as_ref().filter(|now| lives && finite(now.blocked_s).is_some())
    }

    /// Returns for how long the rank has been blocked in a call with this number, in seconds.
    fn blocked_s(&self, sequence: u64) -> Option<f64> {
        let now = self.blocks().filter(|now| now.sequence == sequence)?;
        Some(finite(now.blocked_s)? + self.heard_s)
    }
}

fn collective(
    (group, members_digest, world_size): Key<'_>,
    members: &BTreeMap<u32, Member<'_>>,
    blocked: &BTreeMap<&str, (&GroupCall, &CallNow)>,
) -> Option<CollectiveView> {
    let sequences: BTreeSet<u64> = members.values().filter_map(|member| Some(member.blocks()?.sequence)).collect();
    let has_entered = |rank: u32, sequence: u64| members.get(&rank).is_some_and(|member| member.call.calls > sequence);
    // The report of a task that has been stopped may say that it waits in a call which is long over. So it is the first
    // call that a rank has not entered which holds the group up.
    let is_incomplete = |sequence: &u64| {
        (members.len() as u64) < u64::from(world_size) || members.values().any(|member| member.call.calls <= *sequence)
    };
    let sequence = sequences.iter().copied().find(is_incomplete).or(sequences.first().copied())?;
    let waits: Vec<_> = members.values().filter_map(|member| Some((member, member.blocked_s(sequence)?))).collect();
    let (now, _) = waits.iter().find_map(|(member, waited)| Some((member.blocks()?, waited)))?;
    let ranks = || 0..world_size.min(MOST_RANKS);
    let missing: Vec<u32> = ranks().filter(|rank| !has_entered(*rank, sequence)).collect();
    Some(CollectiveView {
        group: group.to_owned(),
        members: format!("{members_digest:016x}"),
        world_size,
        operation: now.operation.clone(),
        sequence,
        call: now.call.clone(),
        bytes: now.bytes,
        waiting_s: waits.iter().map(|(_, waited)| *waited).max_by(f64::total_cmp)?,
        waiting: waits.iter().map(|(member, _)| member.call.rank).collect(),
        entered: ranks().filter(|rank| has_entered(*rank, sequence)).collect(),
        missing_count: missing.len(),
        missing: missing.into_iter().take(MOST_MISSING).map(|rank| view(rank, members.get(&rank), blocked)).collect(),
    })
}

/// Describes a rank that others wait for.
fn view(rank: u32, member: Option<&Member<'_>>, blocked: &BTreeMap<&str, (&GroupCall, &CallNow)>) -> RankView {
    let Some(Member { call, task, heard_s }) = member.copied() else { return RankView { rank, ..RankView::default() } };
    let elsewhere = blocked.get(call.name.as_str()).filter(|(other, _)| !std::ptr::eq(*other, call));
    RankView {
        rank,
        name: Some(call.name.clone()),
        task: Some(task.task.clone()),
        state: Some(task.state),
        straggler: task.straggler,
        last: call.last.clone(),
        last_ago_s: finite(call.last_ago_s).map(|ago| ago + heard_s),
        waits_in: elsewhere.map(|(other, now)| format!("{} of group {}", now.call, other.group)),
        heard_s: Some(heard_s),
    }
}

const MOST_GROUPS: usize = 256;

/// Ranks of a group that are looked at.
const MOST_RANKS: u32 = 65_536;

/// Missing ranks that are described.
const MOST_MISSING: usize = 64;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Job;
    use super::*;
    use crate::progress::{Activity, Event, Message, Vitals};
    use crate::status::End;

    const GROUP: &str = "world";

    /// Returns what a rank reports that has made some calls, and is blocked in the last one for some seconds.
    fn call(group: &str, world_size: u32, rank: u32, calls: u64, blocked_s: Option<f64>) -> GroupCall {
        let now = |blocked_s| CallNow {
            operation: "all_reduce".into(),
            sequence: calls - 1,
            call: format!("all_reduce #{} of 8 f32, sum", calls - 1),
            bytes: 32,
            since_s: blocked_s,
            blocked_s: Some(blocked_s),
        };
        GroupCall {
            group: group.into(),
            members: 7,
            world_size,
            rank,
            name: format!("worker:{rank}"),
            calls,
            now: blocked_s.map(now),
            last: Some("barrier #3".into()),
            last_ago_s: Some(2.0),
        }
    }

    /// Returns a job whose workers have reported these calls at the time 1 s.
    fn job(reports: &[Vec<GroupCall>]) -> Job {
        let mut job = Job::new("toy");
        for (rank, calls) in reports.iter().enumerate() {
            let task = format!("worker:{rank}");
            job.expect(&task);
            job.start(&task, 100 + rank as u32, Duration::ZERO);
            let vitals = Vitals { activity: Activity::Training, calls: calls.clone(), ..Vitals::default() };
            job.receive(&Message { task, event: Event::Vitals(vitals) }, Duration::from_secs(1));
        }
        job
    }

    fn views(reports: &[Vec<GroupCall>]) -> Vec<CollectiveView> {
        job(reports).view(Duration::from_secs(3)).collectives
    }

    #[test]
    fn the_rank_that_has_not_entered_is_missing() {
        let reports = [Some(5.0), None, Some(8.0)].into_iter().zip(0..);
        let reports =
            reports.map(|(blocked, rank)| vec![call(GROUP, 3, rank, if blocked.is_some() { 5 } else { 4 }, blocked)]);
        let views = views(&reports.collect::<Vec<_>>());
        let [view] = &views[..] else { panic!("{views:?}") };
        assert_eq!((view.operation.as_str(), view.sequence, view.world_size, view.bytes), ("all_reduce", 4, 3, 32));
        assert_eq!((&view.waiting[..], &view.entered[..], view.missing_count), (&[0, 2][..], &[0, 2][..], 1));
        // The longest wait, and the time since the report.
        assert!((view.waiting_s - 10.0).abs() < 1e-9, "{view:?}");
        let missing = &view.missing[0];
        assert_eq!(
            (missing.rank, missing.name.as_deref(), missing.task.as_deref()),
            (1, Some("worker:1"), Some("worker:1"))
        );
        assert_eq!((missing.last.as_deref(), missing.last_ago_s), (Some("barrier #3"), Some(4.0)));
    }

    #[test]
    fn nobody_waits_where_all_compute_or_run_operations_in_the_background() {
        let mut background = call(GROUP, 2, 0, 5, Some(1.0));
        background.now.as_mut().unwrap().blocked_s = None;
        assert_eq!(views(&[vec![background], vec![call(GROUP, 2, 1, 5, None)]]), []);
        assert_eq!(views(&[vec![], vec![]]), []);
    }

    #[test]
    fn a_rank_without_a_report_is_missing_by_its_number() {
        let views = views(&[vec![call(GROUP, 3, 0, 5, Some(1.0))], vec![call(GROUP, 3, 1, 5, Some(1.0))], vec![]]);
        assert_eq!(
            (views[0].missing_count, views[0].missing[0].rank, views[0].missing[0].name.as_deref()),
            (1, 2, None)
        );
    }

    #[test]
    fn all_have_entered_while_they_exchange() {
        let views = views(&[vec![call(GROUP, 2, 0, 5, Some(1.0))], vec![call(GROUP, 2, 1, 5, Some(0.5))]]);
        assert_eq!((views[0].missing_count, &views[0].entered[..]), (0, &[0, 1][..]));
    }

    #[test]
    fn an_old_report_of_a_stopped_rank_does_not_hide_that_it_is_missing() {
        // Rank 1 was in call 3 when it reported; by now the others wait for it in call 4.
        let views = views(&[vec![call(GROUP, 2, 0, 5, Some(6.0))], vec![call(GROUP, 2, 1, 4, Some(0.01))]]);
        assert_eq!((views[0].sequence, views[0].missing[0].rank), (4, 1));
    }

    #[test]
    fn a_rank_that_waits_in_another_group_says_so() {
        let mut other = call("world/0.1", 1, 0, 9, Some(3.0));
        other.name = "worker:1".into();
        let views = views(&[vec![call(GROUP, 2, 0, 5, Some(6.0))], vec![call(GROUP, 2, 1, 4, None), other]]);
        let world = views.iter().find(|view| view.group == GROUP).unwrap();
        assert_eq!(world.missing[0].waits_in.as_deref(), Some("all_reduce #8 of 8 f32, sum of group world/0.1"));
    }

    #[test]
    fn a_rank_of_a_process_that_has_ended_waits_for_nobody() {
        let mut job = job(&[vec![call(GROUP, 2, 0, 5, Some(6.0))], vec![call(GROUP, 2, 1, 4, None)]]);
        job.end("worker:0", End::Code(1), Duration::from_secs(2));
        assert_eq!(job.view(Duration::from_secs(3)).collectives, []);
    }

    #[test]
    fn numbers_that_are_none_and_ranks_outside_are_left_out() {
        let nan = call(GROUP, 2, 0, 5, Some(f64::NAN));
        let outside = call(GROUP, 2, 7, 5, Some(1.0));
        assert_eq!(views(&[vec![nan], vec![outside]]), []);
        let huge = call(GROUP, u32::MAX, 0, 5, Some(1.0));
        let views = views(&[vec![huge]]);
        assert_eq!((views[0].missing.len(), views[0].entered.len()), (MOST_MISSING, 1));
    }
}
