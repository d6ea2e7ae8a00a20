//! Compiles the protocol of the gRPC transport, without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    #[cfg(feature = "grpc")]
    {
        let proto = "../../proto/distribute/v1/collective.proto";
        println!("cargo:rerun-if-changed={proto}");
        let descriptors = protox::compile([proto], ["../../proto"])?;
        tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    }
    Ok(())
}
