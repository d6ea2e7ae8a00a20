//! Compiles the protocol of the gRPC transport, without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    #[cfg(feature = "grpc")]
    {
        let proto = "../../proto/distribute/v1/collective.proto";
        println!("cargo:rerun-if-changed={proto}");
        let descriptors = protox::compile([proto], ["../../proto"])?;
        // Only messages are generated: payloads bypass the codec that the generated service would use.
        let messages = tonic_prost_build::configure().build_client(false).build_server(false);
        messages.bytes(".").compile_fds(descriptors)?;
    }
    Ok(())
}
