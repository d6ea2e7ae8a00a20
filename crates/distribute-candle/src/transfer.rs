//! candle's tensors as elements of a data service.

use candle_core::{DType as CandleType, Device, Tensor, WithDType};
use distribute_data_service::{Components, Error, Kind, Result, Transfer};
use distribute_input::Array;
use distribute_types::{DType, bf16, f16};

use crate::Candle;

/// A tensor is sent as an array of its type, and arrives on the CPU. An array that a data worker serves can be received
/// as a tensor, and the reverse.
impl Transfer<Candle> for Tensor {
    fn send(&self, components: &mut Components) -> Result<()> {
        match self.dtype() {
            CandleType::F32 => array::<f32>(self)?.send(components),
            CandleType::F64 => array::<f64>(self)?.send(components),
            CandleType::F16 => array::<f16>(self)?.send(components),
            CandleType::BF16 => array::<bf16>(self)?.send(components),
            CandleType::U8 => array::<u8>(self)?.send(components),
            CandleType::I32 => array::<i32>(self)?.send(components),
            CandleType::U32 => array::<u32>(self)?.send(components),
            CandleType::I64 => array::<i64>(self)?.send(components),
            other => {
                let problem = format!("a tensor of {} has no form on the wire; convert it before", other.as_str());
                Err(Error::Element { problem })
            }
        }
    }

    fn receive(components: &mut Components) -> Result<Tensor> {
        let dtype = match components.peek().map(|component| component.kind) {
            Some(Kind::Number(dtype)) => dtype,
            // Says that the component is missing, or what it is instead.
            _ => DType::F32,
        };
        match dtype {
            DType::F32 => tensor(Array::<f32>::receive(components)?),
            DType::F64 => tensor(Array::<f64>::receive(components)?),
            DType::F16 => tensor(Array::<f16>::receive(components)?),
            DType::BF16 => tensor(Array::<bf16>::receive(components)?),
            DType::U8 => tensor(Array::<u8>::receive(components)?),
            DType::I32 => tensor(Array::<i32>::receive(components)?),
            DType::U32 => tensor(Array::<u32>::receive(components)?),
            DType::I64 => tensor(Array::<i64>::receive(components)?),
            other => Err(Error::ElementType {
                problem: format!("a component of the element is of {other}, and a tensor of candle was expected"),
            }),
        }
    }
}

fn array<T: WithDType>(tensor: &Tensor) -> Result<Array<T>> {
    let values = || tensor.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<T>();
    Ok(Array::new(tensor.dims(), values().map_err(refused)?)?)
}

fn tensor<T: WithDType>(array: Array<T>) -> Result<Tensor> {
    Tensor::from_slice(array.as_slice(), array.shape(), &Device::Cpu).map_err(refused)
}

fn refused(error: candle_core::Error) -> Error {
    Error::Element { problem: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_arrive_as_they_were_sent_and_arrays_as_tensors() {
        let whole = Tensor::arange(0f32, 12.0, &Device::Cpu).unwrap().reshape((3, 4)).unwrap();
        for dtype in
            [CandleType::F32, CandleType::F64, CandleType::F16, CandleType::BF16, CandleType::U8, CandleType::I64]
        {
            // Neither contiguous nor beginning with its memory.
            let sent = whole.to_dtype(dtype).unwrap().narrow(1, 1, 2).unwrap().t().unwrap();
            let mut components = Components::new();
            sent.send(&mut components).unwrap();
            let got: Tensor = components.receive().unwrap();
            assert_eq!((got.dtype(), got.dims()), (dtype, &[2, 3][..]));
            let values = |tensor: &Tensor| tensor.to_dtype(CandleType::F64).unwrap().to_vec2::<f64>().unwrap();
            assert_eq!(values(&got), values(&sent));
        }
        let mut components = Components::new();
        Array::from(vec![1i64, 2]).send(&mut components).unwrap();
        let got: Tensor = components.clone().receive().unwrap();
        assert_eq!(got.to_vec1::<i64>().unwrap(), [1, 2]);
        let mut texts = Components::new();
        Array::from(vec!["a".to_owned()]).send(&mut texts).unwrap();
        assert!(texts.receive::<Tensor, _>().unwrap_err().to_string().contains("is text [1]"));
    }
}
