//! Functions of elements.

use distribute_hlo::{BinaryOp, CompareOp, ElementType, TensorType, UnaryOp};
use hlo_evaluator::Tensor;

use super::agree;

#[test]
fn unary_functions() {
    agree(1, 2, |case| {
        for element in ElementType::ALL {
            let dims = case.dims(0, 3);
            let x = case.random(element, &dims);
            for op in UnaryOp::ALL {
                // What is refused is tested with the builder.
                if let Ok(value) = case.b.unary(op, x) {
                    let exact = matches!(
                        op,
                        UnaryOp::Abs
                            | UnaryOp::Negate
                            | UnaryOp::Floor
                            | UnaryOp::Ceil
                            | UnaryOp::RoundNearestEven
                            | UnaryOp::RoundNearestAwayFromZero
                            | UnaryOp::Sign
                    );
                    if exact { case.exact(op.name(), Ok(value)) } else { case.close(op.name(), Ok(value)) }
                }
            }
        }
    });
}

#[test]
fn binary_functions() {
    agree(1, 2, |case| {
        for element in ElementType::ALL {
            let dims = case.dims(0, 3);
            let (x, y) = (case.random(element, &dims), case.random(element, &dims));
            for op in BinaryOp::ALL {
                let mut y = y;
                if op == BinaryOp::Power && element.is_integer() {
                    // The power to a negative number is not defined.
                    let seven = case.b.full(TensorType::new(element, dims.clone()), 7).unwrap();
                    y = case.b.and(y, seven).unwrap();
                }
                if let Ok(value) = case.b.binary(op, x, y) {
                    case.close(op.name(), Ok(value));
                }
            }
        }
    });
}

#[test]
fn comparisons_and_choices() {
    agree(1, 2, |case| {
        let relations = [CompareOp::Eq, CompareOp::Ne, CompareOp::Lt, CompareOp::Le, CompareOp::Gt, CompareOp::Ge];
        for element in ElementType::ALL {
            let dims = case.dims(0, 3);
            let (x, y) = (case.random(element, &dims), case.random(element, &dims));
            for relation in relations {
                let value = case.b.compare(relation, x, y);
                case.exact(format!("compare {relation:?} {element}"), value);
                if element.is_float() {
                    let value = case.b.compare_total_order(relation, x, y);
                    case.exact(format!("compare_total_order {relation:?} {element}"), value);
                }
            }
            let (pred, one) = (case.random(ElementType::Bool, &dims), case.random(ElementType::Bool, &[]));
            let value = case.b.select(pred, x, y);
            case.exact("select", value);
            let value = case.b.select(one, x, y);
            case.exact("select by a scalar", value);
            if element.is_float() || element.is_integer() {
                let low = case.b.full(TensorType::scalar(element), 1).unwrap();
                let high = case.b.full(TensorType::scalar(element), 3).unwrap();
                let value = case.b.clamp(low, x, high);
                case.exact("clamp", value);
            }
        }
    });
}

/// Compilers fold constants before they compile anything, by another program.
#[test]
fn constants_are_compared_with_their_signs() {
    agree(1, 1, |case| {
        let relations = [CompareOp::Eq, CompareOp::Ne, CompareOp::Lt, CompareOp::Le, CompareOp::Gt, CompareOp::Ge];
        for element in ElementType::ALL.into_iter().filter(|element| *element != ElementType::Bool) {
            let ty = TensorType::new(element, [2]);
            let low = if element.is_unsigned_integer() { 200 } else { -3 };
            let (low, one) = (case.b.full(ty.clone(), low).unwrap(), case.b.full(ty, 1).unwrap());
            for relation in relations {
                let value = case.b.compare(relation, low, one);
                case.exact(format!("compare {relation:?} {element}"), value);
            }
            let (largest, place) = case.b.argmax(low, 0, ElementType::I32).unwrap();
            case.exact("argmax", Ok(largest));
            case.exact("its place", Ok(place));
        }
    });
}

#[test]
fn conversions() {
    agree(1, 2, |case| {
        for from in ElementType::ALL {
            // Only numbers that every type holds: others depend on the device.
            let small = Tensor::new([5], vec![0i32, 1, 2, 3, 100]);
            let small = case.given(small);
            let x = case.b.convert(small, from).unwrap();
            let any = case.random(from, &[3, 4, 8]);
            for to in ElementType::ALL {
                let value = case.b.convert(x, to);
                case.exact(format!("convert {from}"), value);
                if !from.is_float() || to.is_float() {
                    let value = case.b.convert(any, to);
                    // Devices round to f32 first.
                    case.close(format!("convert any {from}"), value);
                }
                if (from == ElementType::Bool) == (to == ElementType::Bool) && !from.is_float() && !to.is_float() {
                    let ratio = to.size_bytes() / from.size_bytes();
                    let x = if ratio > 1 { case.b.reshape(any, &[96 / ratio, ratio]).unwrap() } else { any };
                    let value = case.b.bitcast_convert(x, to);
                    case.exact(format!("bitcast_convert {from}"), value);
                }
            }
        }
        let x = case.random(ElementType::F32, &[4]);
        let bits = case.b.bitcast_convert(x, ElementType::I32).unwrap();
        let back = case.b.bitcast_convert(bits, ElementType::F32);
        case.exact("bitcast_convert and back", back);
    });
}
