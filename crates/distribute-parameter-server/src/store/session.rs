//! Sessions: which coordinator may call, and what the next one keeps.

use tonic::Status;

use super::shard::invalid;
use super::{Held, Store};
use crate::steps::EndedSteps;
use crate::wire::proto::{AttendServer, CompleteRequest, Found, Origin, RestoreRequest};

impl Store {
    /// Describes the session and what a next one could keep.
    pub(crate) fn find(&self) -> Found {
        let held = self.held.read();
        Found {
            session: held.session,
            incarnation: self.incarnation,
            // A server may have no part of the variables.
            lineage: if held.complete || !held.shards.is_empty() { held.lineage } else { 0 },
            complete: held.complete && !held.restoring,
            steps: Some(held.steps.lock().record()),
        }
    }

    /// Begins a session. It keeps the contents if it names the session in which they were made, and drops them
    /// otherwise. Sessions are numbered in the order of their coordinators: a smaller number is that of one that was
    /// given up. If the coordinator attends again and the session is new here, a restore begins with it.
    ///
    /// # Errors
    /// `failed_precondition` for a smaller number than that of an earlier call; `already_exists` if the contents, or
    /// the steps that have ended, are others than the caller has found.
    pub(crate) fn begin_session(&self, request: &AttendServer) -> Result<(), Status> {
        if request.session == 0 {
            return Err(invalid("a coordinator's session cannot be 0"));
        }
        let ended = EndedSteps::of(request.steps.as_ref())?;
        let mut fences = self.fences.write();
        let mut held = self.held.write();
        if request.session < held.session {
            return Err(Status::failed_precondition(TAKEN_OVER));
        }
        if request.session == held.session {
            // Its connection had broken.
            held.steps.lock().learn(&ended);
            return Ok(());
        }
        // No change is being made: each holds a lock on the fences.
        fences.clear();
        let kept = request.lineage != 0 && request.lineage == held.lineage;
        if !kept && request.lineage != 0 && held.lineage != 0 {
            return Err(Status::already_exists("its contents were made by another coordinator meanwhile"));
        }
        if kept && !ended.covers(&held.steps.lock()) {
            return Err(Status::already_exists("further steps were made meanwhile"));
        }
        if !kept {
            let lineage = if request.lineage == 0 { request.session } else { request.lineage };
            *held = Held { lineage, ..Held::default() };
        }
        (held.session, held.numbered) = (request.session, request.numbered);
        // What is kept was complete, unless its own restore has not ended.
        held.restoring |= request.again && !kept;
        held.steps.lock().learn(&ended);
        held.shards.values().for_each(|shard| shard.keep_steps());
        held.optimizers.values().for_each(|optimizer| optimizer.lock().keep_steps());
        Ok(())
    }

    /// Records that everything that the coordinator makes is here, and forgets the steps that had ended before a
    /// restore.
    pub(crate) fn complete(&self, request: &CompleteRequest) -> Result<(), Status> {
        let mut held = self.held.write();
        held.check_session(request.session)?;
        if request.restored {
            *held.steps.lock() = EndedSteps::default();
        }
        // A later coordinator cannot keep contents that are changed by more than numbered steps.
        held.complete = held.numbered;
        Ok(())
    }

    /// Begins or ends a restore. When it has begun, no change is being made, and none is until it ends.
    pub(crate) fn restore(&self, request: &RestoreRequest) -> Result<(), Status> {
        // Each change holds this lock while it is made.
        let _fences = self.fences.write();
        let mut held = self.held.write();
        held.check_session(request.session)?;
        held.restoring = !request.ended;
        Ok(())
    }

    /// Returns whether a change belongs to a step that has ended, and is therefore made.
    pub(super) fn has_ended(&self, origin: &Origin) -> bool {
        self.held.read().has_ended(origin)
    }
}

impl Held {
    pub(super) fn check_session(&self, session: u64) -> Result<(), Status> {
        match self.session == session {
            // A restarted server has no session.
            _ if self.session == 0 => Err(Status::unavailable("this server was started again and holds nothing")),
            true => Ok(()),
            false => Err(Status::aborted("this server belongs to another coordinator by now")),
        }
    }

    /// Checks that a call belongs to this session, and finds all of the contents.
    ///
    /// # Errors
    /// `unavailable` while they are being restored.
    pub(super) fn check_restored(&self, session: u64) -> Result<(), Status> {
        self.check_session(session)?;
        match self.restoring {
            true => Err(Status::unavailable("this server is being restored")),
            false => Ok(()),
        }
    }

    /// Records that the contents are being made, so that a part of them is not kept if the coordinator is lost.
    pub(super) fn begin_to_make(&mut self, session: u64) -> Result<(), Status> {
        self.check_session(session)?;
        self.complete = false;
        Ok(())
    }

    /// Admits a change to this session, and learns which steps have ended.
    pub(super) fn admit(&self, origin: &Origin) -> Result<(), Status> {
        self.check_restored(origin.session)?;
        if origin.step.is_some() {
            self.steps.lock().learn(&EndedSteps::of(origin.steps.as_ref())?);
        } else if self.numbered && origin.worker != u32::MAX {
            return Err(Status::failed_precondition(
                "the coordinator can be restarted in place, so functions that change variables must be numbered steps; \
                 schedule them by schedule_step",
            ));
        }
        Ok(())
    }

    /// Returns whether a change belongs to a step that has ended. Those of at-least-once delivery are made again.
    pub(super) fn has_ended(&self, origin: &Origin) -> bool {
        origin.once && origin.step.is_some_and(|step| self.steps.lock().has_ended(step))
    }
}

/// The message to a coordinator that another one has replaced.
pub(crate) const TAKEN_OVER: &str = "another coordinator has taken over; there can be one at a time";

#[cfg(test)]
mod tests {
    use distribute_device::DType;
    use distribute_rules::{OptimizerDescription, UpdateRule};

    use super::super::Creating;
    use super::*;
    use crate::wire::proto::{CreateShard, OptimizerOfShards, PullRequest, PushReply, PushRequest, StepRecord, Wanted};

    /// A server with two shards of one element and momentum, made in session 7.
    fn made() -> Store {
        let store = Store::new(99);
        attend(&store, 7, 0, None).unwrap();
        for shard in [0, 1] {
            let shape = vec![2];
            let payload = bytemuck::bytes_of(&1.0f32).to_vec().into();
            let about = CreateShard { session: 7, shard, variable: "w".to_owned(), shape, ..CreateShard::default() };
            let about = CreateShard { first_row: shard.into(), rows: 1, shards: 2, trainable: true, payload, ..about };
            store.create(&mut Creating::default(), about).unwrap();
        }
        let rule = UpdateRule::Sgd { momentum: 0.5, nesterov: false };
        let description = serde_json::to_string(&OptimizerDescription { learning_rate: 1.0, rule }).unwrap();
        let made_as = description.clone();
        let about = OptimizerOfShards { session: 7, description, shards: vec![0, 1], ..OptimizerOfShards::default() };
        store.set_optimizer(&OptimizerOfShards { made_as, ..about }).unwrap();
        assert!(!store.find().complete);
        store.complete(&CompleteRequest { session: 7, restored: false }).unwrap();
        store
    }

    fn attend(store: &Store, session: u64, lineage: u64, steps: Option<StepRecord>) -> Result<(), Status> {
        store.begin_session(&AttendServer { session, lineage, numbered: true, steps, again: false })
    }

    fn record(begun: u64, open: &[u64]) -> StepRecord {
        StepRecord { begun, open: open.to_vec() }
    }

    fn origin(session: u64, step: u64, steps: StepRecord) -> Origin {
        // Each coordinator numbers its closures anew.
        let origin = Origin { session, worker: 1, epoch: 1, once: true, horizon: 1, ..Origin::default() };
        Origin { step: Some(step), steps: Some(steps), ..origin }
    }

    fn gradient(shard: u32) -> PushRequest {
        let payload = bytemuck::bytes_of(&1.0f32).to_vec().into();
        PushRequest { shard, dtype: DType::F32.code().into(), payload, ..PushRequest::default() }
    }

    fn push(store: &Store, origin: Origin, shards: &[u32]) -> Result<PushReply, Status> {
        let mut push = store.begin_push(&PushRequest { origin: Some(origin), ..PushRequest::default() })?;
        shards.iter().try_for_each(|shard| store.push(&mut push, gradient(*shard)))?;
        store.end_push(push)
    }

    fn values(store: &Store, session: u64) -> [f32; 2] {
        [0, 1].map(|shard| {
            let request = PullRequest { session, ..PullRequest::default() };
            let mut answer = store.pull(&request, &Wanted { shard, ..Wanted::default() }).unwrap().unwrap();
            bytemuck::pod_read_unaligned(&answer.next().unwrap().payload)
        })
    }

    #[test]
    fn the_next_coordinator_keeps_everything_and_makes_no_change_twice() {
        let store = made();
        push(&store, origin(7, 0, record(1, &[0])), &[0, 1]).unwrap();
        // Step 1 has reached one of the shards when the coordinator is lost.
        push(&store, origin(7, 1, record(2, &[1])), &[0]).unwrap();
        let found = store.find();
        assert_eq!((found.session, found.lineage, found.complete), (7, 7, true));
        assert_eq!(found.steps, Some(record(2, &[1])));
        attend(&store, 8, 7, found.steps).unwrap();
        assert_eq!(values(&store, 8), [-1.5, 0.0]);
        // The old one is refused, and cannot come back.
        let late = push(&store, origin(7, 2, record(3, &[2])), &[0, 1]).unwrap_err();
        assert_eq!(late.code(), tonic::Code::Aborted);
        assert_eq!(attend(&store, 7, 7, None).unwrap_err().message(), TAKEN_OVER);
        // Step 1 is made where it was not; the number of steps and the velocity are kept.
        let reply = push(&store, origin(8, 1, record(2, &[1])), &[0, 1]).unwrap();
        assert_eq!((values(&store, 8), reply.steps), ([-1.5, -1.5], 2));
        // A step that has ended changes nothing.
        push(&store, origin(8, 0, record(2, &[0])), &[0, 1]).unwrap();
        assert_eq!(values(&store, 8), [-1.5, -1.5]);
        let reply = push(&store, origin(8, 2, record(3, &[2])), &[0, 1]).unwrap();
        assert_eq!((values(&store, 8), reply.steps), ([-3.25, -3.25], 3));
    }

    #[test]
    fn contents_that_changed_after_they_were_found_are_not_kept() {
        let store = made();
        let found = store.find();
        push(&store, origin(7, 0, record(1, &[0])), &[0, 1]).unwrap();
        push(&store, origin(7, 1, record(2, &[1])), &[0, 1]).unwrap();
        let changed = attend(&store, 8, 7, found.steps).unwrap_err();
        assert_eq!(changed.code(), tonic::Code::AlreadyExists);
        assert_eq!(attend(&store, 8, 6, None).unwrap_err().code(), tonic::Code::AlreadyExists);
        assert_eq!(store.find().session, 7);
        attend(&store, 8, 7, store.find().steps).unwrap();
        // Again, after its connection broke.
        attend(&store, 8, 7, None).unwrap();
        assert_eq!(values(&store, 8), [-1.5, -1.5]);
        // One that asks for nothing begins anew.
        attend(&store, 9, 0, None).unwrap();
        assert_eq!((store.find().lineage, store.find().complete, store.find().steps), (0, false, Some(record(0, &[]))));
    }

    #[test]
    fn changes_of_no_step_are_refused_where_steps_are_numbered() {
        let store = made();
        let closure = Origin { step: None, steps: None, ..origin(7, 0, record(1, &[0])) };
        let refused = push(&store, closure.clone(), &[0]).unwrap_err();
        assert!(refused.message().contains("schedule_step"), "{refused}");
        let wrong = origin(7, 0, record(1, &[5]));
        assert!(push(&store, wrong, &[0]).unwrap_err().message().contains("step 5 is open"));
        assert_eq!(values(&store, 7), [1.0, 1.0]);
    }

    #[test]
    fn restored_contents_that_cannot_be_kept_are_not_complete_and_their_steps_count_again() {
        let store = made();
        store
            .begin_session(&AttendServer {
                session: 8,
                lineage: 7,
                steps: store.find().steps,
                ..AttendServer::default()
            })
            .unwrap();
        push(&store, origin(8, 0, record(1, &[])), &[0, 1]).unwrap();
        assert_eq!(values(&store, 8), [1.0, 1.0]);
        store.complete(&CompleteRequest { session: 8, restored: true }).unwrap();
        push(&store, origin(8, 0, record(1, &[0])), &[0, 1]).unwrap();
        assert_eq!((values(&store, 8), store.find().complete), ([0.0, 0.0], false));
    }

    #[test]
    fn contents_that_are_being_restored_are_not_complete() {
        let store = made();
        push(&store, origin(7, 3, record(4, &[])), &[0, 1]).unwrap();
        let about = CreateShard { session: 7, variable: "w".to_owned(), shape: vec![2], ..CreateShard::default() };
        let about = CreateShard { rows: 1, shards: 2, payload: vec![0; 4].into(), ..about };
        store.create(&mut Creating::default(), about).unwrap();
        assert!(!store.find().complete);
        store.complete(&CompleteRequest { session: 7, restored: true }).unwrap();
        // Steps are numbered anew.
        assert_eq!((store.find().complete, store.find().steps), (true, Some(record(0, &[]))));
        assert!(store.complete(&CompleteRequest { session: 6, restored: true }).is_err());
    }
}
