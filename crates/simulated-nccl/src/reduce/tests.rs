use super::*;

fn check<T: Pod + PartialEq + std::fmt::Debug>(data_type: DataType, op: RedOp, parts: &[&[T]], expected: &[T]) {
    let parts: Vec<_> = parts.iter().map(|part| bytemuck::cast_slice(part).to_vec()).collect();
    let result: Vec<T> = elements(&reduce(data_type, op, &parts).unwrap()).collect();
    assert_eq!(result, expected, "{data_type:?} {op:?}");
}

#[test]
fn integers_wrap_and_averages_truncate() {
    check(DataType::INT8, RedOp::SUM, &[&[100i8, -3], &[100, 1]], &[-56, -2]);
    check(DataType::INT32, RedOp::AVG, &[&[-5i32, 7], &[0, 1], &[1, 0]], &[-1, 2]);
    check(DataType::UINT64, RedOp::MAX, &[&[u64::MAX, 1], &[0, 2]], &[u64::MAX, 2]);
    check(DataType::UINT8, RedOp::PROD, &[&[3u8], &[5], &[2]], &[30]);
    check(DataType::INT64, RedOp::MIN, &[&[i64::MIN], &[0]], &[i64::MIN]);
    check(DataType::UINT32, RedOp::SUM, &[&[1u32], &[2]], &[3]);
}

#[test]
fn floats_of_16_bits_are_rounded_once() {
    // In 16 bits, 2048 + 1 is 2048 again; summed in 32 bits and rounded once, the result is 2050.
    let ones = [f16::ONE];
    check(DataType::FLOAT16, RedOp::SUM, &[&[f16::from_f32(2048.0)], &ones, &ones], &[f16::from_f32(2050.0)]);
    let ones = [bf16::ONE];
    check(DataType::BFLOAT16, RedOp::SUM, &[&[bf16::from_f32(256.0)], &ones, &ones], &[bf16::from_f32(258.0)]);
    check(DataType::FLOAT32, RedOp::AVG, &[&[1f32], &[2.0]], &[1.5]);
    check(DataType::FLOAT64, RedOp::MAX, &[&[1f64], &[f64::NEG_INFINITY]], &[1.0]);
}

#[test]
fn floats_of_8_bits_keep_every_value_and_round_to_even() {
    for bits in 0..=u8::MAX {
        let (four, five) = (E4m3(bits), E5m2(bits));
        if !four.to_f32().is_nan() {
            assert_eq!(E4m3::from_f32(four.to_f32()), four, "{bits:#x}");
        }
        if five.to_f32().is_finite() {
            assert_eq!(E5m2::from_f32(five.to_f32()), five, "{bits:#x}");
        }
    }
    assert_eq!([E4m3(0x7e).to_f32(), E4m3(1).to_f32(), E4m3(0x38).to_f32()], [448.0, 2f32.powi(-9), 1.0]);
    assert_eq!([E5m2(0x7b).to_f32(), E5m2(1).to_f32(), E5m2(0x3c).to_f32()], [57344.0, 2f32.powi(-16), 1.0]);
    // Halfway between 16 (0x58) and 18 (0x59), and between 18 and 20 (0x5a).
    assert_eq!([17.0, 19.0, 1e9, -1e9].map(E4m3::from_f32), [0x58, 0x5a, 0x7e, 0xfe].map(E4m3));
    assert!(E4m3::from_f32(f32::NAN).to_f32().is_nan() && E5m2(0x7c).to_f32().is_infinite());
}

#[test]
fn factors_multiply_in_the_elements_type() {
    let scaled = |data_type, bytes: &[u8], factor: &[u8]| scale(data_type, bytes, factor).unwrap();
    let halves: Vec<f32> =
        elements(&scaled(DataType::FLOAT32, bytemuck::cast_slice(&[2f32, 3.0]), &0.5f32.to_ne_bytes())).collect();
    assert_eq!(halves, [1.0, 1.5]);
    assert_eq!(scaled(DataType::UINT8, &[1, 2, 200], &[3]), [3, 6, 88]);
    assert_eq!(scale(DataType(99), &[1], &[1]), None);
}
