//! libtpu, where `TPU_LIBRARY_PATH` names it: it compiles for TPUs that are not there.

use std::env;
use std::time::{Duration, Instant};

use distribute_device::pjrt::{CompileOptions, Plugin, Search, Topology};
use distribute_testkit::skipped;

use crate::every_operation::every_operation;

/// One test, since only one process may use libtpu at a time.
#[test]
fn libtpu_compiles_every_operation() {
    let (Some(file), Some(_)) = (env::var_os("TPU_LIBRARY_PATH"), env::var_os("TPU_SKIP_MDS_QUERY")) else {
        return skipped("TPU_LIBRARY_PATH names no libtpu, or TPU_SKIP_MDS_QUERY is not set");
    };
    let soon = || Instant::now() + Duration::from_secs(60);
    let plugin = Plugin::open(&Search::file(file), soon()).unwrap();
    for name in ["v5e:2x4", "v2:2x2"] {
        let topology = Topology::create(&plugin, name, &[]).unwrap();
        let ids: Vec<_> = topology.devices().iter().map(|device| vec![device.id]).collect();
        let program = every_operation(ids.len()).unwrap();
        let options = CompileOptions::new(ids.len(), 1).with_assignment(ids);
        let compiled = topology.compile(program.text(), &options, soon()).unwrap();
        assert_eq!(compiled.num_outputs().unwrap(), program.outputs().len(), "{name}");
        assert!(compiled.memory_stats().unwrap().alias_bytes > 0, "{name}");
    }
}
