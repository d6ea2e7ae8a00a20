use distribute_device::PhysicalDevice;

use super::*;

fn machine(gpus: u32) -> Devices {
    let device = |kind, index| PhysicalDevice { kind, index, name: "m".to_owned(), memory_bytes: None, cores: None };
    let gpus = (0..gpus).map(|index| device(DeviceKind::Gpu, index));
    Devices::from_physical(std::iter::once(device(DeviceKind::Cpu, 0)).chain(gpus))
}

fn chosen(choice: DeviceChoice, gpus: u32, ranks: usize) -> Result<Vec<String>> {
    let table = machine(gpus);
    let devices = choice.devices(&OwnDevices::of_one_process("MirroredStrategy", Some(&table)), ranks)?;
    Ok(devices.iter().map(DeviceSpec::short).collect())
}

#[test]
fn every_gpu_is_found_else_the_cpu() {
    assert_eq!(chosen(DeviceChoice::Found, 3, 1).unwrap(), ["GPU:0", "GPU:1", "GPU:2"]);
    assert_eq!(chosen(DeviceChoice::Found, 0, 1).unwrap(), ["CPU:0"]);
    assert_eq!(chosen(DeviceChoice::named(["GPU:1"]), 3, 1).unwrap(), ["GPU:1"]);
}

#[test]
fn a_number_of_devices_is_that_many() {
    assert_eq!(chosen(DeviceChoice::Gpus(2), 3, 1).unwrap(), ["GPU:0", "GPU:1"]);
    assert_eq!(chosen(DeviceChoice::Replicas(1), 4, 2).unwrap(), ["GPU:0", "GPU:1"]);
    assert_eq!(chosen(DeviceChoice::Replicas(2), 0, 2).unwrap(), ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]);
    for (choice, gpus, told) in [
        (DeviceChoice::Gpus(4), 3, "num_gpus asks for 4 devices, but this process has 3 GPUs"),
        (DeviceChoice::Gpus(1), 0, "but this process has 0 GPUs: "),
        (DeviceChoice::Gpus(0), 3, "num_gpus asks for 0 devices"),
        (DeviceChoice::Replicas(4), 3, "num_replicas asks for 4 devices"),
        (DeviceChoice::Replicas(0), 0, "num_replicas asks for 0 devices"),
        (DeviceChoice::Replicas(usize::MAX), 0, "num_replicas asks for"),
        (DeviceChoice::Named(Vec::new()), 3, "the list of devices is empty"),
        (DeviceChoice::named(["GPU:0", "gpu:0"]), 3, "GPU:0 is named twice"),
    ] {
        let error = chosen(choice.clone(), gpus, 1).unwrap_err().to_string();
        assert!(error.contains(told), "{choice:?} of {gpus}: {error}");
    }
}

#[test]
fn tasks_on_one_machine_divide_its_gpus() {
    let own = |seen: u32, per_task, place: Option<(usize, usize)>| {
        let visible = machine(seen).of_kind(DeviceKind::Gpu).map(|gpu| gpu.spec().clone()).collect();
        let share = share(visible, per_task, place.map(|(rank, size)| LocalPlace { rank, size }));
        share.map(|own| own.iter().filter_map(DeviceSpec::index).collect::<Vec<u32>>())
    };
    // Four GPUs of one task, of two, of one per task, and with one task too many to divide evenly.
    assert_eq!(own(4, None, None), Ok(vec![0, 1, 2, 3]));
    assert_eq!(own(4, None, Some((1, 2))), Ok(vec![2, 3]));
    assert_eq!(own(4, None, Some((3, 4))), Ok(vec![3]));
    assert_eq!(own(4, None, Some((2, 3))), Ok(vec![2]));
    // A scheduler shows each of two tasks one GPU.
    assert_eq!(own(1, None, Some((1, 2))), Ok(vec![0]));
    // The cluster's description has a number for each task.
    assert_eq!(own(8, Some(2), Some((1, 2))), Ok(vec![2, 3]));
    assert_eq!(own(2, Some(2), Some((1, 2))), Ok(vec![0, 1]));
    assert_eq!(own(8, Some(2), None), Ok(vec![0, 1]));
    assert_eq!(own(2, Some(0), None), Ok(vec![]));
    assert!(own(1, Some(2), None).unwrap_err().contains("gives each task 2 GPUs, but this one sees 1"));
    let neither = own(3, Some(2), Some((1, 2))).unwrap_err();
    assert!(neither.contains("neither its own nor enough for all"), "{neither}");
}
