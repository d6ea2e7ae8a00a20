//! Fetching a variable that is larger than the memory of this process: shard after shard, message by message.

use futures_util::StreamExt;
use tonic::Status;

use super::{Parameters, VariableInfo};
use crate::Result;
use crate::wire::proto::{PullRequest, Wanted};

/// Bytes of a message's payload: large enough for the speed of the network, and small, since about three of them and
/// two windows of HTTP/2 are in memory.
const PIECE_BYTES: u32 = 4 << 20;

impl Parameters {
    /// Fetches a slot of a variable, or with an empty name the variable itself, in its own type. Passes the bytes to
    /// `show` in row-major order; the next ones are fetched when it has returned. The elements of a shard are those of
    /// one moment.
    pub(crate) async fn in_pieces(
        &self,
        variable: &VariableInfo,
        slot: &str,
        show: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let dtype = u32::from(variable.dtype.code());
        for shard in &variable.shards {
            let request = PullRequest { wire: None, part_bytes: PIECE_BYTES, ..self.pull_request() };
            let mut requests = vec![request; self.links.len()];
            requests[shard.server].wanted.push(Wanted {
                shard: shard.number,
                slot: slot.to_owned(),
                ..Wanted::default()
            });
            let wrong = |problem: &str| self.failed(shard.server, "Pull")(Status::internal(problem));
            let (mut next, len) = (0, (shard.rows.len() * variable.row_len()) as u64);
            let mut arrivals = self.fetch(requests);
            while let Some(arrival) = arrivals.next().await {
                let (server, elements) = arrival?;
                if (elements.shard, elements.dtype, elements.slot.as_str()) != (shard.number, dtype, slot) {
                    return Err(wrong("it sent other elements than it was asked for"));
                }
                self.check_order(server, &elements, variable.dtype, &mut next)?;
                if next > len {
                    return Err(wrong("it sent more elements than its shard has"));
                }
                show(&elements.payload)?;
            }
            if next != len {
                return Err(wrong("it sent fewer elements than its shard has"));
            }
        }
        Ok(())
    }
}
