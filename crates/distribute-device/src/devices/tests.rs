use super::*;

fn spec(name: &str) -> DeviceSpec {
    name.parse().unwrap()
}

fn physical(kind: DeviceKind, index: u32, memory_bytes: u64) -> PhysicalDevice {
    PhysicalDevice { kind, index, name: "model".to_owned(), memory_bytes: Some(memory_bytes), cores: None }
}

fn shorts(devices: &[&LogicalDevice]) -> Vec<String> {
    devices.iter().map(|device| device.spec().short()).collect()
}

#[test]
fn one_cpu_splits_into_many() {
    let devices = Devices::with_cpus(3).unwrap();
    let names: Vec<String> = devices.logical().iter().map(|device| device.spec().to_string()).collect();
    assert_eq!(names[2], "/job:localhost/replica:0/task:0/device:CPU:2");
    assert_eq!((names.len(), devices.physical().len()), (3, 1));
    assert_eq!(devices.find(&spec("cpu:1")).unwrap().physical(), devices.physical().next().unwrap());
    assert_eq!(Devices::local().logical().len(), 1);
    // `Devices` is a value: the other one has not changed.
    assert!(Devices::local().find(&spec("CPU:1")).is_err());
}

#[test]
fn splits_that_cannot_be_are_sentences() {
    for count in [0, Devices::MAX_PARTS + 1, usize::MAX] {
        let error = Devices::with_cpus(count).unwrap_err();
        assert!(matches!(error, Error::Split { .. }) && error.to_string().contains("1 to 1024"), "{error}");
    }
    let devices = Devices::from_physical([physical(DeviceKind::Cpu, 0, 100)]);
    let error = devices.clone().split(DeviceKind::Cpu, 0, &[Some(60), Some(60)]).unwrap_err().to_string();
    assert!(error.contains("120 bytes") && error.contains("100"), "{error}");
    assert!(devices.clone().split(DeviceKind::Cpu, 0, &[Some(u64::MAX), Some(u64::MAX)]).is_err());
    assert!(matches!(devices.clone().split(DeviceKind::Cpu, 1, &[None]), Err(Error::NoSuchDevice { .. })));
    let split = devices.split(DeviceKind::Cpu, 0, &[Some(60), None]).unwrap();
    assert_eq!(split.logical()[0].memory_limit_bytes(), Some(60));
}

#[test]
fn logical_devices_are_numbered_through() {
    let machine = [physical(DeviceKind::Cpu, 0, 9), physical(DeviceKind::Gpu, 0, 9), physical(DeviceKind::Gpu, 1, 9)];
    let devices = Devices::from_physical(machine).split(DeviceKind::Gpu, 0, &[None, None]).unwrap();
    assert_eq!(shorts(&devices.list(["GPU:*"]).unwrap()), ["GPU:0", "GPU:1", "GPU:2"]);
    assert_eq!(devices.find(&spec("cuda:2")).unwrap().physical().index, 1);
    assert_eq!(devices.find(&spec("")).unwrap().spec().short(), "CPU:0");
    // A table may list a GPU that does not exist or that this build cannot use; opening it is an error.
    let machine = [physical(DeviceKind::Gpu, 99, 9)];
    let error = Devices::from_physical(machine).open(&spec("GPU:0")).unwrap_err().to_string();
    let words = if cfg!(feature = "cuda") { "driver" } else { "no CUDA support" };
    assert!(error.contains("GPU:") && error.contains(words), "{error}");
}

#[test]
fn what_is_not_there_is_explained() {
    let devices = Devices::from_physical([physical(DeviceKind::Cpu, 0, 9)]);
    let devices = devices.split(DeviceKind::Cpu, 0, &[None, None]).unwrap();
    let no_gpu = if cfg!(feature = "cuda") { "GPU" } else { "no CUDA support" };
    for (asked, words) in [
        ("CPU:3", &["CPU:3", "CPU:0..CPU:1", "Devices::with_cpus(4)"][..]),
        ("CPU:4294967295", &["Devices::with_cpus(4294967296)"]),
        ("GPU:0", &["GPU:0", no_gpu]),
        ("TPU:0", &["TPU:0", "no support for TPUs"]),
        ("XLA_CPU:0", &["XLA_CPU:0", "CPU, GPU and TPU"]),
        ("/job:worker/task:1/CPU:0", &["/job:worker/replica:0/task:1/device:CPU:0", "another task", "/job:localhost"]),
    ] {
        let error = devices.find(&spec(asked)).unwrap_err();
        assert!(matches!(error, Error::NoSuchDevice { .. }));
        for word in words {
            assert!(error.to_string().contains(word), "{asked}: {error}");
        }
    }
    let error = Devices::local().find(&spec("CPU:1")).unwrap_err().to_string();
    assert!(error.contains("this process has CPU:0;"), "{error}");
    assert!(matches!(devices.find(&spec("CPU:*")), Err(Error::WildcardDevice { .. })));
    assert!(matches!(devices.list(["GPU:*"]), Err(Error::NoSuchDevice { .. })));
}

#[test]
fn a_table_takes_the_name_of_its_task() {
    let devices = Devices::with_cpus(2).unwrap().at(&spec("/job:worker/task:1/device:GPU:7"));
    assert_eq!(devices.logical()[1].spec().to_string(), "/job:worker/replica:0/task:1/device:CPU:1");
    assert_eq!(devices.find(&spec("CPU:1")).unwrap(), &devices.logical()[1]);
    assert_eq!(shorts(&devices.list(["/job:worker/CPU:*"]).unwrap()), ["CPU:0", "CPU:1"]);
    let error = devices.find(&spec("/task:0/CPU:1")).unwrap_err().to_string();
    assert!(error.contains("this process is /job:worker/replica:0/task:1"), "{error}");
}

#[test]
fn lists_name_each_device_once() {
    let devices = Devices::with_cpus(3).unwrap();
    assert_eq!(shorts(&devices.list(["CPU:2", "cpu"]).unwrap()), ["CPU:2", "CPU:0"]);
    assert!(matches!(devices.list::<&str>([]), Err(Error::NoDevices)));
    let error = devices.list(["CPU:1", "CPU:*"]).unwrap_err();
    assert!(
        matches!(&error, Error::DuplicateDevice { first_place: 0, second_place: 1, second, .. } if second == "CPU:*"),
        "{error}"
    );

    assert_eq!(parse_device_list(["CPU:0", "CPU:1"]).unwrap().len(), 2);
    assert_eq!(parse_device_list(vec!["gpu:9".to_owned()]).unwrap(), [DeviceSpec::local(DeviceKind::Gpu, 9)]);
    assert!(matches!(parse_device_list::<&str>([]), Err(Error::NoDevices)));
    assert!(matches!(parse_device_list(["CPU:*"]), Err(Error::WildcardDevice { .. })));
    assert!(matches!(parse_device_list(["CPU:0", "cup:1"]), Err(Error::DeviceString { .. })));
    let error = parse_device_list(["GPU:1", "CPU:0", "/job:localhost/task:0/device:cpu:0"]).unwrap_err().to_string();
    assert!(error.contains("CPU:0 twice") && error.contains("place 1") && error.contains("place 2"), "{error}");
}
