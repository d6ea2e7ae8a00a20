//! The collectives of a program that XLA has optimized.

use std::collections::BTreeMap;

use distribute_device::pjrt::OptimizedProgram;
use prost::Message;

/// Returns how many operations of each kind exchange values between devices. Of an operation in two halves the start
/// counts.
pub(super) fn counts(program: &OptimizedProgram) -> Result<BTreeMap<String, usize>, String> {
    let module = match program.format.as_str() {
        "hlo" => Module::decode(program.code.as_slice()),
        "hlo_with_config" => {
            let both = ModuleWithConfig::decode(program.code.as_slice());
            both.map(|both| both.module.unwrap_or_default())
        }
        other => return Err(format!("the optimized program has the format {other:?}; hlo was expected")),
    };
    let module = module.map_err(|error| format!("the optimized program cannot be read: {error}"))?;
    let mut counts = BTreeMap::new();
    for instruction in module.computations.iter().flat_map(|computation| &computation.instructions) {
        let opcode = instruction.opcode.strip_suffix("-start").unwrap_or(&instruction.opcode);
        if COLLECTIVES.contains(&opcode) {
            *counts.entry(opcode.to_owned()).or_insert(0) += 1;
        }
    }
    Ok(counts)
}

const COLLECTIVES: [&str; 7] = [
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
];

/// `HloModuleProtoWithConfig`, in parts.
#[derive(Clone, PartialEq, Message)]
struct ModuleWithConfig {
    #[prost(message, optional, tag = "1")]
    module: Option<Module>,
}

/// `HloModuleProto`, in parts.
#[derive(Clone, PartialEq, Message)]
struct Module {
    #[prost(message, repeated, tag = "3")]
    computations: Vec<Computation>,
}

/// `HloComputationProto`, in parts.
#[derive(Clone, PartialEq, Message)]
struct Computation {
    #[prost(message, repeated, tag = "2")]
    instructions: Vec<Instruction>,
}

/// `HloInstructionProto`, in parts.
#[derive(Clone, PartialEq, Message)]
struct Instruction {
    #[prost(string, tag = "2")]
    opcode: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectives_are_counted_and_the_second_half_is_not() {
        let of = |opcodes: &[&str]| {
            let instructions = opcodes.iter().map(|opcode| Instruction { opcode: (*opcode).to_owned() }).collect();
            Computation { instructions }
        };
        let computations = vec![
            of(&["add", "all-reduce", "all-reduce-start", "all-reduce-done"]),
            of(&["parameter", "collective-permute-start", "collective-permute-done", "all-gather-done", "reduce"]),
        ];
        let module = Module { computations };
        let expected = BTreeMap::from([("all-reduce".to_owned(), 2), ("collective-permute".to_owned(), 1)]);
        let with_config = ModuleWithConfig { module: Some(module.clone()) };
        for (format, code) in [("hlo", module.encode_to_vec()), ("hlo_with_config", with_config.encode_to_vec())] {
            let program = optimized(format, code);
            assert_eq!(counts(&program).unwrap(), expected, "{format}");
        }
        assert!(counts(&optimized("mlir", Vec::new())).unwrap_err().contains("has the format \"mlir\""));
        assert!(counts(&optimized("hlo", vec![0xff])).unwrap_err().contains("cannot be read"));
    }

    fn optimized(format: &str, code: Vec<u8>) -> OptimizedProgram {
        OptimizedProgram { format: format.to_owned(), code }
    }
}
