//! The source text of kernels, generated for data types.

use crate::DType;

/// Kernels that are compiled together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Module {
    /// `reduce_sum`, `reduce_product`, `reduce_min`, `reduce_max`.
    Reduce(DType),
    /// `pack`, `unpack` of up to `capacity` tensors.
    Pack {
        /// The number of tensors that its parameters hold.
        capacity: usize,
    },
    /// `scale`.
    Scale(DType),
    /// `cast`.
    Cast {
        /// The data type of the source.
        from: DType,
        /// The data type of the destination.
        to: DType,
    },
    /// `flag_non_finite`.
    Finite(DType),
    /// One step of each optimizer on up to `capacity` tensors.
    Step {
        /// The data type of parameters, gradients and slots.
        dtype: DType,
        /// The number of tensors that its parameters hold.
        capacity: usize,
    },
    /// `square_sums` and `fold` of up to `capacity` tensors.
    Norms {
        /// The data type of the tensors.
        dtype: DType,
        /// The number of tensors that its parameters hold.
        capacity: usize,
    },
    /// `total`.
    Total,
    /// `round_off` to a type of 16 bits.
    RoundOff(DType),
}

impl Module {
    /// Returns the name of the module in the compiler's messages.
    pub(super) fn name(self) -> String {
        match self {
            Module::Reduce(dtype) => format!("reduce_{dtype}.cu"),
            Module::Pack { capacity } => format!("pack_{capacity}.cu"),
            Module::Scale(dtype) => format!("scale_{dtype}.cu"),
            Module::Cast { from, to } => format!("cast_{from}_{to}.cu"),
            Module::Finite(dtype) => format!("finite_{dtype}.cu"),
            Module::Step { dtype, capacity } => format!("optimizer_{dtype}_{capacity}.cu"),
            Module::Norms { dtype, capacity } => format!("norms_{dtype}_{capacity}.cu"),
            Module::Total => "total.cu".to_owned(),
            Module::RoundOff(short) => format!("round_off_{short}.cu"),
        }
    }

    /// Returns all possible modules.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Module> {
        let floats: Vec<DType> = DType::ALL.into_iter().filter(|dtype| dtype.is_float()).collect();
        let casts = floats.iter().flat_map(|from| floats.iter().map(|to| Module::Cast { from: *from, to: *to }));
        let packs = super::packing::PACK_CAPACITIES.map(|capacity| Module::Pack { capacity });
        let mut all: Vec<Module> = casts.chain(packs).collect();
        all.extend(DType::ALL.map(Module::Reduce));
        all.extend(floats.iter().flat_map(|dtype| [Module::Scale(*dtype), Module::Finite(*dtype)]));
        for capacity in super::tensors::CAPACITIES {
            all.extend([DType::F32, DType::F64].map(|dtype| Module::Step { dtype, capacity }));
            all.extend([DType::F32, DType::F64].map(|dtype| Module::Norms { dtype, capacity }));
        }
        all.extend([Module::Total, Module::RoundOff(DType::F16), Module::RoundOff(DType::BF16)]);
        all
    }

    /// Returns the complete source text.
    pub(super) fn source(self) -> String {
        let (definitions, body) = match self {
            Module::Reduce(dtype) => (element(dtype) + &arithmetic(dtype), include_str!("kernels/reduce.cu")),
            Module::Pack { capacity } => (define("CAPACITY", &capacity.to_string()), include_str!("kernels/pack.cu")),
            Module::Scale(dtype) => (element(dtype), include_str!("kernels/scale.cu")),
            Module::Cast { from, to } => (element(from) + &target(to), include_str!("kernels/cast.cu")),
            Module::Finite(dtype) => (bits(dtype), include_str!("kernels/finite.cu")),
            Module::Step { dtype, capacity } => (table(dtype, capacity), include_str!("kernels/optimizer.cu")),
            Module::Norms { dtype, capacity } => (table(dtype, capacity), include_str!("kernels/norms.cu")),
            Module::Total => (table(DType::F64, 1), include_str!("kernels/total.cu")),
            Module::RoundOff(short) => (element(short), include_str!("kernels/round_off.cu")),
        };
        // The compiler's messages then count lines from the beginning of each file.
        format!(
            "#line 1 \"prelude.cu\"\n{}\n{definitions}#line 1 \"{}\"\n{body}",
            include_str!("kernels/prelude.cu"),
            self.name()
        )
    }
}

/// Returns the storage type, the computation type, and the conversions between them.
fn forms(dtype: DType) -> [&'static str; 4] {
    match dtype {
        DType::F16 => ["u16", "f32", "widen_f16", "narrow_f16"],
        DType::BF16 => ["u16", "f32", "widen_bf16", "narrow_bf16"],
        // Sums and products of integers are truncated to the storage type after each step.
        other => [other.name(), other.name(), "SAME", "SAME"],
    }
}

fn element(dtype: DType) -> String {
    let [stored, wide, widen, narrow] = forms(dtype);
    define("T", stored) + &define("WIDE", wide) + &define("WIDEN", widen) + &define("NARROW", narrow)
}

/// Returns the table of tensors of f32 or f64.
fn table(dtype: DType, capacity: usize) -> String {
    let [root, least] = match dtype {
        DType::F64 => ["sqrt", "2.2250738585072014e-308"],
        _ => ["sqrtf", "1.17549435e-38f"],
    };
    let names = define("T", dtype.name()) + &define("ROOT", root) + &define("LEAST", least);
    let capacity = define("CAPACITY", &capacity.to_string());
    format!("{names}{capacity}#line 1 \"tensors.cu\"\n{}\n", include_str!("kernels/tensors.cu"))
}

fn target(dtype: DType) -> String {
    let [stored, wide, _, narrow] = forms(dtype);
    define("TARGET", stored) + &define("TARGET_WIDE", wide) + &define("TARGET_NARROW", narrow)
}

fn arithmetic(dtype: DType) -> String {
    // Integers wrap, which is defined in C only for unsigned types.
    let (operand, quotient) = match dtype {
        DType::I64 => ("(u64)", "(i64)(a) / (i64)(n)"),
        DType::U64 => ("(u64)", "(u64)(a) / (u64)(n)"),
        dtype if dtype.is_float() => ("(WIDE)", "(a) / (WIDE)(n)"),
        _ => ("(u32)", "(i64)(a) / (i64)(n)"),
    };
    define("SUM(a, b)", &format!("({operand}(a) + {operand}(b))"))
        + &define("PRODUCT(a, b)", &format!("({operand}(a) * {operand}(b))"))
        + &define("DIVIDE(a, n)", &format!("({quotient})"))
}

fn bits(dtype: DType) -> String {
    let [bits, exponent] = match dtype {
        DType::F64 => ["u64", "0x7ff0000000000000ull"],
        DType::F16 => ["u16", "0x7c00"],
        DType::BF16 => ["u16", "0x7f80"],
        _ => ["u32", "0x7f800000u"],
    };
    define("BITS", bits) + &define("EXPONENT", exponent)
}

fn define(name: &str, value: &str) -> String {
    format!("#define {name} {value}\n")
}
