use distribute_testkit::replay;

use super::*;
use crate::wire::proto::{ServedDataset, Setting};

#[test]
fn replay_data_elements() {
    let payload = |send: &dyn Fn(&mut Components)| {
        let mut components = Components::new();
        send(&mut components);
        encode(vec![components.into_message()]).to_vec()
    };
    let numbers = Array::new([2, 2], vec![f32::NAN, -0.0, 1.0, 3.5]).unwrap();
    let texts = Array::from(["", "zwölf", "a\0b"].map(str::to_owned).to_vec());
    let ragged = Ragged::new(Array::from(vec![1.0f32, 2.0, 3.0]), [0, 2, 2, 3]).unwrap();
    let sparse = Sparse::new(Array::new([1, 2], vec![1, 0]).unwrap(), Array::from(vec![bf16::ONE]), [2, 3]).unwrap();
    let pair = (numbers.clone(), Array::from(vec![1i64, 2]));
    let triple = (texts.clone(), ragged, sparse);
    let row = Ragged::from(Array::from(vec![i64::MIN]));
    let messages = [
        payload(&|components| numbers.send(components).unwrap()),
        payload(&|components| pair.send(components).unwrap()),
        payload(&|components| triple.send(components).unwrap()),
        payload(&|components| row.send(components).unwrap()),
        payload(&|components| Array::scalar(true).send(components).unwrap()),
        payload(&|components| "a line".to_owned().send(components).unwrap()),
        payload(&|components| vec![0u8, 255].send(components).unwrap()),
    ];
    replay("data_elements", data_elements, &messages, 2000);
}

#[test]
fn replay_data_service() {
    let call = |kind: u8, message: Vec<u8>| [vec![kind, message.len() as u8], message].concat();
    let setting = Setting { name: "seed".to_owned(), value: "7".to_owned() };
    let dataset = ServedDataset { name: "digits".to_owned(), settings: vec![setting] };
    let worker = |address: &str| {
        let registration = Registration { address: address.to_owned(), datasets: vec![dataset.clone()] };
        call(0, registration.encode_to_vec())
    };
    let locate = call(1, LocateRequest { dataset: "digits".to_owned() }.encode_to_vec());
    let request = ReadRequest { dataset: "digits".to_owned(), splits: 2, split: 1, parts: 1, ..ReadRequest::default() };
    let chunk = Chunk { first: 4, count: 1, ended: true, crc: 7, payload: vec![1, 2].into() };
    let messages = [
        [worker("a:1"), worker("b:1"), locate.clone(), worker("a:1")].concat(),
        [worker("a:1"), locate, call(2, request.encode_to_vec()), call(3, chunk.encode_to_vec())].concat(),
    ];
    replay("data_service", data_service, &messages, 2000);
}
