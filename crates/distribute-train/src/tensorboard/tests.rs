use std::process::Command;

use super::*;

const PIXELS: [u8; 8] = [0, 50, 100, 150, 200, 255, 7, 8];

fn written() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = EventWriter::create(folder.path().join("train")).unwrap();
    for step in 0..4 {
        writer.scalar("epoch_loss", step, 1.0 / (step + 1) as f64).unwrap();
    }
    writer.histogram("fc1.weight", 3, [-0.5, 0.0, 0.25, 0.25, 1.0, f64::NAN]).unwrap();
    writer.text("notes", 3, "**bold** and ünïcode").unwrap();
    writer.image("digit", 3, &Image::new([2, 3, 1], &PIXELS[..6]).unwrap()).unwrap();
    writer.image("photo", 3, &Image::new([1, 2, 3], &PIXELS[..6]).unwrap()).unwrap();
    writer.flush().unwrap();
    let path = writer.path.clone();
    (folder, path)
}

#[test]
fn buckets_count_every_finite_value_once() {
    let (all, left_out) = histogram([-0.5, 0.0, 0.25, 0.25, 1.0, f64::NAN, 1e300, -1e300, f64::INFINITY]);
    assert_eq!((all.num, all.min, all.max, left_out), (7.0, -1e300, 1e300, 2));
    assert_eq!(all.bucket.iter().sum::<f64>(), 7.0);
    assert_eq!(all.bucket.len(), all.bucket_limit.len());
    assert!(all.bucket_limit.is_sorted());
    assert_eq!(histogram([f64::NAN]), (wire::Histogram::default(), 1));
}

#[test]
fn values_that_a_histogram_leaves_out_are_told_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = EventWriter::create(folder.path()).unwrap();
    for (values, told) in [([0.5, 1.0], false), ([0.5, f64::NAN], true), ([f64::INFINITY, 1.0], true)] {
        writer.histogram("fc1.weight", 1, values).unwrap();
        assert_eq!(writer.has_left_out, told);
    }
}

#[test]
fn events_can_be_read_back() {
    use distribute_input::Dataset;
    use distribute_input::read::{ReadOptions, TfRecords};
    let (_folder, path) = written();
    let records = Dataset::from_files([path]).read(TfRecords, ReadOptions::default());
    let events: Vec<wire::Event> =
        records.iter().map(|record| wire::Event::decode(&record.unwrap()[..]).unwrap()).collect();
    assert_eq!(events.len(), 9);
    assert_eq!(events[0].what, Some(wire::What::FileVersion("brain.Event:2".to_owned())));
    let Some(wire::What::Summary(summary)) = &events[4].what else { panic!("{:?}", events[4]) };
    assert_eq!((events[4].step, summary.value[0].tag.as_str()), (3, "epoch_loss"));
    assert_eq!(summary.value[0].kind, Some(wire::Kind::SimpleValue(0.25)));
    let Some(wire::What::Summary(summary)) = &events[6].what else { panic!("{:?}", events[6]) };
    assert_eq!((events[6].step, summary.value[0].metadata.clone()), (3, Some(wire::Metadata::of_text())));
    assert_eq!(summary.value[0].kind, Some(wire::Kind::Tensor(wire::Tensor::of_text("**bold** and ünïcode"))));
    let Some(wire::What::Summary(summary)) = &events[7].what else { panic!("{:?}", events[7]) };
    let Some(wire::Kind::Image(image)) = &summary.value[0].kind else { panic!("{:?}", summary) };
    assert_eq!((image.height, image.width, image.colorspace), (2, 3, 1));
}

#[cfg(feature = "object-store")]
#[test]
fn a_store_gets_files_of_limited_size_with_all_events() {
    use distribute_storage::Location;
    let folder = Location::open("memory://events/train").unwrap();
    let mut writer = EventWriter::create("memory://events/train").unwrap();
    writer.most_bytes = Some(1000);
    let events = |name: &str| {
        let bytes = folder.join(name).read(1 << 20).unwrap();
        let mut rest = &bytes[..];
        let mut events = Vec::new();
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            events.push(wire::Event::decode(&rest[12..12 + length]).unwrap());
            rest = &rest[16 + length..];
        }
        events
    };
    for step in 0..100 {
        writer.scalar("loss", step, 0.5).unwrap();
    }
    writer.close().unwrap();
    let names: Vec<String> = folder.list().unwrap().into_iter().map(|entry| entry.name).collect();
    assert!(names.len() > 2 && names.iter().all(|name| name.contains("tfevents")), "{names:?}");
    let mut steps = Vec::new();
    for name in &names {
        let all = events(name);
        assert_eq!(all[0].what, Some(wire::What::FileVersion("brain.Event:2".to_owned())));
        steps.extend(all[1..].iter().map(|event| event.step));
    }
    steps.sort_unstable();
    assert_eq!(steps, (0..100).collect::<Vec<i64>>());
}

#[test]
fn tensorboard_reads_them() {
    let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/peers/tf/bin/python");
    let installed = Command::new(python).args(["-c", "import tensorboard"]).output();
    if !installed.is_ok_and(|output| output.status.success()) {
        distribute_testkit::skipped(
            "TensorBoard is not installed \
             (python3 -m venv target/peers/tf && target/peers/tf/bin/pip install tensorboard pillow)",
        );
        return;
    }
    let (folder, _) = written();
    let script = "import sys; from tensorboard.backend.event_processing.event_accumulator import EventAccumulator; \
                  events = EventAccumulator(sys.argv[1]); events.Reload(); \
                  print([(e.step, e.value) for e in events.Scalars('epoch_loss')]); \
                  h = events.Histograms('fc1.weight')[0].histogram_value; print(h.num, h.min, h.max, h.sum, \
                  sum(h.bucket)); \
                  import io, numpy; from PIL import Image; \
                  text = events.Tensors('notes')[0]; \
                  print(text.step, text.tensor_proto.string_val[0].decode('utf-8').encode('ascii', 'replace')); \
                  print(events.SummaryMetadata('notes').plugin_data.plugin_name); \
                  images = [events.Images(tag)[0] for tag in ('digit', 'photo')]; \
                  print([(i.width, i.height, \
                  numpy.array(Image.open(io.BytesIO(i.encoded_image_string))).tolist()) for i in images])";
    let output = Command::new(python).args(["-c", script]).arg(folder.path().join("train")).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let expected = "[(0, 1.0), (1, 0.5), (2, 0.3333333432674408), (3, 0.25)]\n5.0 -0.5 1.0 1.0 5.0\n\
                    3 b'**bold** and ?n?code'\ntext\n\
                    [(3, 2, [[0, 50, 100], [150, 200, 255]]), (2, 1, [[[0, 50, 100], [150, 200, 255]]])]\n";
    assert_eq!(printed, expected, "{}", String::from_utf8_lossy(&output.stderr));
}
