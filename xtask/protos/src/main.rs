//! Compiles the protocol files of the workspace to Rust: `protos FOLDER`, where the workspace is in FOLDER.
//!
//! With `--check`, compares what it would write with what is there.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

/// A crate and its protocol files.
const CRATES: [(&str, &[&str]); 4] = [
    ("distribute-cluster", &["coordination.proto", "elastic.proto"]),
    ("distribute-collectives", &["collective.proto"]),
    ("distribute-data-service", &["data_service.proto"]),
    ("distribute-parameter-server", &["parameter_server.proto", "worker.proto", "outer_parameters.proto"]),
];

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (folder, check) = (arguments.next(), arguments.next().as_deref() == Some("--check"));
    let Some(folder) = folder else {
        eprintln!("usage: protos FOLDER [--check]");
        return ExitCode::from(2);
    };
    for (name, protos) in CRATES {
        let folder = Path::new(&folder).join("crates").join(name).join("proto");
        match compile(&folder, protos, check) {
            Ok(()) => println!("{name}: {}", if check { "as its protocol files" } else { "written" }),
            Err(error) => {
                eprintln!("{name}: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

fn compile(folder: &Path, protos: &[&str], check: bool) -> Result<(), Box<dyn Error>> {
    let protos: Vec<_> = protos.iter().map(|proto| folder.join("distribute/v1").join(proto)).collect();
    let descriptors = protox::compile(protos, [folder])?;
    let out = std::env::temp_dir().join(format!("distribute-protos-{}", std::process::id()));
    std::fs::create_dir_all(&out)?;
    // Messages alone: payloads bypass the codec that generated clients and servers would use.
    let written = prost_build::Config::new().bytes(["."]).out_dir(&out).compile_fds(descriptors);
    let generated = written.and_then(|()| std::fs::read_to_string(out.join("distribute.v1.rs")));
    std::fs::remove_dir_all(&out)?;
    let (generated, file) = (generated?, folder.join("distribute.v1.rs"));
    if !check {
        return Ok(std::fs::write(file, generated)?);
    }
    match std::fs::read_to_string(&file)? == generated {
        true => Ok(()),
        false => {
            let file = file.display();
            Err(format!("{file} is not what its protocol files compile to; run cargo xtask protos").into())
        }
    }
}
