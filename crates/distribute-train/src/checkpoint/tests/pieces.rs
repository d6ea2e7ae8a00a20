//! Tensors that are put and read in pieces.

use std::collections::BTreeMap;

use distribute_device::DType;
use parking_lot::Mutex;

use super::super::disk::{Fault, Faults};
use super::super::survey::BLOCK_BYTES;
use super::*;

/// A tensor of two whole blocks and a part of one.
const TABLE: usize = 2 * BLOCK_BYTES + 1000;

/// Tensors whose bytes are put and read in pieces of odd sizes.
pub(super) struct Tables {
    streams: bool,
    tensors: Vec<(&'static str, DType, Vec<usize>)>,
    pub(super) values: Mutex<BTreeMap<String, Vec<u8>>>,
}

impl Tables {
    fn new(streams: bool, seed: u8) -> Tables {
        let mut tables = Tables::small(streams, seed);
        tables.add("table", DType::U8, &[TABLE / 4, 4], seed);
        tables
    }

    pub(super) fn small(streams: bool, seed: u8) -> Tables {
        let mut tables = Tables { streams, tensors: Vec::new(), values: Mutex::default() };
        let all = [("a", DType::F32, &[3, 5][..]), ("z", DType::I64, &[]), ("empty", DType::F32, &[0, 7])];
        for (name, dtype, shape) in all.into_iter().chain([("m", DType::F32, &[400][..])]) {
            tables.add(name, dtype, shape, seed);
        }
        tables
    }

    pub(super) fn add(&mut self, name: &'static str, dtype: DType, shape: &[usize], seed: u8) {
        let len = shape.iter().product::<usize>() * dtype.size_bytes();
        // Of a length that divides no block, so that blocks differ.
        let period: Vec<u8> = (0..9973u32).map(|at| (at * 31 + at / 256) as u8 ^ seed ^ name.len() as u8).collect();
        self.values.get_mut().insert(name.to_owned(), period.into_iter().cycle().take(len).collect());
        self.tensors.push((name, dtype, shape.to_vec()));
    }
}

impl Checkpointed for Tables {
    fn streams(&self) -> bool {
        self.streams
    }

    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        let tensors: Vec<_> = self.tensors.iter().map(|(name, dtype, shape)| (*name, *dtype, &shape[..])).collect();
        let values = self.values.lock();
        snapshot.put_in_pieces(strategy, "model", &tensors, |index, put| {
            let bytes = &values[tensors[index].0];
            Ok(bytes.chunks(bytes.len() / 3 + 1).try_for_each(&mut *put)?)
        })?;
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        for (name, bytes) in self.values.lock().iter_mut() {
            let middle = bytes.len() / 3;
            let mut read = Vec::new();
            for range in [0..middle, middle..bytes.len()] {
                for piece in snapshot.pieces("model", name, range)? {
                    read.extend_from_slice(&piece?);
                }
            }
            bytes.copy_from_slice(&read);
        }
        Ok(())
    }
}

fn one() -> Strategy {
    Strategy::default_strategy().unwrap()
}

fn manager(root: &Path, most: usize) -> CheckpointManager {
    CheckpointManager::new(root).max_shard_bytes(most)
}

/// Returns the files of tensors, with their indices.
fn files(checkpoint: &Path) -> BTreeMap<String, Vec<u8>> {
    let of_tensors = names(checkpoint).into_iter().filter(|name| name.starts_with("model"));
    of_tensors.map(|name| (name.clone(), fs::read(checkpoint.join(name)).unwrap())).collect()
}

#[test]
fn tensors_in_pieces_make_the_files_of_whole_ones() {
    for (most, count) in [(1 << 30, 1), (500, 4)] {
        let [streamed, collected] = [true, false].map(|streams| {
            let folder = tempfile::tempdir().unwrap();
            let mut manager = manager(folder.path(), most);
            manager.save(&one(), 1, &[&Tables::new(streams, 1)], &7).unwrap();
            manager.finish().unwrap();
            folder
        });
        let checkpoint = |folder: &tempfile::TempDir| folder.path().join("step-00000001");
        let [of_streamed, of_collected] = [&streamed, &collected].map(|folder| files(&checkpoint(folder)));
        let tensors = of_streamed.keys().filter(|name| name.ends_with(".safetensors"));
        assert_eq!(tensors.count(), count, "{:?}", of_streamed.keys());
        assert!(of_streamed == of_collected, "{:?}, {:?}", of_streamed.keys(), of_collected.keys());
        // Either restores what either has saved, whole or in pieces.
        let expected = Tables::new(true, 1);
        for folder in [&streamed, &collected] {
            for streams in [true, false] {
                let tables = Tables::new(streams, 2);
                assert!(*tables.values.lock() != *expected.values.lock());
                let found = CheckpointManager::new(folder.path()).restore(&one(), &[&tables]).unwrap();
                assert_eq!(found, Some((1, 7)));
                assert!(*tables.values.lock() == *expected.values.lock());
            }
        }
        let opened = manager(streamed.path(), most).open_newest().unwrap().unwrap();
        assert_eq!((opened.step(), opened.describe("model", "z")), (1, Some((DType::I64, &[][..]))));
        assert!(opened.pieces("model", "z", 0..9).is_err() && opened.pieces("model", "y", 0..0).is_err());
        let table: crate::Result<Vec<Vec<u8>>> = opened.pieces("model", "table", 3..TABLE).unwrap().collect();
        assert!(table.unwrap().concat() == expected.values.lock()["table"][3..]);
    }
}

#[test]
fn parts_that_stream_and_others_share_a_file_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = manager(folder.path(), 1 << 20);
    let parts: [&dyn Checkpointed; 2] = [&Weights::new(&[2.0; 3]), &Tables::small(true, 1)];
    checkpoints.save(&one(), 1, &parts, &()).unwrap();
    checkpoints.finish().unwrap();
    let (tables, weights) = (Tables::small(false, 2), Weights::new(&[0.0; 3]));
    CheckpointManager::new(folder.path()).restore::<()>(&one(), &[&tables, &weights]).unwrap().unwrap();
    assert_eq!(weights.values(), [2.0; 3]);
    assert!(*tables.values.lock() == *Tables::small(true, 1).values.lock());
    assert_eq!(files(&folder.path().join("step-00000001")).len(), 3);
    // One name twice, and more or fewer bytes than announced: nothing is left of them.
    let twice: [&dyn Checkpointed; 2] = [&Tables::small(true, 1), &Tables::small(true, 1)];
    let mut repeated = Tables::small(false, 1);
    repeated.tensors.push(("a", DType::F32, vec![3, 5]));
    for parts in [&twice[..], &[&repeated]] {
        let told = checkpoints.save(&one(), 2, parts, &()).and_then(|()| checkpoints.finish()).unwrap_err();
        assert!(matches!(&told, Error::PutTwice { file, .. } if file == "model"), "{told}");
    }
    for (shape, words) in [(vec![401], "fewer than its 1604 bytes"), (vec![399], "more than its 1596 bytes")] {
        let mut wrong = Tables::small(true, 1);
        wrong.tensors[3].2 = shape;
        let told = checkpoints.save(&one(), 2, &[&wrong], &()).unwrap_err().to_string();
        assert!(told.contains(words), "{told}");
        wrong.streams = false;
        assert!(checkpoints.save(&one(), 2, &[&wrong], &()).unwrap_err().to_string().contains(words));
    }
    assert_eq!(names(folder.path()), ["latest", "run", "step-00000001"]);
}

#[test]
fn a_crash_or_a_failure_while_pieces_are_written_leaves_the_earlier_checkpoint() {
    let save = |root: &Path, faults: &Faults, step: u64, fault: Fault| {
        let mut manager = manager(root, 500).with_disk(Disk::with(faults));
        manager.restore::<u64>(&one(), &[]).unwrap();
        faults.set(fault);
        manager.save(&one(), step, &[&Tables::small(true, step as u8)], &step)?;
        manager.finish()
    };
    let begun = |fault: Fault| {
        let (folder, faults) = (sharded::folder_in_memory(), Faults::default());
        save(folder.path(), &faults, 1, Fault::None).unwrap();
        (save(folder.path(), &faults, 2, fault), folder, faults)
    };
    let (outcome, _, faults) = begun(Fault::None);
    outcome.unwrap();
    let count = faults.count();
    assert!(count > 30, "{:?}", faults.log());
    for at in 1..=count {
        for fault in [Fault::Killed(at), Fault::Fails(at)] {
            let (outcome, folder, faults) = begun(fault);
            faults.set(Fault::None);
            let tables = Tables::small(true, 3);
            let found = CheckpointManager::new(folder.path()).restore::<u64>(&one(), &[&tables]).unwrap();
            let step = found.unwrap().1;
            assert!(step == 2 || (step == 1 && outcome.is_err()), "{fault:?}: {step}, {outcome:?}");
            assert!(*tables.values.lock() == *Tables::small(true, step as u8).values.lock(), "{fault:?}");
        }
    }
}

/// Changes a byte of the file before it reads the last block.
struct Changing<'a>(&'a Path);

impl Checkpointed for Changing<'_> {
    fn streams(&self) -> bool {
        true
    }

    fn save(&self, _: &Strategy, _: &mut Snapshot) -> Result<(), BoxError> {
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        let file = self.0.join("step-00000001/model.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(file, bytes).unwrap();
        let pieces: Vec<_> = snapshot.pieces("model", "table", 0..TABLE)?.collect();
        assert!(pieces.len() == 3 && pieces[..2].iter().all(Result::is_ok), "{}", pieces.len());
        pieces.into_iter().try_for_each(|piece| piece.map(drop))?;
        Ok(())
    }
}

#[test]
fn a_file_that_changes_while_it_is_restored_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = manager(folder.path(), 1 << 30);
    let mut tables = Tables::new(true, 1);
    tables.tensors.drain(..4);
    checkpoints.save(&one(), 1, &[&tables], &()).unwrap();
    checkpoints.finish().unwrap();
    let told = checkpoints.restore::<()>(&one(), &[&Changing(folder.path())]).unwrap_err();
    assert!(matches!(&told, Error::Damaged { problem, .. } if problem.contains("table has changed")), "{told}");
}

#[test]
fn workers_get_the_same_pieces_from_the_chief() {
    let folder = sharded::folder_in_memory();
    let all = sharded::two_workers(|rank, strategy| {
        let mut checkpoints = manager(folder.path(), 500);
        // The other worker's values are not asked for.
        checkpoints.save(strategy, 1, &[&Tables::small(false, rank as u8)], &()).unwrap();
        checkpoints.finish_everywhere(strategy).unwrap();
        let tables = Tables::small(false, 5);
        checkpoints.restore::<()>(strategy, &[&tables]).unwrap().unwrap();
        // Another order is told on both.
        let mut other = Tables::small(false, 5);
        if rank == 1 {
            other.values.get_mut().pop_first().unwrap();
        }
        let told = checkpoints.restore::<()>(strategy, &[&other]).unwrap_err();
        assert!(matches!(told, Error::LoadOrder { .. }), "{told}");
        tables.values.into_inner()
    });
    let expected = Tables::small(false, 0).values.into_inner();
    assert!(all.iter().all(|values| *values == expected));
}
