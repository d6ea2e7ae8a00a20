//! The files of a checkpoint.

use super::manifest::{Manifest, is_plain_name};
use super::open::state_of;
use super::snapshot::Snapshot;
use super::tensor_file::{LENGTH_BYTES, header_bytes, tensors_of};

/// A manifest, with its checksum or with one that is made to fit.
pub(crate) fn manifest(bytes: &[u8]) -> bool {
    let read = Manifest::from_text(bytes);
    let fitting = serde_json::from_slice::<Manifest>(bytes).ok().and_then(|manifest| manifest.to_text().ok());
    let fitting = fitting.and_then(|text| Manifest::from_text(&text).ok());
    let Some(manifest) = read.ok().or(fitting) else { return false };
    // No name leads out of the folder.
    assert!(manifest.files.keys().all(|name| is_plain_name(name) && !name.contains(['/', '\\', ':', '\0'])));
    let text = manifest.to_text().expect("a manifest can be written");
    let again = Manifest::from_text(&text).expect("it was written");
    assert_eq!(Manifest { crc32c: again.crc32c, ..manifest }, again);
    true
}

/// The beginning of a file of tensors, or the file of the state.
pub(crate) fn tensor_file(bytes: &[u8]) -> bool {
    if let Ok(state) = state_of(bytes) {
        let text = serde_json::to_vec(&serde_json::json!({ "state": state })).expect("a state can be written");
        assert_eq!(state_of(&text).ok(), Some(state));
    }
    let Some((first, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else { return false };
    // The length of the file is known before it is read, and a header describes as many bytes as there are.
    let longest = header_bytes(*first, u64::MAX);
    let Ok(len) = header_bytes(*first, bytes.len() as u64) else {
        assert!(longest.is_err() || longest.is_ok_and(|len| len > rest.len()));
        return false;
    };
    let (header, body) = rest.split_at(len);
    let all = [bytes.len() as u64, u64::MAX, 0].map(|file_bytes| tensors_of(header, file_bytes));
    assert!(all[2].is_err());
    let Ok(tensors) = &all[0] else { return false };
    let (mut end, before) = ((LENGTH_BYTES + len) as u64, (LENGTH_BYTES + len) as u64);
    for tensor in tensors {
        // They lie one after another, without gaps, within the file.
        assert_eq!(tensor.start, end);
        end += tensor.bytes as u64;
        let elements = tensor.shape.iter().try_fold(1usize, |product, extent| product.checked_mul(*extent));
        assert_eq!(elements.and_then(|elements| elements.checked_mul(tensor.dtype.size_bytes())), Some(tensor.bytes));
    }
    assert_eq!(end, before + body.len() as u64);
    true
}

/// A snapshot.
pub(crate) fn snapshot(bytes: &[u8]) -> bool {
    let Ok(snapshot) = Snapshot::from_bytes(bytes) else { return false };
    let again = snapshot.to_bytes().expect("a snapshot can be written");
    assert!(Snapshot::from_bytes(&again).expect("it was written") == snapshot);
    for file in ["model", "optimizer"] {
        for name in snapshot.names(file) {
            let (dtype, shape, tensor) = snapshot.tensor(file, name).expect("it has this name");
            assert_eq!(shape.iter().product::<usize>() * dtype.size_bytes(), tensor.len());
            assert!(tensor.len() <= bytes.len());
            let _ = snapshot.numbers(file, name);
        }
    }
    true
}

/// Returns manifests, files of tensors, and snapshots, for the corpus.
#[cfg(test)]
pub(crate) fn samples() -> [Vec<Vec<u8>>; 3] {
    use super::disk::Entry;
    use super::manifest::FORMAT;
    use super::run::RunId;
    use distribute_device::DType;
    let files = ["state.json", "model.safetensors"].map(|name| (name.to_owned(), Entry { bytes: 3, crc32c: 4 }));
    let run: RunId = "0123456789abcdef".parse().expect("an id");
    let manifest = Manifest {
        format: FORMAT,
        run,
        sequence: 1,
        step: 12,
        backup: false,
        stays: true,
        kept_since: None,
        files: files.into(),
        crc32c: 0,
    };
    let mut snapshot = Snapshot::new(7);
    snapshot.put_bytes("model", "w", DType::F32, &[2, 1], vec![1; 8]);
    snapshot.put_bytes("optimizer", "count", DType::I64, &[], vec![2; 8]);
    snapshot.put_bytes("model", "empty", DType::BF16, &[0, 4], Vec::new());
    snapshot.put_state("epoch", &3).expect("a number");
    let of_snapshot = snapshot.to_bytes().expect("a snapshot");
    let file = |header: &str| [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let tensor =
        |data: u64, rest: &str| format!(r#"{{"a":{{"dtype":"U8","shape":[{data}],"data_offsets":[0,{data}]}}{rest}}}"#);
    let small = [file(&tensor(2, "")), vec![1, 2]].concat();
    let manifest = [manifest.to_text().expect("a manifest")];
    [manifest.to_vec(), vec![of_snapshot.clone(), small], vec![of_snapshot]]
}
