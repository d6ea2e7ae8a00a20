use proptest::prelude::*;

use super::*;

fn spec(name: &str) -> DeviceSpec {
    name.parse().unwrap()
}

#[test]
fn names_are_read_as_tensorflow_reads_them() {
    let cases = [
        ("", ""),
        ("/", ""),
        ("/cpu:0", "/device:CPU:0"),
        ("cpu", "/device:CPU"),
        ("CPU:1", "/device:CPU:1"),
        ("/gpu:0", "/device:GPU:0"),
        ("gpu:0", "/device:GPU:0"),
        ("cuda:0", "/device:GPU:0"),
        ("/device:CUDA:3", "/device:GPU:3"),
        ("GPU:*", "/device:GPU:*"),
        ("/device:gpu:*", "/device:GPU:*"),
        ("/device:*:*", ""),
        ("device:TPU_SYSTEM:0", "/device:TPU_SYSTEM:0"),
        ("/job:worker", "/job:worker"),
        ("/task:1/job:worker", "/job:worker/task:1"),
        ("job:ps/gpu:2", "/job:ps/device:GPU:2"),
        ("/job:worker/replica:0/task:1/device:GPU:0", "/job:worker/replica:0/task:1/device:GPU:0"),
        ("/job:worker/replica:0/task:1/gpu:0", "/job:worker/replica:0/task:1/device:GPU:0"),
    ];
    for (given, want) in cases {
        assert_eq!(spec(given).to_string(), want, "{given:?}");
    }
    assert_eq!(spec("GPU:*").device_index, Some(DeviceIndex::Any));
    assert_eq!(spec("GPU").device_index, None);
    assert_eq!((spec("cuda:7").kind(), spec("cuda:7").index()), (Some(DeviceKind::Gpu), Some(7)));
    assert_eq!(spec("/job:worker/task:1/device:GPU:0").short(), "GPU:0");
}

#[test]
fn canonical_names_take_missing_fields_from_the_default_then_the_host() {
    let cases = [
        ("", "", "/job:localhost/replica:0/task:0/device:CPU:0"),
        ("/cpu:0", "", "/job:localhost/replica:0/task:0/device:CPU:0"),
        ("/gpu:0", "", "/job:localhost/replica:0/task:0/device:GPU:0"),
        ("cuda:2", "", "/job:localhost/replica:0/task:0/device:GPU:2"),
        ("/job:worker/cpu:0", "", "/job:worker/replica:0/task:0/device:CPU:0"),
        ("/job:worker/task:1/cpu:0", "", "/job:worker/replica:0/task:1/device:CPU:0"),
        ("/job:worker/replica:0/task:1/device:gpu:0", "", "/job:worker/replica:0/task:1/device:GPU:0"),
        ("/job:worker/task:1/cpu:0", "/gpu:0", "/job:worker/replica:0/task:1/device:CPU:0"),
        ("/job:worker/task:1", "/gpu:0", "/job:worker/replica:0/task:1/device:GPU:0"),
        ("/gpu:0", "/job:worker/task:1", "/job:worker/replica:0/task:1/device:GPU:0"),
        ("/cpu:0", "/job:worker", "/job:worker/replica:0/task:0/device:CPU:0"),
    ];
    for (device, default, want) in cases {
        assert_eq!(spec(device).canonicalize(&spec(default)).to_string(), want, "{device:?} with {default:?}");
    }
}

#[test]
fn scopes_resolve_from_the_inside_out() {
    let cases: [(&str, &[&str], &str); 6] = [
        ("/job:worker/task:1/cpu:0", &["/gpu:0"], "/job:worker/replica:0/task:1/device:CPU:0"),
        ("/job:worker/task:1", &["/gpu:0"], "/job:worker/replica:0/task:1/device:GPU:0"),
        ("/cpu:0", &["/job:worker"], "/job:worker/replica:0/task:0/device:CPU:0"),
        ("", &["/job:worker", "/cpu:0"], "/job:worker/replica:0/task:0/device:CPU:0"),
        ("", &["/cpu:0", "/gpu:0"], "/job:localhost/replica:0/task:0/device:GPU:0"),
        ("", &[], "/job:localhost/replica:0/task:0/device:CPU:0"),
    ];
    for (device, scopes, want) in cases {
        let scopes: Vec<DeviceSpec> = scopes.iter().map(|scope| spec(scope)).collect();
        assert_eq!(spec(device).resolve(&scopes).unwrap().to_string(), want, "{device:?} in {scopes:?}");
    }
    let error = spec("GPU:*").resolve([]).unwrap_err();
    assert!(matches!(&error, Error::WildcardDevice { given } if given.contains("GPU:*")), "{error}");
    assert_eq!(spec("GPU:1").resolve([&spec("GPU:*")]).unwrap().index(), Some(1));
}

#[test]
fn what_is_no_device_is_a_sentence() {
    let cases = [
        ("/device:GPU:0/cpu:1", "two devices"),
        ("/gpu:0/gpu:0", "two devices"),
        ("/job:a/job:b", "two jobs"),
        ("/task:1/task:1", "two tasks"),
        ("/task:x", "\"x\" is not a whole number"),
        ("/task:", "\"\" is not a whole number"),
        ("/job:", "form job:VALUE"),
        ("/replica:*", "\"*\""),
        ("GPU:-1", "whole number or *"),
        ("GPU:+1", "\"+1\""),
        ("GPU:4294967296", "4294967295"),
        ("/device", "form device:TYPE:INDEX"),
        ("/device:*:1", "device type \"*\""),
        ("/jbo:worker", "did you mean \"job\"?"),
        ("/job:worker/taks:1", "did you mean \"task\"?"),
        ("/job:worker/Task:1", "did you mean \"task\"?"),
        ("/device:CUP:0", "did you mean \"CPU\"?"),
        ("/devcie:GPU:0", "did you mean \"device\"?"),
        ("gpux:0", "did you mean \"GPU\"?"),
        ("cuba:0", "did you mean \"cuda\"?"),
        ("/a:b:c", "not an attribute"),
        ("cuda:0:1", "not an attribute"),
    ];
    for (given, words) in cases {
        let error = given.parse::<DeviceSpec>().unwrap_err().to_string();
        assert!(error.contains(words) && error.contains(&format!("{given:?}")), "{given}: {error}");
        assert!(error.contains("/job:worker/replica:0/task:1/device:GPU:0"), "{given}: {error}");
    }
    let error = "metal:0".parse::<DeviceSpec>().unwrap_err().to_string();
    assert!(!error.contains("did you mean"), "{error}");
}

#[test]
fn a_partial_name_covers_full_ones() {
    let device = spec("/job:worker/replica:0/task:1/device:GPU:0");
    for pattern in ["", "GPU", "GPU:*", "gpu:0", "/job:worker", "/task:1/GPU:*"] {
        assert!(spec(pattern).covers(&device), "{pattern}");
    }
    for pattern in ["CPU:*", "GPU:1", "/job:ps", "/task:0/GPU:*"] {
        assert!(!spec(pattern).covers(&device), "{pattern}");
    }
}

fn any_spec() -> impl Strategy<Value = DeviceSpec> {
    let index = prop_oneof![any::<u32>().prop_map(DeviceIndex::At), Just(DeviceIndex::Any)];
    let device =
        prop::option::of((prop::sample::select(vec!["CPU", "GPU", "TPU", "XLA_GPU"]), prop::option::of(index)));
    (prop::option::of("[a-zA-Z][a-z0-9_]{0,6}"), prop::option::of(any::<u32>()), prop::option::of(any::<u32>()), device)
        .prop_map(|(job, replica, task, device)| DeviceSpec {
            job,
            replica,
            task,
            device_type: device.map(|(kind, _)| kind.to_owned()),
            device_index: device.and_then(|(_, index)| index),
        })
}

proptest! {
    #[test]
    fn names_read_back(spec in any_spec()) {
        prop_assert_eq!(spec.to_string().parse::<DeviceSpec>().unwrap(), spec);
    }

    #[test]
    fn merging_is_associative_and_keeps_the_later(a in any_spec(), b in any_spec(), c in any_spec()) {
        prop_assert_eq!(a.merge(&b).merge(&c), a.merge(&b.merge(&c)));
        prop_assert!(b.covers(&a.merge(&b)));
        prop_assert_eq!(&a.merge(&DeviceSpec::default()), &a);
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "[/:a-z0-9*]{0,24}|\\PC{0,24}") {
        if let Ok(spec) = text.parse::<DeviceSpec>() {
            prop_assert_eq!(spec.to_string().parse::<DeviceSpec>().unwrap(), spec);
        }
    }
}
