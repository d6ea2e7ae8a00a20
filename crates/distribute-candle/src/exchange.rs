//! Tags of what layers exchange inside a model's graph. Replicas pair these exchanges by their order, which is that of
//! candle's walk through the graph; by the tags they notice if they are at different layers.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use candle_core::Result;
use distribute_collectives::{Error, ProcessGroup, ReduceOp};
use distribute_device::Element;
use distribute_types::{FNV32, fnv1a_32};
use parking_lot::Mutex;

/// The numbers that a layer exchanges in one direction. They are only combined with those of the same layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exchange {
    tag: u32,
}

/// The names of all exchanges of layers of this process, by tag.
static NAMES: LazyLock<Mutex<BTreeMap<u32, String>>> = LazyLock::new(Mutex::default);

impl Exchange {
    /// An exchange that has no name, as that of a function of a program.
    pub(crate) const UNNAMED: Exchange = Exchange { tag: 0 };

    /// Returns the exchange of the layer at this path, as "forward" or "backward".
    pub(crate) fn new(direction: &str, path: &str) -> Exchange {
        let name = format!("{direction} of {path:?}");
        let tag = fnv1a_32(FNV32, name.bytes());
        NAMES.lock().insert(tag, name);
        Exchange { tag }
    }

    /// Reduces values over the ranks of a group.
    pub(crate) fn all_reduce<T: Element>(
        self,
        group: &ProcessGroup,
        mut values: Vec<T>,
        op: ReduceOp,
    ) -> Result<Vec<T>> {
        if self == Exchange::UNNAMED {
            group.all_reduce(&mut values, op).map_err(candle_core::Error::wrap)?;
            return Ok(values);
        }
        let reduced = group.start().tag(self.tag).all_reduce(values, op).and_then(|work| work.wait());
        reduced.map_err(|error| self.failed(error))
    }

    /// Collects every rank's values, of which rank r has `lens[r]`.
    pub(crate) fn all_gather<T: Element>(self, group: &ProcessGroup, own: &[T], lens: &[usize]) -> Result<Vec<T>> {
        let mut all = vec![T::default(); lens.iter().sum()];
        let gathered = group.parts(lens).tag(self.tag).all_gather(own, &mut all);
        gathered.map_err(|error| self.failed(error))?;
        Ok(all)
    }

    /// Names both layers if replicas are at different ones.
    fn failed(self, error: Error) -> candle_core::Error {
        let Error::Mismatch { here, there, .. } = &error else { return candle_core::Error::wrap(error) };
        // A call has its tag in the layout, and one of the calls is this rank's.
        let names = NAMES.lock();
        match [self.tag, self.tag ^ here.layout ^ there.layout].map(|tag| names.get(&tag)) {
            [Some(own), Some(other)] if own != other => candle_core::Error::Msg(format!(
                "one replica is in {own} and another one in {other}; call the same layers in the same order on all \
                 replicas, and add their results in the same order: {error}"
            )),
            _ => candle_core::Error::wrap(error),
        }
    }
}
