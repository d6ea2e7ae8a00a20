//! Compiles the messages of parameter servers and workers, without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let protos = ["../../proto/distribute/v1/parameter_server.proto", "../../proto/distribute/v1/worker.proto"];
    for proto in protos {
        println!("cargo:rerun-if-changed={proto}");
    }
    let descriptors = protox::compile(protos, ["../../proto"])?;
    // Messages only: payloads bypass the codec that generated services would use.
    let messages = tonic_prost_build::configure().build_client(false).build_server(false);
    messages.bytes(".").compile_fds(descriptors)?;
    Ok(())
}
