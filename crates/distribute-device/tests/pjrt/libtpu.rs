//! libtpu, where `TPU_LIBRARY_PATH` names it: programs are compiled for TPUs that are not there.

use std::env;

use distribute_device::Error;
use distribute_device::pjrt::{Client, ClientOptions, CompileOptions, Plugin, Search, Topology, Value};
use distribute_testkit::skipped;

use crate::programs::{soon, step};

/// One test, since only one process may use libtpu at a time.
#[test]
fn libtpu_compiles_for_topologies_without_a_tpu() {
    let (Some(file), Some(_)) = (env::var_os("TPU_LIBRARY_PATH"), env::var_os("TPU_SKIP_MDS_QUERY")) else {
        return skipped("TPU_LIBRARY_PATH names no libtpu, or TPU_SKIP_MDS_QUERY is not set");
    };
    let plugin = Plugin::open(&Search::file(file), soon()).unwrap();
    let (oldest, newest) = plugin.stablehlo_versions().unwrap().unwrap();
    assert!(oldest < newest, "{:?}", plugin.attributes());

    let error = Client::create(&plugin, ClientOptions::new(), soon()).unwrap_err();
    let Error::Pjrt { call, text, .. } = &error else { panic!("{error}") };
    assert_eq!(*call, "PJRT_Client_Create");
    assert!(!text.is_empty());
    println!("without a TPU: {error}");

    for (name, count) in [("v2:2x2", 8), ("v4:2x2x1", 8), ("v5e:2x4", 8), ("v6e:4x4", 16)] {
        let topology = Topology::create(&plugin, name, &[]).unwrap();
        let devices = topology.devices();
        assert_eq!((topology.platform_name(), devices.len()), ("tpu", count), "{name}");
        assert!(devices.iter().all(|device| device.coords().is_some() && device.core_on_chip().is_some()), "{name}");
        let ids: Vec<_> = devices.iter().map(|device| vec![device.id]).collect();
        let options = CompileOptions::new(count, 1).with_assignment(ids);
        let program = topology.compile(step(count, true), &options, soon()).unwrap();
        drop(topology);
        assert_eq!((program.num_replicas().unwrap(), program.num_outputs().unwrap()), (count, 2));
        let memory = program.memory_stats().unwrap();
        assert!(memory.code_bytes > 0 && memory.alias_bytes > 0, "{name}: {memory:?}");
        assert!(program.serialize().unwrap().len() > 1000);
        let optimized = program.optimized().unwrap();
        let has = |text: &str| optimized.code.windows(text.len()).any(|window| window == text.as_bytes());
        assert!(has("all-reduce"), "{name}: {}", optimized.format);
        assert!(matches!(program.cost_analysis().unwrap().get("flops"), Some(Value::Float(flops)) if *flops > 0.0));
    }
    let wrong = Topology::create(&plugin, "v5litepod-4", &[]).unwrap_err();
    assert!(wrong.to_string().contains("topology \"v5litepod-4\": PJRT_TopologyDescription_Create failed"), "{wrong}");
}
