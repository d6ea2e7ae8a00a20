//! XLA's plugin for CPUs, where `DISTRIBUTE_PJRT_PLUGIN` names it. Otherwise each test reports that it was skipped.

use std::env;
use std::fs;

use distribute_device::pjrt::{
    Buffer, CacheOutcome, Client, ClientOptions, CompileOptions, ElementType, Executable, ExecuteOptions, Plugin,
    ProgramCache, Search,
};
use distribute_device::{Error, HostBuffer};
use distribute_testkit::skipped;

use crate::programs::{TRANSPOSE, soon, step};

/// Returns a client of 8 devices.
fn client() -> Option<Client> {
    let Some(file) = env::var_os("DISTRIBUTE_PJRT_PLUGIN") else {
        skipped("DISTRIBUTE_PJRT_PLUGIN names no plugin for CPUs");
        return None;
    };
    let plugin = Plugin::open(&Search::file(file), soon()).unwrap();
    let options = ClientOptions::new().with("cpu_device_count", 8);
    Some(Client::create(&plugin, options, soon()).unwrap())
}

fn compile(client: &Client, replicas: usize, donates: bool) -> Executable {
    let devices = client.devices();
    let options = CompileOptions::for_devices(&devices[..replicas]);
    client.compile(step(replicas, donates), &options, soon()).unwrap()
}

fn code_of(error: &Error) -> i32 {
    match error {
        Error::Pjrt { code, .. } => *code,
        other => panic!("no failed call: {other}"),
    }
}

#[test]
fn the_plugin_its_client_and_its_devices_are_described() {
    let Some(client) = client() else { return };
    let (oldest, newest) = client.plugin().stablehlo_versions().unwrap().unwrap();
    assert!(oldest.len() == 3 && newest.len() == 3 && oldest < newest, "{oldest:?} {newest:?}");
    assert_eq!((client.platform_name(), client.process_index()), ("cpu", 0));
    assert!(!client.platform_version().is_empty());
    let devices = client.devices();
    assert_eq!(devices.iter().map(|device| device.id()).collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
    assert_eq!(client.addressable_devices(), devices);
    assert_eq!(client.device(3).as_ref(), Some(&devices[3]));
    assert_eq!(client.device(8), None);
    assert_eq!(devices[3].to_string(), "device 3 (TFRT_CPU_3)");
    assert_eq!(client.default_device_assignment(4, 1).unwrap(), [[0], [1], [2], [3]]);
    let topology = client.topology().unwrap();
    assert_eq!((topology.platform_name(), topology.devices().len()), ("cpu", 8));
}

#[test]
fn replicas_sum_their_gradients_in_chained_steps_with_and_without_donation() {
    let Some(client) = client() else { return };
    for (replicas, donates) in [(1, false), (2, false), (4, true), (8, true)] {
        let executable = compile(&client, replicas, donates);
        let devices = executable.devices().to_vec();
        assert_eq!(devices, client.devices()[..replicas]);
        let gradients: Vec<Buffer> = (0..replicas)
            .map(|replica| devices[replica].upload_slice(&[1.0 + replica as f32, 2.0, -1.0, 0.5], &[4]).unwrap())
            .collect();
        let mut weights: Vec<Buffer> =
            devices.iter().map(|device| device.upload_slice(&[1f32, 2.0, 3.0, 4.0], &[4]).unwrap()).collect();
        for _ in 0..3 {
            let arguments: Vec<_> = weights.iter().zip(&gradients).map(|(w, g)| vec![w, g]).collect();
            let outputs = executable.execute(&arguments, soon()).unwrap();
            assert!(weights.iter().all(|weight| weight.is_deleted().unwrap() == donates));
            let mut next = Vec::new();
            for (replica, mut outputs) in outputs.into_iter().enumerate() {
                assert_eq!(outputs[1].to_vec::<u32>(soon()).unwrap(), [replica as u32]);
                next.push(outputs.swap_remove(0));
            }
            weights = next;
        }
        let n = replicas as f32;
        let sums = [n * (n + 1.0) / 2.0, 2.0 * n, -n, 0.5 * n];
        for weight in &weights {
            let found = weight.to_vec::<f32>(soon()).unwrap();
            for ((found, sum), start) in found.iter().zip(sums).zip([1f32, 2.0, 3.0, 4.0]) {
                assert!((found - (start - 0.3 * sum)).abs() < 1e-4, "{replicas} replicas: {found}");
            }
        }
    }
}

#[test]
fn a_program_runs_on_the_devices_that_are_given_in_their_order() {
    let Some(client) = client() else { return };
    let devices = [5, 3].map(|id| client.device(id).unwrap());
    let executable = client.compile(step(2, false), &CompileOptions::for_devices(&devices), soon()).unwrap();
    let order = executable.devices().to_vec();
    assert_eq!(order.len(), 2);
    let buffers: Vec<_> = order.iter().map(|device| device.upload_slice(&[1f32; 4], &[4]).unwrap()).collect();
    let arguments: Vec<_> = buffers.iter().map(|buffer| vec![buffer, buffer]).collect();
    let outputs = executable.execute(&arguments, soon()).unwrap();
    for (device, outputs) in order.iter().zip(&outputs) {
        // The first device of the assignment is replica 0.
        let replica = devices.iter().position(|given| given == device).unwrap() as u32;
        assert_eq!(outputs[1].to_vec::<u32>(soon()).unwrap(), [replica]);
        assert_eq!(outputs[0].device().unwrap(), *device);
    }
}

#[test]
fn arguments_that_are_kept_are_not_donated() {
    let Some(client) = client() else { return };
    let executable = compile(&client, 1, true);
    let device = &executable.devices()[0];
    let (weight, gradient) = (device.upload_slice(&[1f32; 4], &[4]), device.upload_slice(&[1f32; 4], &[4]));
    let (weight, gradient) = (weight.unwrap(), gradient.unwrap());
    let execution = executable.launch(&[vec![&weight, &gradient]], &ExecuteOptions::new().keeping([0])).unwrap();
    execution.wait(soon()).unwrap();
    assert!(execution.is_done() && !weight.is_deleted().unwrap());
    assert_eq!(execution.outputs()[0][0].to_vec::<f32>(soon()).unwrap(), [0.9; 4]);
    let outputs = executable.execute(&[vec![&weight, &gradient]], soon()).unwrap();
    assert!(weight.is_deleted().unwrap());
    assert_eq!(outputs[0][0].to_vec::<f32>(soon()).unwrap(), [0.9; 4]);
    // A donated argument is an error of the next execution, with the place.
    let error = executable.execute(&[vec![&weight, &gradient]], soon()).unwrap_err();
    assert_eq!(code_of(&error), 3, "{error}");
}

#[test]
fn truth_values_and_matrices_are_copied_in_row_major_order() {
    let Some(client) = client() else { return };
    let devices = client.devices();
    let executable = client.compile(TRANSPOSE, &CompileOptions::for_devices(&devices[..1]), soon()).unwrap();
    let upload = |bytes: &[u8]| devices[0].upload(ElementType::Bool, &[2, 3], HostBuffer::from_slice(bytes)?);
    let matrix = upload(&[1, 0, 1, 1, 0, 0]).unwrap();
    let outputs = executable.execute(&[vec![&matrix]], soon()).unwrap();
    let transposed = &outputs[0][0];
    assert_eq!((transposed.element_type().unwrap(), transposed.dims().unwrap()), (ElementType::Bool, vec![3, 2]));
    assert_eq!(transposed.read(soon()).unwrap().as_bytes(), [1, 1, 0, 0, 1, 0]);
    let copied = transposed.copy_to(&devices[1]).unwrap();
    assert_eq!(copied.device().unwrap(), devices[1]);
    assert_eq!(copied.read(soon()).unwrap().as_bytes(), [1, 1, 0, 0, 1, 0]);
    let error = upload(&[2, 0, 0, 0, 0, 0]).unwrap_err().to_string();
    assert!(error.contains("bool[2, 3] for device 0 (TFRT_CPU_0) has a byte that is neither 0 nor 1"), "{error}");
}

#[test]
fn every_element_type_goes_to_a_device_and_back() {
    let Some(client) = client() else { return };
    let device = client.device(0).unwrap();
    for element_type in ElementType::ALL {
        let bytes: Vec<u8> = (0..6 * element_type.size_bytes()).map(|byte| byte as u8 % 2).collect();
        let buffer = device.upload(element_type, &[3, 2], HostBuffer::from_slice(&bytes).unwrap()).unwrap();
        buffer.ready().unwrap().wait(soon()).unwrap();
        assert_eq!(buffer.element_type().unwrap(), element_type);
        assert_eq!(buffer.read(soon()).unwrap().as_bytes(), bytes, "{element_type}");
        assert!(buffer.on_device_bytes().unwrap() >= bytes.len());
        assert!(buffer.is_on_cpu().unwrap());
    }
    let scalar = device.upload_slice(&[2.5f64], &[]).unwrap();
    assert_eq!((scalar.dims().unwrap(), scalar.to_vec::<f64>(soon()).unwrap()), (vec![], vec![2.5]));
    let empty = device.upload_slice::<f32>(&[], &[0, 7]).unwrap();
    assert!(empty.to_vec::<f32>(soon()).unwrap().is_empty());
    let error = scalar.to_vec::<f32>(soon()).unwrap_err().to_string();
    assert!(error.contains("elements of f32 were asked for, and the buffer holds f64"), "{error}");
}

#[test]
fn errors_have_the_code_the_text_and_the_call() {
    let Some(client) = client() else { return };
    let broken = client.compile("module { nonsense }", &CompileOptions::default(), soon()).unwrap_err();
    assert!(broken.to_string().contains("PJRT_Client_Compile failed: "), "{broken}");
    assert!(broken.to_string().contains("nonsense"), "{broken}");
    let absent = CompileOptions::new(1, 1).with_assignment(vec![vec![77]]);
    let absent = client.compile(step(1, false), &absent, soon()).unwrap_err().to_string();
    assert!(absent.contains("No matching device found for device_id 77"), "{absent}");
    let twice = CompileOptions::new(2, 1).with_assignment(vec![vec![0], vec![0]]);
    let twice = client.compile(step(2, false), &twice, soon()).unwrap_err().to_string();
    assert!(twice.contains("device 0 was given twice"), "{twice}");

    let executable = compile(&client, 2, false);
    let devices = client.devices();
    let good: Vec<_> = devices.iter().map(|device| device.upload_slice(&[1f32; 4], &[4]).unwrap()).collect();
    let small = devices[1].upload_slice(&[1f32; 2], &[2]).unwrap();
    let text = |arguments: &[Vec<&Buffer>]| executable.execute(arguments, soon()).unwrap_err().to_string();
    let other_small = devices[0].upload_slice(&[1f32; 2], &[2]).unwrap();
    let size = text(&[vec![&good[0], &other_small], vec![&good[1], &small]]);
    assert!(size.contains("expected parameter 1 of size 16 but got buffer with incompatible size 8"), "{size}");
    // What only one device would refuse does not reach the plugin, where the other device would wait for it.
    let shape = text(&[vec![&good[0], &good[0]], vec![&good[1], &small]]);
    assert!(shape.contains("argument 1 is f32[2] on device 1 (TFRT_CPU_1), and f32[4] on device 0"), "{shape}");
    let place = text(&[vec![&good[0], &good[0]], vec![&good[1], &good[0]]]);
    assert!(place.contains("argument 1 for device 1 (TFRT_CPU_1) is on device 0 (TFRT_CPU_0); copy it"), "{place}");
    let deleted = devices[1].upload_slice(&[1f32; 4], &[4]).unwrap();
    deleted.delete().unwrap();
    let gone = text(&[vec![&good[0], &good[0]], vec![&deleted, &good[1]]]);
    assert!(gone.contains("argument 0 for device 1 (TFRT_CPU_1) was deleted or donated before"), "{gone}");
    let lists = text(&[vec![&good[0], &good[0]]]);
    assert!(lists.contains("1 lists of arguments were given for program \"step\", which runs on 2 devices"), "{lists}");
    let uneven = text(&[vec![&good[0], &good[0]], vec![&good[1]]]);
    assert!(uneven.contains("2 arguments were given for device 0 (TFRT_CPU_0), and 1 for device 1"), "{uneven}");

    let other = Client::create(client.plugin(), ClientOptions::new(), soon()).unwrap();
    let foreign = other.devices()[0].upload_slice(&[1f32; 4], &[4]).unwrap();
    let error = executable.execute(&[vec![&good[0], &foreign], vec![&good[1], &good[1]]], soon()).unwrap_err();
    assert!(matches!(error, Error::Foreign { what: "buffer", .. }), "{error}");
    let bytes = devices[0].upload_slice(&[1f32; 4], &[5]).unwrap_err().to_string();
    assert!(bytes.contains("f32[5] for device 0 (TFRT_CPU_0) needs 20 bytes, and 16 were given"), "{bytes}");
    assert_eq!(other.devices().len(), 4, "the plugin's default");
}

#[test]
fn programs_are_found_again_on_disk() {
    let Some(client) = client() else { return };
    let folder = tempfile::tempdir().unwrap();
    let cache = ProgramCache::open(folder.path(), 1 << 30).unwrap();
    let devices = client.devices();
    let options = CompileOptions::for_devices(&devices[..2]);
    let get = |program: String| cache.get_or_compile(&client, program, &options, soon()).unwrap();
    let run = |executable: &Executable| {
        let made: Vec<_> =
            executable.devices().iter().map(|device| device.upload_slice(&[1f32; 4], &[4]).unwrap()).collect();
        let arguments: Vec<_> = made.iter().map(|buffer| vec![buffer, buffer]).collect();
        executable.execute(&arguments, soon()).unwrap()[1][0].to_vec::<f32>(soon()).unwrap()
    };
    let (first, outcome) = get(step(2, false));
    assert_eq!(outcome, CacheOutcome::Stored);
    let (second, outcome) = get(step(2, false));
    assert_eq!(outcome, CacheOutcome::Found);
    assert_eq!((run(&first), run(&second)), (vec![0.8; 4], vec![0.8; 4]));
    assert_eq!(get(step(2, true)).1, CacheOutcome::Stored);

    let file = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&file).unwrap();
    bytes[100] ^= 1;
    fs::write(&file, bytes).unwrap();
    let outcomes = [false, true].map(|donates| get(step(2, donates)).1);
    let told =
        |outcome: &CacheOutcome| matches!(outcome, CacheOutcome::Replaced { problem } if problem.contains("checksum"));
    assert_eq!(outcomes.iter().filter(|outcome| told(outcome)).count(), 1, "{outcomes:?}");
    assert_eq!([false, true].map(|donates| get(step(2, donates)).1), [CacheOutcome::Found, CacheOutcome::Found]);
}

#[test]
fn a_compiled_program_tells_its_shape_and_its_cost() {
    let Some(client) = client() else { return };
    let executable = compile(&client, 2, true);
    let program = executable.program();
    assert_eq!((program.num_replicas().unwrap(), program.num_partitions().unwrap()), (2, 1));
    assert_eq!((program.num_outputs().unwrap(), program.name()), (2, "step"));
    let outputs = program.outputs().unwrap();
    assert_eq!(outputs, [(Some(ElementType::F32), vec![4]), (Some(ElementType::U32), vec![])]);
    let memory = program.memory_stats().unwrap();
    assert_eq!((memory.argument_bytes, memory.alias_bytes), (32, 16), "{memory:?}");
    let optimized = program.optimized().unwrap();
    let has = |text: &str| optimized.code.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(!optimized.format.is_empty() && has("all-reduce"), "{}", optimized.format);
    assert!(program.code_bytes().is_ok());
    // What this plugin does not tell is an error and no invention.
    println!("cost {:?}; fingerprint {:?}", program.cost_analysis(), program.fingerprint());
    println!("memory {:?}", client.devices()[0].memory_stats());
}
