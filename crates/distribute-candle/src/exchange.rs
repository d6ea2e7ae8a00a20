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
    /// The tag of its collectives; 0 without a name.
    pub(crate) tag: u32,
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
    pub(crate) fn failed(self, error: Error) -> candle_core::Error {
        let Error::Mismatch { here, there, .. } = &error else { return candle_core::Error::wrap(error) };
        // In host memory a call has its tag in the layout, and one of the calls is this rank's. Calls on devices have
        // nothing else there, and may both be other ranks'.
        let in_host_memory = [self.tag, self.tag ^ here.layout ^ there.layout];
        let names = NAMES.lock();
        let named = |tags: [u32; 2]| match tags.map(|tag| names.get(&tag)) {
            [Some(one), Some(other)] if one != other => Some((one, other)),
            _ => None,
        };
        match named(in_host_memory).or_else(|| named([here.layout, there.layout])) {
            Some((one, other)) => candle_core::Error::Msg(format!(
                "one replica is in {one} and another one in {other}; call the same layers in the same order on all \
                 replicas, and add their results in the same order: {error}"
            )),
            None => candle_core::Error::wrap(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use distribute_collectives::{DType, DeviceGroup, DeviceImplementation, Options};
    use distribute_device::Devices;

    use super::*;

    #[test]
    fn both_layers_are_named_if_replicas_are_at_different_ones() {
        let options = Options::default().timeout(Duration::from_secs(60));
        let groups = ProcessGroup::local_with(3, &options).unwrap();
        let devices = Devices::with_cpus(3).unwrap();
        let paths = ["model.one", "model.one", "model.other"];
        let told = |group: &ProcessGroup, rank: usize| {
            let exchange = Exchange::new("backward", paths[rank]);
            exchange.all_reduce(group, vec![1.0f32], ReduceOp::Sum).unwrap_err().to_string()
        };
        let told_on_devices = |group: &ProcessGroup, rank: usize| {
            let exchange = Exchange::new("backward", paths[rank]);
            let device = devices.open(&format!("CPU:{rank}").parse().unwrap()).unwrap();
            let group = DeviceGroup::new(group, device.clone(), DeviceImplementation::Auto).unwrap();
            let (stream, values) = (device.create_stream().unwrap(), device.allocate(4).unwrap());
            let call = group.all_reduce_tagged(&values, DType::F32, ReduceOp::Sum, exchange.tag, &*stream);
            exchange.failed(call.unwrap_err()).to_string()
        };
        let on_ranks = |act: &(dyn Fn(&ProcessGroup, usize) -> String + Sync)| -> Vec<String> {
            std::thread::scope(|scope| {
                let ranks = groups.iter().enumerate().map(|(rank, group)| scope.spawn(move || act(group, rank)));
                let ranks: Vec<_> = ranks.collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            })
        };
        let all = on_ranks(&told_on_devices).into_iter().chain(on_ranks(&told));
        for error in all {
            assert!(error.contains(r#"backward of "model.one""#), "{error}");
            assert!(error.contains(r#"backward of "model.other""#), "{error}");
        }
    }
}
