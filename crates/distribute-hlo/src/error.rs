//! Errors of building a program.

use distribute_types::{Class, ErrorClass};

use crate::TensorType;

/// An error of building a program. Every one is an error of the program that called the builder.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Operands or attributes of an operation do not match its definition.
    #[error("{operation}: {given}: {problem}")]
    Operation {
        /// The operation.
        operation: &'static str,
        /// The operands and their types.
        given: String,
        /// The difference from the definition, and a remedy.
        problem: String,
    },
    /// A value was made by another builder.
    #[error("{operation}: operand {operand} was made by another builder; pass values of this builder only")]
    ForeignValue {
        /// The operation.
        operation: &'static str,
        /// The place of the operand, from 0.
        operand: usize,
    },
    /// A value was made in the body of a `while_loop` or `if_else` that has ended.
    #[error(
        "{operation}: operand {operand} was made inside the body of a while_loop or if_else and is used outside of it; \
         return it from the body"
    )]
    OutOfScope {
        /// The operation.
        operation: &'static str,
        /// The place of the operand, from 0.
        operand: usize,
    },
    /// A tensor has more bytes than an address can count.
    #[error("{operation}: a tensor of type {} has more bytes than memory can address; use smaller sizes", ty.short())]
    TooLarge {
        /// The operation.
        operation: &'static str,
        /// The type of the tensor.
        ty: TensorType,
    },
    /// A constant cannot be made from the values given.
    #[error("constant: {problem}")]
    Literal {
        /// The problem, and a remedy.
        problem: String,
    },
    /// The parameters, outputs or settings of the program do not match each other.
    #[error("program {program:?}: {problem}")]
    Program {
        /// The name of the program.
        program: String,
        /// The problem, and a remedy.
        problem: String,
    },
}

impl ErrorClass for Error {
    fn class(&self) -> Class {
        Class::PERMANENT
    }
}

/// The result of building.
pub type Result<T, E = Error> = std::result::Result<T, E>;
