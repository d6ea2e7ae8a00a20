//! The program on a CPU: all of it except the device.

use std::process::Command;

use serde_json::Value;

fn run(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_distribute-gpu-training")).args(arguments).output();
    let output = output.expect("the program starts");
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn every_model_trains_alone_and_under_a_strategy() {
    let (success, printed) = run(&["--device", "cpu", "--tiny", "--replicas", "CPU:0,CPU:1"]);
    let rows: Vec<Value> = printed.lines().map(|line| serde_json::from_str(line).unwrap_or_default()).collect();
    assert!(success && rows.len() == 6, "{printed}");
    for (row, model) in rows.iter().zip(["mlp", "mlp", "cnn", "cnn", "transformer", "transformer"]) {
        assert_eq!(row["model"], model, "{printed}");
        let replicas = if row["framework"] == "distribute" { 2 } else { 1 };
        assert_eq!(row["batch"], 8 * replicas, "{printed}");
        assert!(row["samples_per_second"].as_f64().is_some_and(|rate| rate > 0.0), "{printed}");
    }
}

#[test]
fn a_build_without_cuda_says_so() {
    let (success, printed) = run(&["--tiny"]);
    assert!(success, "{printed}");
    assert_eq!(printed, "skipped: this program was built without candle's CUDA\n");
}
