//! Descriptions of TPUs by Cloud TPU, the metadata server and variables.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use super::accelerator::AcceleratorType;
use super::node::Node;
use super::slice::{Slice, tpu_env};
use super::target::{self, TpuTarget};
use crate::ClusterSpec;

/// A TPU as the service describes it.
pub(crate) fn nodes(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(accelerator) = text.parse::<AcceleratorType>() {
        assert!((1..=AcceleratorType::MAX_CHIPS).contains(&accelerator.chips()));
        assert_eq!(accelerator.to_string().parse::<AcceleratorType>().as_ref().ok(), Some(&accelerator));
    }
    let Ok(node) = serde_json::from_slice::<Node>(bytes) else { return false };
    if let Ok(Some(accelerator)) = node.accelerator() {
        assert!((1..=AcceleratorType::MAX_CHIPS).contains(&accelerator.chips()));
        for tasks in [0, 1, 3, u32::MAX] {
            let cores = accelerator.cores_per_task(tasks);
            assert!(cores.is_err() || cores.is_ok_and(|cores| cores * tasks == accelerator.cores()));
        }
    }
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    assert!(!node.is_gone() || !node.is_recoverable(now));
    let _ = node.version();
    true
}

/// The attribute `tpu-env`, or variables of the same form.
pub(crate) fn slices(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let attributes: HashMap<String, String> = tpu_env(&text).into_iter().collect();
    let variable = |name: &str| attributes.get(name).cloned();
    if let Ok(Some(named)) = TpuTarget::from_vars(&variable)
        && let TpuTarget::Endpoints(endpoints) = named.target
    {
        let addresses = target::addresses(&endpoints, 8470);
        assert!(addresses.is_err() || addresses.is_ok_and(|addresses| !addresses.is_empty()));
    }
    for port in [1, 8470, u16::MAX] {
        let of_variables = Slice::read(&variable, &HashMap::new(), port);
        let of_attributes = Slice::read(&|_| None, &attributes, port);
        assert_eq!(of_variables.is_ok(), of_attributes.is_ok());
        let Ok(Some(slice)) = of_attributes else { continue };
        assert!((1..=ClusterSpec::MAX_TASKS).contains(&(slice.addresses.len())));
        assert!(slice.process < slice.per_slice * slice.slices);
        let _ = (slice.is_whole(), slice.cores_per_process());
    }
    !attributes.is_empty()
}
