use distribute_testkit::replay;

use super::*;

#[test]
fn replay_device_names() {
    let names = ["GPU:0", "/job:worker/replica:0/task:3/device:CPU:*", "cuda:1", "cpu:0,/cpu:1", "*", "TPU_SYSTEM"];
    replay("device_names", device_names, &names.map(|name| name.as_bytes().to_vec()), 3000);
}
