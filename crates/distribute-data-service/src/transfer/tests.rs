use distribute_input::{Array, Ragged, Sparse};
use distribute_types::f16;

use super::*;

fn sent<T: Transfer<L>, L>(value: &T) -> Components {
    let mut components = Components::new();
    value.send(&mut components).unwrap();
    let payload = encode(vec![components.into_message()]);
    decode(payload).unwrap().remove(0)
}

#[test]
fn elements_arrive_as_they_were_sent() {
    let numbers = Array::new([2, 2], vec![f32::NAN, -0.0, f32::MIN_POSITIVE / 2.0, 3.5]).unwrap();
    let again: Array<f32> = sent(&numbers).receive().unwrap();
    let bits = |array: &Array<f32>| array.as_slice().iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!((bits(&again), again.shape()), (bits(&numbers), numbers.shape()));
    let empty = Array::<i64>::new([0, 3], vec![]).unwrap();
    let texts = Array::from(["", "zwölf", "a\0b"].map(str::to_owned).to_vec());
    let ragged = Ragged::new(Array::from(vec![1u8, 2, 3]), [0, 2, 2, 3]).unwrap();
    let sparse = Sparse::new(Array::new([1, 2], vec![1, 0]).unwrap(), Array::from(vec![f16::ONE]), [2, 3]).unwrap();
    let element = (empty, (texts, Array::scalar(true)), ragged, sparse);
    assert_eq!(
        sent(&element).receive::<(Array<i64>, (Array<String>, Array<bool>), Ragged<u8>, Sparse<f16>), _>().unwrap(),
        element
    );
    let record = ("a line".to_owned(), vec![0u8, 255]);
    assert_eq!(sent(&record).receive::<(String, Vec<u8>), _>().unwrap(), record);
    let row = Ragged::from(Array::from(vec![i64::MIN]));
    assert_eq!(sent(&row).receive::<Ragged<i64>, _>().unwrap(), row);
}

#[test]
fn another_type_than_the_served_one_is_refused_in_words() {
    let pair = (Array::from(vec![1.0f32, 2.0]), Array::scalar(3i64));
    let text = |error: Error| error.to_string();
    let number = text(sent(&pair).receive::<(Array<f32>, Array<i32>), _>().unwrap_err());
    assert!(number.contains("component 1 of the element is i64 [], and an array of i32"), "{number}");
    let left = text(sent(&pair).receive::<Array<f32>, _>().unwrap_err());
    assert!(left.contains("a component 1 of i64 []"), "{left}");
    let missing = text(sent(&pair.0).receive::<(Array<f32>, Array<i64>), _>().unwrap_err());
    assert!(missing.contains("component 1 of the element is missing"), "{missing}");
    let ragged = Ragged::new(Array::from(vec![1u8]), [0, 1]).unwrap();
    let form = text(sent(&ragged).receive::<(Array<u8>, Array<u64>), _>().unwrap_err());
    assert!(form.contains("u8 [1] of a ragged array"), "{form}");
}

#[test]
fn sizes_are_checked_before_anything_is_allocated() {
    let component = |dtype, shape: &[u64], payload: &'static [u8]| proto::Component {
        dtype,
        form: 0,
        shape: shape.to_vec(),
        payload: Bytes::from_static(payload),
    };
    let refused = |component| {
        let message = ElementComponents { components: vec![component] };
        let components = Components::from_message(message);
        components.and_then(Components::receive::<Array<String>, _>).unwrap_err().to_string()
    };
    for (wrong, words) in [
        (component(0, &[1 << 40], b"abcd"), "f32 [1099511627776] came with 4 bytes"),
        (component(0, &[u64::MAX, 8], b""), "came with 0 bytes"),
        (component(99, &[], b""), "unknown type 99"),
        (proto::Component { form: 9, ..component(0, &[], b"abcd") }, "unknown form 9"),
        (component(TEXT, &[2], b"abcd"), "text [2] came with 4 bytes"),
        (component(TEXT, &[], b"\xff\xff\xff\xff\xff\xff\xff\xffa"), "ends after the bytes"),
        (component(TEXT, &[], b"\x01\0\0\0\0\0\0\0\xff"), "not UTF-8"),
        (component(TEXT, &[], b"\x01\0\0\0\0\0\0\0ab"), "bytes are left"),
    ] {
        let text = refused(wrong);
        assert!(text.contains(words), "{text}");
    }
}
