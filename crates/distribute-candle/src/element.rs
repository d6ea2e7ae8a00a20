//! candle's tensors as elements of datasets.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use distribute_device::Device;
use distribute_input::{BoxError, Element, ElementSpec, Pad};

use crate::Candle;
use crate::device::{candle_device_of, on_device};

impl Element<Candle> for Tensor {
    fn stack(items: &[Tensor]) -> distribute_input::Result<Tensor> {
        Tensor::stack(items, 0).map_err(refused("stacking"))
    }

    fn rows(&self) -> distribute_input::Result<usize> {
        self.dim(0).map_err(refused("counting"))
    }

    fn row(&self, index: usize) -> distribute_input::Result<Tensor> {
        self.get(index).map_err(refused("taking a row"))
    }

    fn slice(&self, rows: Range<usize>) -> distribute_input::Result<Tensor> {
        self.narrow(0, rows.start, rows.len()).map_err(refused("slicing"))
    }

    fn gather(&self, rows: &[usize]) -> distribute_input::Result<Tensor> {
        let rows: Vec<u32> = rows.iter().map(|row| u32::try_from(*row).unwrap_or(u32::MAX)).collect();
        let gather = || self.index_select(&Tensor::new(rows.as_slice(), self.device())?, 0);
        gather().map_err(refused("gathering"))
    }

    fn concat(items: &[Tensor]) -> distribute_input::Result<Tensor> {
        Tensor::cat(items, 0).map_err(refused("concatenating"))
    }

    fn spec(&self) -> Vec<ElementSpec> {
        vec![ElementSpec::new(self.dims(), Tensor::dtype(self).as_str())]
    }

    fn fetch_to_device(self, device: &Arc<dyn Device>) -> Result<Tensor, BoxError> {
        Ok(on_device(&self, &candle_device_of(device)?)?)
    }
}

impl Pad<Candle> for Tensor {
    fn padded(items: &[Tensor]) -> distribute_input::Result<Vec<Tensor>> {
        let dims = items.first().map_or(0, |first| first.dims().len());
        if let Some(index) = items.iter().position(|item| item.dims().len() != dims) {
            let (got, expected) = (items[index].dims().to_vec(), items[0].dims().to_vec());
            return Err(distribute_input::Error::UnequalShapes { action: "padded_batch", index, got, expected });
        }
        let mut items = items.to_vec();
        for dim in 0..dims {
            let largest = items.iter().map(|item| item.dims()[dim]).max().unwrap_or(0);
            for item in &mut items {
                let missing = largest - item.dims()[dim];
                *item = item.pad_with_zeros(dim, 0, missing).map_err(refused("padding"))?;
            }
        }
        Ok(items)
    }
}

fn refused(action: &'static str) -> impl FnOnce(candle_core::Error) -> distribute_input::Error {
    move |error| distribute_input::Error::library(action, error)
}
