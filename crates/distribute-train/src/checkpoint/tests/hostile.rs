//! Forged manifests and files.

use std::os::unix::fs::symlink;
use std::process::Command;

use super::super::disk::Entry;
use super::super::manifest::{MANIFEST, Manifest};
use super::*;

/// Changes a checkpoint's manifest and corrects its checksum.
fn forge(checkpoint: &Path, change: impl FnOnce(&mut Manifest)) {
    let path = checkpoint.join(MANIFEST);
    let mut manifest = Manifest::from_text(&fs::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    fs::write(path, manifest.to_text().unwrap()).unwrap();
}

#[test]
fn nothing_outside_of_a_checkpoint_is_read() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path(), 1);
    let checkpoint = folder.path().join("step-00000001");
    let model = checkpoint.join("model.safetensors");
    let outside = folder.path().join("secret.safetensors");
    fs::copy(&model, &outside).unwrap();
    fs::remove_file(&model).unwrap();
    symlink(&outside, &model).unwrap();
    let error = Snapshot::read(&checkpoint).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }) && error.to_string().contains("model.safetensors"), "{error}");
    fs::remove_file(&model).unwrap();
    for name in ["../secret.safetensors", outside.to_str().unwrap(), "model.safetensors/../../secret.safetensors"] {
        let folder = tempfile::tempdir().unwrap();
        saved(folder.path(), 1);
        let checkpoint = folder.path().join("step-00000001");
        forge(&checkpoint, |manifest| {
            let entry = manifest.files["model.safetensors"];
            manifest.files.insert(name.to_owned(), entry);
        });
        let error = Snapshot::read(&checkpoint).unwrap_err();
        assert!(error.to_string().contains("is not in its folder"), "{error}");
    }
}

#[test]
fn a_pipe_in_the_place_of_a_file_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path(), 1);
    let checkpoint = folder.path().join("step-00000001");
    for file in ["model.safetensors", MANIFEST] {
        fs::remove_file(checkpoint.join(file)).unwrap();
        assert!(Command::new("mkfifo").arg(checkpoint.join(file)).status().unwrap().success());
        let error = Snapshot::read(&checkpoint).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }) && error.to_string().contains("regular"), "{error}");
    }
}

#[test]
fn lengths_are_compared_before_anything_is_allocated() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path(), 1);
    let checkpoint = folder.path().join("step-00000001");
    // Sparse files of 1 TiB.
    let grow =
        |file: &str| fs::File::options().write(true).open(checkpoint.join(file)).unwrap().set_len(1 << 40).unwrap();
    grow("model.safetensors");
    let text = Snapshot::read(&checkpoint).unwrap_err().to_string();
    assert!(text.contains("1099511627776 bytes, and was written with"), "{text}");
    // Even if the manifest agrees, it is an error rather than an abort.
    forge(&checkpoint, |manifest| {
        manifest.files.insert("state.json".to_owned(), Entry { bytes: u64::MAX, crc32c: 0 });
    });
    assert!(Snapshot::read(&checkpoint).is_err());
    grow(MANIFEST);
    let text = Snapshot::read(&checkpoint).unwrap_err().to_string();
    assert!(text.contains("of at most"), "{text}");
}

#[test]
fn a_changed_step_and_a_changed_name_are_found() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path(), 2);
    let newest = folder.path().join("step-00000002");
    let text = fs::read_to_string(newest.join(MANIFEST)).unwrap();
    fs::write(newest.join(MANIFEST), text.replace("\"step\": 2", "\"step\": 7")).unwrap();
    assert!(Snapshot::read(&newest).unwrap_err().to_string().contains("checksum"));
    assert_eq!(restored(folder.path()).unwrap().0, 1);
    fs::remove_dir_all(&newest).unwrap();
    fs::rename(folder.path().join("step-00000001"), folder.path().join("step-00000009")).unwrap();
    let error = resumed_error(folder.path());
    assert!(error.contains("named after step 9, and is of step 1"), "{error}");
}

fn resumed_error(root: &Path) -> String {
    CheckpointManager::new(root).restore::<u64>(&strategy(), &[]).unwrap_err().to_string()
}

#[test]
fn a_checkpoint_of_another_version_stops_in_words() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path(), 2);
    let path = folder.path().join("step-00000002").join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"format\": 2", "\"format\": 3, \"more\": 1")).unwrap();
    let error = resumed_error(folder.path());
    assert!(error.contains("has format 3") && error.contains("reads format 2"), "{error}");
    fs::write(&path, r#"{"step": 2, "files": {}}"#).unwrap();
    assert!(resumed_error(folder.path()).contains("has format 1"));
}

#[test]
fn names_of_files_that_leave_the_folder_are_refused_when_saving() {
    let folder = tempfile::tempdir().unwrap();
    struct Named(&'static str);
    impl Checkpointed for Named {
        fn save(&self, _: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
            Ok(snapshot.put::<Host, _>(self.0, "w", &HostTensor::scalar(1.0))?)
        }
        fn load(&self, _: &Strategy, _: &Snapshot) -> Result<(), BoxError> {
            Ok(())
        }
    }
    for name in ["", "../model", "/tmp/model", "a/b", ".model", "model-00001-of-00002"] {
        let mut manager = CheckpointManager::new(folder.path());
        manager.save(&strategy(), 1, &[&Named(name)], &()).unwrap();
        let error = manager.finish().unwrap_err();
        assert!(matches!(error, Error::FileName { .. }), "{name:?}: {error}");
    }
    assert_eq!(names(folder.path()), ["run"]);
}

#[test]
fn a_checkpoint_that_is_replaced_while_it_is_read_is_read_whole() {
    let folder = tempfile::tempdir().unwrap();
    let mut manager = saved(folder.path(), 1);
    let path = folder.path().join("step-00000001");
    let over = std::sync::atomic::AtomicBool::new(false);
    let read = || {
        let snapshot = Snapshot::read(&path).unwrap();
        let number = snapshot.program::<u64>().unwrap();
        assert_eq!(snapshot.numbers("model", "w").unwrap(), vec![number as f64; 3]);
    };
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut count = 0;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                read();
                count += 1;
            }
            count
        });
        for number in 2..60 {
            save(&mut manager, 1, number).unwrap();
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(reader.join().unwrap() > 0);
    });
    read();
}
