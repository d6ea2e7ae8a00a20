//! The answers of Compute Engine.

use super::{Instance, Page};
use crate::metadata::segment;
use crate::{ClusterSpec, TaskType};

/// A page of members, or an instance.
pub(crate) fn answers(bytes: &[u8]) -> bool {
    let page = serde_json::from_slice::<Page>(bytes);
    if let Ok(page) = &page {
        for item in &page.items {
            let name = item.instance.rsplit('/').next().unwrap_or_default();
            // What is put into a URL is one segment of its path.
            if segment("fuzz", "a name", name).is_ok() {
                assert!(!name.is_empty() && !name.contains(['/', '?', '#', '%']) && name != "..");
            }
        }
    }
    let Ok(instance) = serde_json::from_slice::<Instance>(bytes) else { return page.is_ok() };
    if let Ok(address) = instance.address() {
        let spec = ClusterSpec::new().with_job(TaskType::Worker, [format!("{address}:8470")]);
        assert!(spec.is_err() || !address.contains('/'));
    }
    true
}
