//! Compiles the coordination service's protocol file without protoc.

#[cfg(feature = "coordination")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let proto = "../../proto/distribute/v1/coordination.proto";
    println!("cargo:rerun-if-changed={proto}");
    let descriptors = protox::compile([proto], ["../../proto"])?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}

#[cfg(not(feature = "coordination"))]
fn main() {}
