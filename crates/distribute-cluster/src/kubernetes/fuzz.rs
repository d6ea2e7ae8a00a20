//! The answers of Kubernetes' API server.

use std::cmp::Ordering;
use std::time::Duration;

use super::api::{Page, Pods, failed};
use super::cluster::cluster;
use super::natural::compare;
use super::trouble::Refusal;
use super::{KubernetesAccess, KubernetesLocation, KubernetesOptions};
use crate::{ClusterSpec, TaskType};

/// A page of pods, or an error.
pub(crate) fn answers(bytes: &[u8]) -> bool {
    for code in [400, 401, 403, 404, 410, 429, 500] {
        let trouble = failed(code, bytes, None);
        assert!(trouble.is_transient() || !trouble.is_expired());
        let (access, limit) = (KubernetesAccess::service_account(), Duration::from_secs(1));
        let (trouble, server) = (&trouble, "https://a");
        let refusal = Refusal { trouble, server, access: &access, namespace: "n", selector: "a=b", limit };
        let text = refusal.error().to_string();
        // Only the role that is to be applied has lines.
        assert!(!text.chars().any(|c| c.is_control() && !(c == '\n' && code == 403)), "{text:?}");
    }
    let Ok(page) = serde_json::from_slice::<Page>(bytes) else { return false };
    let names: Vec<&str> = page.items.iter().take(30).map(|pod| pod.metadata.name.as_str()).collect();
    for (a, b) in names.iter().flat_map(|a| names.iter().map(move |b| (a, b))) {
        assert_eq!(compare(a, b), compare(b, a).reverse());
        assert_eq!(compare(a, b) == Ordering::Equal, a == b);
    }
    for location in [KubernetesLocation::WithinCluster, KubernetesLocation::OffCluster] {
        for pod in &page.items {
            let _ = pod.standing(location);
            assert!(!pod.described(location).contains('\n'));
        }
        let pods: Pods = page.items.iter().map(|pod| (pod.metadata.name.clone(), pod.clone())).collect();
        let options = KubernetesOptions::default().job(TaskType::Worker, ["a=b"]).location(location);
        if let Ok(Ok(cluster)) = cluster(&options, &[&pods]) {
            assert!((1..=ClusterSpec::MAX_TASKS).contains(&cluster.spec.tasks().count()));
            assert_eq!(cluster.pods.len(), cluster.spec.tasks().count());
        }
    }
    true
}
