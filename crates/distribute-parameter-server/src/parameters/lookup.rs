//! Fetching rows of a variable: those of each shard from its server, in chunks that a server answers in one call.

use std::collections::BTreeMap;

use distribute_device::DType;
use futures_util::StreamExt;
use tonic::Status;

use super::{Parameters, VariableInfo};
use crate::numbers;
use crate::wire::proto::Wanted;
use crate::wire::{MAX_ANSWER_BYTES, MAX_ROWS};
use crate::{Error, Result};

/// Receives a part of a row: the index of the row in the request, the position in the row, the type of the elements and
/// their bytes.
type ShowRow<'a> = dyn FnMut(usize, usize, DType, &[u8]) -> Result<()> + 'a;

/// The requested rows of one shard.
struct Asked {
    server: usize,
    /// Counted from the shard's first row.
    rows: Vec<u64>,
    /// Their indices in the request.
    places: Vec<usize>,
    /// How many have been requested so far.
    done: usize,
}

impl Parameters {
    /// Fetches rows of a variable, in the order given, in the wire type or in the variable's own.
    pub(crate) async fn lookup(
        &self,
        variable: &VariableInfo,
        rows: &[usize],
        in_wire_type: bool,
        show: &mut ShowRow<'_>,
    ) -> Result<()> {
        let mut asked: BTreeMap<u32, Asked> = BTreeMap::new();
        for (place, row) in rows.iter().enumerate() {
            let shard = variable.shard_of(*row).ok_or_else(|| Error::Variable {
                name: variable.name.clone(),
                problem: format!("there is no row {row}; it has {}", variable.rows()),
            })?;
            let server = shard.server;
            let new = || Asked { server, rows: Vec::new(), places: Vec::new(), done: 0 };
            let asked = asked.entry(shard.number).or_insert_with(new);
            asked.rows.push((row - shard.rows.start) as u64);
            asked.places.push(place);
        }
        // In chunks that a server answers in one call.
        let row_bytes = (variable.row_len() as u64).saturating_mul(variable.dtype.size_bytes() as u64);
        let at_once = usize::try_from(MAX_ANSWER_BYTES / row_bytes.max(1)).unwrap_or(usize::MAX).clamp(1, MAX_ROWS);
        while asked.values().any(|asked| asked.done < asked.rows.len()) {
            self.lookup_some(variable, &mut asked, (in_wire_type, at_once), show).await?;
        }
        Ok(())
    }

    /// Fetches the next rows, at most `at_once` of each server.
    async fn lookup_some(
        &self,
        variable: &VariableInfo,
        asked: &mut BTreeMap<u32, Asked>,
        (in_wire_type, at_once): (bool, usize),
        show: &mut ShowRow<'_>,
    ) -> Result<()> {
        let mut request = self.pull_request();
        request.wire = request.wire.filter(|_| in_wire_type);
        let mut requests = vec![request; self.links.len()];
        let mut room = vec![at_once; self.links.len()];
        // By shard: the range of its rows in flight, and how many of their elements have arrived.
        let mut coming = BTreeMap::new();
        for (shard, asked) in asked.iter_mut() {
            let some = asked.done..asked.rows.len().min(asked.done + room[asked.server]);
            if some.is_empty() {
                continue;
            }
            room[asked.server] -= some.len();
            let rows = numbers::rows_to_bytes(asked.rows[some.clone()].iter().copied());
            requests[asked.server].wanted.push(Wanted { shard: *shard, rows, ..Wanted::default() });
            asked.done = some.end;
            coming.insert(*shard, (some, 0u64));
        }
        let row_len = variable.row_len();
        let mut arrivals = self.fetch(requests);
        while let Some(arrival) = arrivals.next().await {
            let (server, elements) = arrival?;
            let dtype = self.dtype_of(server, &elements)?;
            let (Some(asked), Some((some, next))) = (asked.get(&elements.shard), coming.get_mut(&elements.shard))
            else {
                continue;
            };
            let mut at = *next as usize;
            self.check_order(server, &elements, dtype, next)?;
            let too_many = || self.failed(server, "Pull")(Status::internal("it sent more rows than were asked for"));
            if *next > (some.len() * row_len) as u64 {
                return Err(too_many());
            }
            let mut bytes = &elements.payload[..];
            while !bytes.is_empty() {
                let (row, inside) = (at / row_len.max(1), at % row_len.max(1));
                let Some(place) = asked.places[some.clone()].get(row) else {
                    return Err(too_many());
                };
                let len = bytes.len().min((row_len - inside) * dtype.size_bytes());
                let (part, rest) = bytes.split_at(len);
                show(*place, inside, dtype, part)?;
                at += len / dtype.size_bytes();
                bytes = rest;
            }
        }
        let short = coming.iter().find(|(_, (some, next))| *next != (some.len() * row_len) as u64);
        match short.and_then(|(shard, _)| asked.get(shard)) {
            Some(asked) => {
                let problem = Status::internal("it sent fewer rows than were asked for");
                Err(self.failed(asked.server, "Pull")(problem))
            }
            None => Ok(()),
        }
    }
}
