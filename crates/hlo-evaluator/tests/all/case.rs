//! A program of many operations, whose outputs a plugin and the evaluator compute.

use distribute_hlo::{Builder, ElementType, Result, TensorType, Value};
use distribute_types::{bf16, f16};
use fastrand::Rng;
use hlo_evaluator::{Data, Tensor};

/// The largest difference that outputs may have.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tolerance {
    /// None: all bits are the same, except those of NaN.
    Exact,
    /// This part of the larger of both and of 1.
    Relative(f64),
}

impl Tolerance {
    /// Returns the tolerance of functions of this type: exact for integers.
    pub(crate) fn of(element: ElementType) -> Tolerance {
        match element {
            ElementType::F64 => Tolerance::Relative(1e-12),
            ElementType::F32 => Tolerance::Relative(1e-5),
            ElementType::F16 => Tolerance::Relative(4e-3),
            ElementType::BF16 => Tolerance::Relative(3e-2),
            _ => Tolerance::Exact,
        }
    }
}

/// A program in the making, with inputs for each replica.
pub(crate) struct Case {
    pub(crate) b: Builder,
    pub(crate) rng: Rng,
    pub(crate) replicas: usize,
    pub(crate) inputs: Vec<Vec<Tensor>>,
    pub(crate) outputs: Vec<(String, Value, Tolerance)>,
}

impl Case {
    pub(crate) fn new(seed: u64, replicas: usize) -> Case {
        Case {
            b: Builder::new("case").replicas(replicas),
            rng: Rng::with_seed(seed),
            replicas,
            inputs: vec![Vec::new(); replicas],
            outputs: Vec::new(),
        }
    }

    /// Adds a parameter with random values.
    pub(crate) fn random(&mut self, element: ElementType, dims: &[usize]) -> Value {
        let ty = TensorType::new(element, dims);
        for inputs in &mut self.inputs {
            inputs.push(random(&mut self.rng, &ty));
        }
        self.b.parameter(ty)
    }

    /// Adds a parameter with the same values on all replicas.
    pub(crate) fn given(&mut self, tensor: Tensor) -> Value {
        let ty = tensor.ty().clone();
        for inputs in &mut self.inputs {
            inputs.push(tensor.clone());
        }
        self.b.parameter(ty)
    }

    /// Adds an output that both compute alike.
    pub(crate) fn exact(&mut self, label: impl Into<String>, value: Result<Value>) {
        self.output(label, value, Tolerance::Exact);
    }

    /// Adds an output that may differ in its last digits.
    pub(crate) fn close(&mut self, label: impl Into<String>, value: Result<Value>) {
        let element = self.b.type_of(*value.as_ref().unwrap()).unwrap().element;
        self.output(label, value, Tolerance::of(element));
    }

    pub(crate) fn output(&mut self, label: impl Into<String>, value: Result<Value>, tolerance: Tolerance) {
        let (label, value) = (label.into(), value.unwrap());
        let ty = self.b.type_of(value).unwrap().short().to_string();
        self.outputs.push((format!("{label} {ty}"), value, tolerance));
    }

    /// Returns sizes of up to `most` dimensions.
    pub(crate) fn dims(&mut self, least: usize, most: usize) -> Vec<usize> {
        let ndim = self.rng.usize(least..=most);
        (0..ndim).map(|_| self.rng.usize(1..=5)).collect()
    }

    /// Returns a random element type.
    pub(crate) fn element(&mut self) -> ElementType {
        ElementType::ALL[self.rng.usize(0..ElementType::ALL.len())]
    }
}

/// Returns random values: small ones and every kind of special one.
pub(crate) fn random(rng: &mut Rng, ty: &TensorType) -> Tensor {
    let count = ty.elements().unwrap();
    let mut float = || match rng.u8(0..24) {
        0 => f64::INFINITY,
        1 => f64::NEG_INFINITY,
        2 => f64::NAN,
        3 => -0.0,
        4 | 5 => f64::from(rng.i8(-3..=3)),
        // The steps keep a sum of a few exact in 16 bits too.
        _ => f64::from(rng.i16(-64..=64)) / 16.0,
    };
    macro_rules! integers {
        ($method:ident) => {
            (0..count)
                .map(|_| if rng.bool() { rng.$method(..) } else { rng.$method(..8) % 8 })
                .collect::<Vec<_>>()
                .into()
        };
    }
    let data: Data = match ty.element {
        ElementType::F64 => (0..count).map(|_| float()).collect::<Vec<_>>().into(),
        ElementType::F32 => (0..count).map(|_| float() as f32).collect::<Vec<_>>().into(),
        ElementType::F16 => (0..count).map(|_| f16::from_f64(float())).collect::<Vec<_>>().into(),
        ElementType::BF16 => (0..count).map(|_| bf16::from_f64(float())).collect::<Vec<_>>().into(),
        ElementType::Bool => (0..count).map(|_| rng.bool()).collect::<Vec<_>>().into(),
        ElementType::I8 => integers!(i8),
        ElementType::I16 => integers!(i16),
        ElementType::I32 => integers!(i32),
        ElementType::I64 => integers!(i64),
        ElementType::U8 => integers!(u8),
        ElementType::U16 => integers!(u16),
        ElementType::U32 => integers!(u32),
        ElementType::U64 => integers!(u64),
    };
    Tensor::new(ty.dims.clone(), data)
}

/// Returns the elements as floating-point numbers, if they are.
fn floats(tensor: &Tensor) -> Option<Vec<f64>> {
    match tensor.data() {
        Data::F64(values) => Some(values.clone()),
        Data::F32(values) => Some(values.iter().map(|&value| value.into()).collect()),
        Data::F16(values) => Some(values.iter().map(|&value| value.into()).collect()),
        Data::BF16(values) => Some(values.iter().map(|&value| value.into()).collect()),
        _ => None,
    }
}

/// Returns a difference of two tensors that is not allowed.
pub(crate) fn difference(found: &Tensor, expected: &Tensor, tolerance: Tolerance) -> Option<String> {
    let differ = |place: usize, found: f64, expected: f64| {
        let equal = match tolerance {
            _ if found.is_nan() || expected.is_nan() => found.is_nan() == expected.is_nan(),
            Tolerance::Exact => found.to_bits() == expected.to_bits(),
            _ if found == expected => true,
            Tolerance::Relative(part) => (found - expected).abs() <= part * found.abs().max(expected.abs()).max(1.0),
        };
        (!equal).then(|| format!("element {place}: found {found:?}, expected {expected:?}"))
    };
    match (floats(found), floats(expected)) {
        (Some(found), Some(expected)) => {
            found.iter().zip(&expected).enumerate().find_map(|(place, (&x, &y))| differ(place, x, y))
        }
        _ => (found != expected).then(|| format!("found {found:?}, expected {expected:?}")),
    }
}
