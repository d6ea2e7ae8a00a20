//! Programs in StableHLO.

use std::time::{Duration, Instant};

/// A deadline that a working plugin does not reach.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// One step of gradient descent on four weights: `w - 0.1 * sum of g over replicas`, and the replica's number. The
/// memory of `w` is donated to the first output on request.
pub(crate) fn step(replicas: usize, donates: bool) -> String {
    let alias = if donates { " {tf.aliasing_output = 0 : i32}" } else { "" };
    let group = (0..replicas).map(|replica| replica.to_string()).collect::<Vec<_>>().join(", ");
    format!(
        "module @step attributes {{mhlo.num_replicas = {replicas} : i32, mhlo.num_partitions = 1 : i32}} {{
  func.func public @main(%arg0: tensor<4xf32>{alias}, %arg1: tensor<4xf32>) -> (tensor<4xf32>, tensor<ui32>) {{
    %sum = \"stablehlo.all_reduce\"(%arg1) ({{
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }}) {{replica_groups = dense<[[{group}]]> : tensor<1x{replicas}xi64>}} : (tensor<4xf32>) -> tensor<4xf32>
    %rate = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %rates = stablehlo.broadcast_in_dim %rate, dims = [] : (tensor<f32>) -> tensor<4xf32>
    %change = stablehlo.multiply %sum, %rates : tensor<4xf32>
    %next = stablehlo.subtract %arg0, %change : tensor<4xf32>
    %id = stablehlo.replica_id : tensor<ui32>
    return %next, %id : tensor<4xf32>, tensor<ui32>
  }}
}}
"
    )
}

/// The transpose of a matrix of truth values, whose layout shows whether copies keep the order of elements.
pub(crate) const TRANSPOSE: &str = "module @transpose {
  func.func public @main(%arg0: tensor<2x3xi1>) -> tensor<3x2xi1> {
    %0 = stablehlo.transpose %arg0, dims = [1, 0] : (tensor<2x3xi1>) -> tensor<3x2xi1>
    return %0 : tensor<3x2xi1>
  }
}
";
