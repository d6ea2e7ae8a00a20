//! Tests with simulated plugins, each with its own script.

mod cache;
mod events;
mod failures;
mod opening;

use std::time::{Duration, Instant};

use distribute_device::pjrt::{
    Buffer, Client, ClientOptions, CompileOptions, Executable, ExecuteOptions, Plugin, Search, Topology, Value,
};
use distribute_device::{Error, Result};
use simulated_pjrt::{Installed, Live, Script, install};
use tempfile::TempDir;

use crate::programs::{soon, step};

/// A plugin in a folder of its own.
struct Simulated {
    installed: Installed,
    _folder: TempDir,
}

impl Simulated {
    fn new(script: &Script) -> Simulated {
        let folder = tempfile::tempdir().unwrap();
        Simulated { installed: install(folder.path(), script).unwrap(), _folder: folder }
    }

    fn open(&self) -> Result<Plugin> {
        Plugin::open(&Search::file(self.installed.path()), soon())
    }

    fn client(&self) -> Client {
        // What is stuck is not waited for long.
        let options = ClientOptions::new().with_close_timeout(Duration::from_millis(30));
        Client::create(&self.open().unwrap(), options, soon()).unwrap()
    }

    fn live(&self) -> Live {
        self.installed.live()
    }
}

/// Returns a script that lets one kind of event not fire.
fn stuck(kind: &str) -> Script {
    Script { stuck: vec![kind.to_owned()], ..Script::default() }
}

fn briefly() -> Instant {
    Instant::now() + Duration::from_millis(20)
}

fn compile(client: &Client, replicas: usize, donates: bool) -> Result<Executable> {
    let devices = client.devices();
    client.compile(step(replicas, donates), &CompileOptions::for_devices(&devices[..replicas]), soon())
}

/// Uploads two arguments to each device of a program.
fn arguments(executable: &Executable) -> Result<Vec<[Buffer; 2]>> {
    let devices = executable.devices().iter();
    devices
        .map(|device| Ok([device.upload_slice(&[1f32, 2.0, 3.0, 4.0], &[4])?, device.upload_slice(&[5f32; 4], &[4])?]))
        .collect()
}

fn borrowed(arguments: &[[Buffer; 2]]) -> Vec<Vec<&Buffer>> {
    arguments.iter().map(|list| list.iter().collect()).collect()
}

/// Uses everything once.
fn use_everything(plugin: &Plugin) -> Result<()> {
    plugin.attributes()?;
    let topology = Topology::create(plugin, "sim:2", &[])?;
    topology.attributes()?;
    let ahead = topology.compile(step(2, false), &CompileOptions::new(2, 1), soon())?;
    ahead.optimized()?;
    let client = Client::create(plugin, ClientOptions::new(), soon())?;
    client.default_device_assignment(2, 1)?;
    client.topology()?;
    client.devices()[0].memory_stats()?;
    let executable = compile(&client, 2, true)?;
    let program = executable.program();
    assert_eq!((program.num_replicas()?, program.num_partitions()?, program.num_outputs()?), (2, 1, 2));
    let again = client.load(program.serialize()?, soon())?;
    let given = arguments(&again)?;
    let execution = again.launch(&borrowed(&given), &ExecuteOptions::new())?;
    execution.wait(soon())?;
    let outputs = execution.into_outputs();
    assert!(given[0][0].is_deleted()? && !given[0][1].is_deleted()?);
    let output = &outputs[1][0];
    output.ready()?.wait(soon())?;
    assert_eq!((output.on_device_bytes()?, output.is_on_cpu()?, output.dims()?), (16, true, vec![4]));
    assert_eq!(output.device()?, client.devices()[1]);
    let copy = output.copy_to(&client.devices()[3])?;
    copy.delete()?;
    assert_eq!(output.to_vec::<f32>(soon())?, [1.0, 2.0, 3.0, 4.0]);
    Ok(())
}

#[test]
fn a_plugin_that_works_is_used_and_nothing_is_left() {
    let simulated = Simulated::new(&Script::default());
    use_everything(&simulated.open().unwrap()).unwrap();
    assert_eq!(simulated.live(), Live::default());
}

#[test]
fn attributes_have_the_types_of_the_plugin() {
    let simulated = Simulated::new(&Script::default());
    let plugin = simulated.open().unwrap();
    let attributes = plugin.attributes().unwrap();
    assert_eq!(attributes["name"].as_text(), Some("simulated"));
    assert_eq!((&attributes["truth"], &attributes["number"]), (&Value::Bool(true), &Value::Float(0.5)));
    assert_eq!(attributes["future"], Value::Unknown(77));
    assert_eq!(plugin.stablehlo_versions().unwrap(), Some((vec![0, 9, 0], vec![1, 13, 3])));
    let options = ClientOptions::new().with("device_count", 2);
    let client = Client::create(&plugin, options, soon()).unwrap();
    assert_eq!((client.devices().len(), client.platform_version()), (2, "simulated 1"));
    let device = &client.devices()[1];
    let description = device.description();
    assert_eq!((description.coords(), description.core_on_chip()), (Some([1, 2, 3].as_slice()), Some(1)));
    assert_eq!((device.to_string().as_str(), device.local_hardware_id()), ("device 1 (SIM_1)", Some(1)));
    let memory = device.memory_stats().unwrap();
    assert_eq!((memory.in_use_bytes, memory.limit_bytes, memory.peak_bytes), (1000, Some(5000), None));
    let unknown = ClientOptions::new().with("future", Value::Unknown(7));
    let error = Client::create(&plugin, unknown, soon()).unwrap_err().to_string();
    assert!(error.contains("future has the unknown type 7"), "{error}");
}

#[test]
fn values_may_be_dropped_in_any_order() {
    let simulated = Simulated::new(&Script::default());
    let make = || -> Vec<Option<Box<dyn Send>>> {
        let plugin = simulated.open().unwrap();
        let client = simulated.client();
        let topology = client.topology().unwrap();
        let executable = compile(&client, 2, false).unwrap();
        let given = arguments(&executable).unwrap();
        let execution = executable.launch(&borrowed(&given), &ExecuteOptions::new()).unwrap();
        let download = execution.outputs()[0][0].download().unwrap();
        vec![
            Some(Box::new((plugin, client))),
            Some(Box::new(topology)),
            Some(Box::new(executable)),
            Some(Box::new(given)),
            Some(Box::new(execution)),
            Some(Box::new(download)),
        ]
    };
    let count = make().len();
    for order in 0..(1..=count).product::<usize>() {
        let (mut values, mut rest) = (make(), order);
        let mut left: Vec<usize> = (0..count).collect();
        for remaining in (1..=count).rev() {
            values[left.remove(rest % remaining)].take();
            rest /= remaining;
        }
        assert_eq!(simulated.live(), Live::default(), "order {order}");
    }
}

#[test]
fn objects_of_two_clients_are_not_mixed() {
    let simulated = Simulated::new(&Script::default());
    let (one, other) = (simulated.client(), simulated.client());
    let executable = compile(&one, 1, false).unwrap();
    let foreign = other.devices()[0].upload_slice(&[1f32; 4], &[4]).unwrap();
    let error = executable.execute(&[vec![&foreign, &foreign]], soon()).unwrap_err();
    assert!(matches!(error, Error::Foreign { what: "buffer", .. }), "{error}");
    assert!(matches!(foreign.copy_to(&one.devices()[0]), Err(Error::Foreign { .. })));
    assert_ne!(one.devices()[0], other.devices()[0]);
}
