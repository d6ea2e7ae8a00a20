use distribute_testkit::replay;

use super::*;

#[test]
fn replay_parameter_server() {
    replay("parameter_server", parameter_server, &crate::store::fuzz::samples(), 1500);
}

#[test]
fn replay_outer_parameters() {
    replay("outer_parameters", outer_parameters, &crate::outer::fuzz::samples(), 1500);
}

#[test]
fn replay_function_values() {
    let nested = BTreeMap::from([("name".to_owned(), vec![None, Some((1.5, "text".to_owned()))])]);
    let messages = [
        message::encode(&7u64).unwrap(),
        message::encode(&"text".to_owned()).unwrap(),
        message::encode(&(vec![f64::NAN, 1.5], Some("text".to_owned()), 7u64)).unwrap(),
        message::encode(&nested).unwrap(),
        message::encode(&vec![1u32, 2, 3]).unwrap(),
    ];
    replay("function_values", function_values, &messages, 2000);
}

#[test]
fn replay_elements() {
    let code = |dtype: DType| dtype.code();
    let bytes = bytemuck::cast_slice::<f32, u8>(&[1.0, f32::NAN, -0.0, 1e30]);
    let messages =
        [(DType::F32, DType::F64), (DType::F16, DType::F32), (DType::BF16, DType::F64), (DType::I32, DType::I32)]
            .map(|(from, to)| [&[code(from), code(to)][..], bytes].concat());
    replay("elements", elements, &messages, 2000);
}

#[test]
fn replay_worker_messages() {
    let attend = AttendWorker {
        session: 7,
        servers: vec!["a:1".to_owned()],
        functions: vec!["step".to_owned()],
        ..AttendWorker::default()
    };
    let closure = Closure { function: "step".to_owned(), payload: vec![1, 2].into(), ..Closure::default() };
    replay("worker_messages", worker_messages, &[attend.encode_to_vec(), closure.encode_to_vec()], 2000);
}
