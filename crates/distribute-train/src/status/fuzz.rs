//! The reports of tasks to the status page.

use std::time::Duration;

use super::{End, Job};
use crate::progress::Message;

/// Reports, one on each line.
pub(crate) fn reports(bytes: &[u8]) -> bool {
    let mut job = Job::new("job");
    ["chief:0", "worker:1"].into_iter().for_each(|task| job.expect(task));
    let (mut now, mut received) = (Duration::ZERO, 0);
    job.start("worker:1", 7, now);
    for line in bytes.split(|byte| *byte == b'\n').take(100) {
        now += Duration::from_millis(900);
        let Ok(message) = serde_json::from_slice::<Message>(line) else { continue };
        job.receive(&message, now);
        received += 1;
    }
    job.end("worker:1", End::Stopped, now);
    let view = job.view(now);
    assert_eq!(view.tasks.len(), 2);
    // The pages have what is known of tasks, and not more the more is reported.
    let json = serde_json::to_string(&view).expect("a view can be written");
    let metrics = super::metrics::text(&view).expect("memory can be written");
    assert!(json.len().max(metrics.len()) < 1 << 20, "{} and {}", json.len(), metrics.len());
    received > 0
}
