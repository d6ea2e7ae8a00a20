//! Errors of lowering, each once, and names of operations.

use burn::tensor::{DType, TensorData};
use burn_backend::distributed::ReduceOperation;
use burn_backend::ops::{FloatTensorOps, IntTensorOps};
use burn_backend::{Distribution, Scalar, TensorMetadata};
use burn_capture::CaptureBackend as B;
use burn_ir::{
    AllReduceOpIr, BinaryOpIr, CustomOpIr, DistributedOperationIr, NumericOperationIr, OperationIr, TensorId, TensorIr,
};
use distribute_burn_hlo::{Error, Lowering};
use distribute_hlo::{Builder, ElementType, TensorType};

use crate::harness::{Recorded, refused_recorded};

fn tensor(id: u64, dims: &[usize]) -> TensorIr {
    TensorIr::uninit(TensorId::new(id), dims.to_vec().into(), DType::F32)
}

/// Returns the error of one operation that reads tensors 0 and 1, of two elements, and makes tensor 2.
fn error_of(operation: OperationIr) -> Error {
    let mut builder = Builder::new("refused");
    let ty = TensorType::new(ElementType::F32, [2]);
    let (x, y) = (builder.parameter(ty.clone()), builder.parameter(ty));
    let mut lowering = Lowering::new(&mut builder);
    lowering.bind(TensorId::new(0), x);
    lowering.bind(TensorId::new(1), y);
    lowering.lower(&[operation], &[TensorId::new(2)]).unwrap_err()
}

fn sum(lhs: TensorIr, rhs: TensorIr, out: TensorIr) -> OperationIr {
    OperationIr::NumericFloat(DType::F32, NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out }))
}

#[test]
fn errors_name_the_operation_and_the_remedy() {
    assert_eq!(
        error_of(sum(tensor(0, &[2]), tensor(7, &[2]), tensor(2, &[2]))).to_string(),
        "NumericFloat(Add) reads tensor 7, which is neither bound nor made by an operation before it"
    );
    assert_eq!(
        error_of(sum(tensor(0, &[2]), tensor(1, &[3]), tensor(2, &[2]))).to_string(),
        "NumericFloat(Add): tensor 1 is f32[2], but the graph says f32[3]"
    );
    let error = error_of(sum(tensor(0, &[2]), tensor(1, &[2]), tensor(2, &[3])));
    assert!(matches!(error, Error::Hlo { .. }), "{error}");
    let custom = CustomOpIr::new("flash", &[tensor(0, &[2])], &[tensor(2, &[2])]);
    assert_eq!(
        error_of(OperationIr::Custom(custom)).to_string(),
        "Custom(flash) is not lowered to StableHLO: \"flash\" is an operation of another crate; compute it by \
         operations of burn"
    );
    let reduce = AllReduceOpIr {
        tensor: tensor(0, &[2]),
        out: tensor(2, &[2]),
        op: ReduceOperation::Sum,
        device_ids: Vec::new(),
    };
    let error = error_of(OperationIr::Distributed(DistributedOperationIr::AllReduce(reduce))).to_string();
    assert!(error.starts_with("Distributed(AllReduce) is not lowered"), "{error}");
}

/// A call, the data of its tensors, and a part of the error.
type Case = (&'static str, Vec<TensorData>, fn(&[Recorded]) -> Recorded);

#[test]
fn options_without_a_meaning_are_refused() {
    let x = || TensorData::from([1.0f32, 2.0]);
    let n = || TensorData::from([1i64, 2]);
    let none = || TensorData::new(Vec::<f32>::new(), [0]);
    let small = || TensorData::from([1i8, 2]);
    let cases: Vec<Case> = vec![
        ("integers are divided by 0", vec![n()], |t| B::int_div_scalar(t[0].clone(), Scalar::Int(0))),
        ("integers are divided by 0", vec![n()], |t| B::int_remainder_scalar(t[0].clone(), Scalar::Int(0))),
        ("the number Int(300) does not fit into i8", vec![small()], |t| {
            B::int_add_scalar(t[0].clone(), Scalar::Int(300))
        }),
        ("the lower limit 2 is above the upper limit 1", vec![x()], |t| {
            B::float_clamp(t[0].clone(), Scalar::Float(2.0), Scalar::Float(1.0))
        }),
        ("neither a largest nor a smallest", vec![none()], |t| B::float_max(t[0].clone())),
        ("neither a largest nor a smallest", vec![none()], |t| B::float_argmax(t[0].clone(), 0, DType::I64.into())),
        ("is not a probability", vec![x()], |t| {
            let device = t[0].device();
            B::float_random([2].into(), Distribution::Bernoulli(1.5), &device, DType::F32.into())
        }),
        ("there are no numbers from 3 up to 1", vec![x()], |t| {
            let device = t[0].device();
            B::float_random([2].into(), Distribution::Uniform(3.0, 1.0), &device, DType::F32.into())
        }),
    ];
    for (expected, given, function) in cases {
        let error = refused_recorded(&given, |_, tensors| vec![function(&tensors)]);
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn random_numbers_need_a_state() {
    let out = tensor(2, &[2]);
    let op = burn_ir::RandomOpIr { out, distribution: Distribution::Default };
    let error = error_of(OperationIr::Float(DType::F32, burn_ir::FloatOperationIr::Random(op))).to_string();
    assert_eq!(
        error,
        "Float(Random) is not lowered to StableHLO: the program has no random state; call Lowering::set_random_state \
         first"
    );
}

#[test]
fn operations_whose_results_are_not_needed_are_left_out() {
    let mut builder = Builder::new("live");
    let x = builder.parameter(TensorType::new(ElementType::F32, [2]));
    let mut lowering = Lowering::new(&mut builder);
    lowering.bind(TensorId::new(0), x);
    let dead = CustomOpIr::new("dead", &[tensor(0, &[2])], &[tensor(5, &[2])]);
    let operations = [OperationIr::Custom(dead), sum(tensor(0, &[2]), tensor(0, &[2]), tensor(2, &[2]))];
    lowering.lower(&operations, &[TensorId::new(2)]).unwrap();
    let value = lowering.value(TensorId::new(2)).unwrap();
    let program = builder.finish(&[value]).unwrap();
    assert_eq!(program.operations().count(), 1);
}
