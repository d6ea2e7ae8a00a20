//! Giving servers their parts of a checkpoint, piece by piece.

use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use distribute_cluster::threads::block_in_place;
use distribute_train::checkpoint::{CheckpointManager, Snapshot};

use super::super::Inner;
use super::{MODEL, OPTIMIZER, OptimizerStates};
use crate::wire::proto::{CreateShard, Done, RestoreRequest};
use crate::wire::ps;
use crate::{Error, Result};

/// A server's part of a checkpoint, which fits what was created on it.
pub(super) struct Plan {
    server: usize,
    elements: Vec<Part>,
    /// The slots of each optimizer, in the order of their numbers.
    slots: Vec<Vec<Part>>,
    states: OptimizerStates,
}

/// A shard's elements, or those of a slot, in a checkpoint.
struct Part {
    shard: CreateShard,
    file: &'static str,
    name: String,
    /// The bytes of its rows in the whole tensor.
    range: Range<usize>,
}

impl Inner {
    /// Opens the newest checkpoint in a folder from which a restarted server is restored: not one that the training has
    /// left by loading an earlier one, whose values the other servers do not continue.
    ///
    /// # Errors
    /// [`Error::ServerLost`] if there is none of this training; [`Error::Train`] if it cannot be read.
    pub(crate) fn newest(&self, server: usize, folder: &Path) -> Result<Snapshot> {
        let lost = |why: String| Error::ServerLost {
            server: server as u32,
            address: self.parameters.address(server).to_owned(),
            why: format!("it was started again and holds nothing, and {why}"),
        };
        // Damaged checkpoints are skipped with a warning. Files are read here, and other tasks continue meanwhile.
        let abandoned = self.made.lock().abandoned.clone();
        let newest = block_in_place(|| CheckpointManager::new(folder).open_newest_but(&abandoned))?;
        let snapshot = newest.ok_or_else(|| {
            let (folder, but) = (folder.display(), "newer than the one that was loaded last, which it does not have");
            lost(match abandoned.is_empty() {
                true => format!("there is no checkpoint in {folder}"),
                false => format!("the checkpoints in {folder} are {but}; save one after loading an earlier one"),
            })
        })?;
        // Parameters of different runs must not be mixed.
        if snapshot.run() != self.made.lock().run {
            let of = snapshot.run().map_or_else(|| "another run".to_owned(), |run| format!("run {run}"));
            let (step, folder) = (snapshot.step(), folder.display());
            return Err(lost(format!(
                "the newest checkpoint in {folder}, of step {step}, is one of {of}, which this training has neither \
                saved nor restored"
            )));
        }
        Ok(snapshot)
    }

    /// Restores a restarted server's part, until [`end_restore`](Inner::end_restore) is called. Learning rates are
    /// those of the other servers.
    pub(crate) async fn restore_again(&self, server: usize, snapshot: &Snapshot) -> Result<()> {
        let plan = self.plan(server, snapshot)?;
        self.begin_restore(server).await?;
        self.restore(plan, snapshot).await
    }

    /// Restores all servers, which refuse changes and reads meanwhile.
    pub(super) async fn restore_all(&self, plans: Vec<Plan>, snapshot: &Snapshot) -> Result<()> {
        let servers: Vec<usize> = plans.iter().map(|plan| plan.server).collect();
        for server in &servers {
            self.begin_restore(*server).await?;
        }
        for plan in plans {
            self.restore(plan, snapshot).await?;
        }
        for server in servers {
            self.end_restore(server).await?;
        }
        Ok(())
    }

    async fn begin_restore(&self, server: usize) -> Result<()> {
        self.tell_restore(server, false).await
    }

    /// Lets a server be used whose part was restored.
    pub(crate) async fn end_restore(&self, server: usize) -> Result<()> {
        self.tell_restore(server, true).await
    }

    async fn tell_restore(&self, server: usize, ended: bool) -> Result<()> {
        let parameters = &self.parameters;
        let request = RestoreRequest { session: parameters.session(), ended };
        let told = parameters.link(server).call::<Done>(ps!("Restore"), request, parameters.message_timeout()).await;
        told.map(drop).map_err(parameters.failed(server, "Restore"))
    }

    /// Finds a server's part of a checkpoint.
    ///
    /// # Errors
    /// [`Error::Train`] if the checkpoint has not what was created on it.
    pub(super) fn plan(&self, server: usize, snapshot: &Snapshot) -> Result<Plan> {
        let made = self.made.lock();
        let mine = || made.shards.iter().filter(|(of, _)| *of == server).map(|(_, shard)| shard);
        let elements = mine().map(|shard| Part::find(snapshot, MODEL, shard.variable.clone(), shard.clone()));
        let elements = elements.collect::<Result<_>>()?;
        let mut slots = Vec::new();
        for (description, names) in &made.optimizers {
            let updated = mine().filter(|shard| names.contains(&shard.variable));
            let parts = updated.flat_map(|shard| {
                description.rule.slots().iter().map(move |slot| {
                    let name = format!("{}/{slot}", shard.variable);
                    let shard = CreateShard { slot: (*slot).to_owned(), ..shard.clone() };
                    Part::find(snapshot, OPTIMIZER, name, shard)
                })
            });
            slots.push(parts.collect::<Result<_>>()?);
        }
        let states = snapshot.get_state::<OptimizerStates>(OPTIMIZER)?.unwrap_or_default();
        Ok(Plan { server, elements, slots, states })
    }

    /// Takes over the learning rates of a checkpoint.
    pub(super) fn take_learning_rates(&self, snapshot: &Snapshot) -> Result<()> {
        let states = snapshot.get_state::<OptimizerStates>(OPTIMIZER)?.unwrap_or_default();
        let mut made = self.made.lock();
        for (number, (_, learning_rate)) in states.by_number() {
            if let Some((description, _)) = made.optimizers.get_mut(number as usize) {
                description.learning_rate = learning_rate;
            }
        }
        Ok(())
    }

    /// Describes the step counts of variables in a checkpoint that servers cannot continue, if there are any.
    pub(super) fn lost_counts(&self, snapshot: &Snapshot) -> Result<Option<String>> {
        let states = snapshot.get_state::<OptimizerStates>(OPTIMIZER)?.unwrap_or_default();
        let made = self.made.lock();
        let optimizer = made.optimizers.first();
        Ok(optimizer.and_then(|(description, names)| states.lost_counts(&description.rule, names)))
    }

    /// Creates a server's shards and optimizers from a checkpoint, with the current learning rates.
    async fn restore(&self, plan: Plan, snapshot: &Snapshot) -> Result<()> {
        let Plan { server, elements, slots, states } = plan;
        for part in &elements {
            self.send(server, part, snapshot).await?;
        }
        let states = states.by_number();
        let steps = states.iter().map(|(number, (steps, _))| (*number, *steps)).collect();
        for (number, parts) in (0..).zip(slots) {
            let requests = self.optimizer_requests(&self.made.lock(), number, &steps);
            self.set_optimizers(requests.into_iter().filter(|(of, _)| *of == server).collect()).await?;
            for part in &parts {
                self.send(server, part, snapshot).await?;
            }
        }
        Ok(())
    }

    /// Sends a part to its server, which uses it when it has all of it.
    async fn send(&self, server: usize, part: &Part, snapshot: &Snapshot) -> Result<()> {
        let Part { shard, file, name, range } = part;
        let (mut pieces, mut is_sent) = (snapshot.pieces(file, name, range.clone())?, false);
        let next = || {
            if is_sent {
                return None;
            }
            // Other tasks of the runtime continue while the disk is waited for.
            let piece = block_in_place(|| pieces.next()).transpose();
            let more = pieces.bytes_left() > 0;
            is_sent = !more;
            let message = |payload| CreateShard { payload, more, ..shard.clone() };
            Some(piece.map(|piece| message(piece.map_or_else(Bytes::new, Bytes::from))).map_err(Error::from))
        };
        let parameters = &self.parameters;
        let link = parameters.link(server);
        let done = link.send::<CreateShard, Done, Error>(ps!("Create"), next, parameters.message_timeout()).await?;
        done.map(drop).map_err(parameters.failed(server, "Create"))
    }
}

impl Part {
    /// Finds a shard's rows in a whole tensor.
    fn find(snapshot: &Snapshot, file: &'static str, name: String, shard: CreateShard) -> Result<Part> {
        let wrong = |problem| distribute_train::Error::Restore { name: name.clone(), problem };
        let found = snapshot.describe(file, &name);
        let (dtype, shape) = found.ok_or_else(|| wrong(format!("the checkpoint's {file} has none of this name")))?;
        let expected: Vec<usize> = shard.shape.iter().map(|extent| *extent as usize).collect();
        if u32::from(dtype.code()) != shard.dtype || shape != expected {
            let problem = format!("the checkpoint has {dtype} {shape:?}, and the program {expected:?}");
            return Err(wrong(problem).into());
        }
        let row_bytes = expected.iter().skip(1).product::<usize>() * dtype.size_bytes();
        let start = shard.first_row as usize * row_bytes;
        let range = start..start + shard.rows as usize * row_bytes;
        Ok(Part { shard, file, name, range })
    }
}
