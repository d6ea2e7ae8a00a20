//! The text of a program: MLIR in its generic form, which changes less between versions than the short one.

mod attributes;
mod regions;

use std::fmt::{self, Write as _};

use crate::program::{Operation, Program, Region, ValueId};
use crate::{OpKind, TensorType};

/// Prints a program.
pub(crate) fn module(program: &Program) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = Printer { program, out: &mut text }.module();
    text
}

/// Prints into a string.
struct Printer<'a> {
    program: &'a Program,
    out: &'a mut String,
}

impl Printer<'_> {
    fn module(&mut self) -> fmt::Result {
        let program = self.program;
        writeln!(
            self.out,
            "module @{} attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {} : i32}} {{",
            program.name(),
            program.replicas()
        )?;
        self.out.push_str("  func.func public @main(");
        for (place, (id, parameter)) in program.body().parameters.iter().zip(program.parameters()).enumerate() {
            let separator = if place == 0 { "" } else { ", " };
            write!(self.out, "{separator}%{}: {}", id.0, parameter.ty)?;
            match (parameter.alias, parameter.donated) {
                (Some(output), _) => write!(self.out, " {{tf.aliasing_output = {output} : i32}}")?,
                (None, true) => self.out.push_str(" {jax.buffer_donor = true}"),
                (None, false) => {}
            }
        }
        self.out.push_str(") -> (");
        self.types(&program.body().results)?;
        self.out.push_str(") {\n");
        self.operations(program.body(), 2)?;
        self.leave("func.return", &program.body().results, 2)?;
        self.out.push_str("  }\n}\n");
        Ok(())
    }

    /// Prints the operations of a region.
    fn operations(&mut self, region: &Region, depth: usize) -> fmt::Result {
        for operation in &region.operations {
            self.indent(depth);
            self.operation(operation, depth)?;
        }
        Ok(())
    }

    /// Prints an operation.
    fn operation(&mut self, operation: &Operation, depth: usize) -> fmt::Result {
        self.values(&operation.results)?;
        if !operation.results.is_empty() {
            self.out.push_str(" = ");
        }
        write!(self.out, "\"stablehlo.{}\"(", operation.kind.name())?;
        self.values(&operation.operands)?;
        self.out.push(')');
        self.regions(operation, depth)?;
        self.attributes(operation)?;
        self.out.push_str(" : (");
        self.types(&operation.operands)?;
        self.out.push_str(") -> (");
        self.types(&operation.results)?;
        self.out.push_str(")\n");
        Ok(())
    }

    /// Prints the regions of an operation, if it has any.
    fn regions(&mut self, operation: &Operation, depth: usize) -> fmt::Result {
        if matches!(operation.kind, OpKind::While | OpKind::If) {
            self.out.push_str(" (");
            for (place, region) in operation.regions.iter().enumerate() {
                self.out.push_str(if place == 0 { "{\n" } else { ", {\n" });
                self.region(region, depth)?;
                self.indent(depth);
                self.out.push('}');
            }
            self.out.push(')');
            return Ok(());
        }
        let elements: Vec<_> = operation.operands.iter().map(|&id| self.ty(id).element).collect();
        regions::print(self.out, &operation.kind, &elements)
    }

    /// Prints the block of a region.
    fn region(&mut self, region: &Region, depth: usize) -> fmt::Result {
        if !region.parameters.is_empty() {
            self.indent(depth);
            self.out.push_str("^bb0(");
            for (place, &id) in region.parameters.iter().enumerate() {
                let separator = if place == 0 { "" } else { ", " };
                let ty = self.ty(id);
                write!(self.out, "{separator}%{}: {ty}", id.0)?;
            }
            self.out.push_str("):\n");
        }
        self.operations(region, depth + 1)?;
        self.leave("stablehlo.return", &region.results, depth + 1)
    }

    /// Prints the end of a region.
    fn leave(&mut self, name: &str, results: &[ValueId], depth: usize) -> fmt::Result {
        self.indent(depth);
        write!(self.out, "\"{name}\"(")?;
        self.values(results)?;
        self.out.push_str(") : (");
        self.types(results)?;
        self.out.push_str(") -> ()\n");
        Ok(())
    }

    /// Prints the attributes of an operation, if it has any.
    fn attributes(&mut self, operation: &Operation) -> fmt::Result {
        let element = operation.operands.first().map(|&operand| self.ty(operand).element);
        let attributes = attributes::of(&operation.kind, element, self.program.replicas());
        for (place, (name, value)) in attributes.iter().enumerate() {
            let separator = if place == 0 { " {" } else { ", " };
            write!(self.out, "{separator}{name} = {value}")?;
        }
        self.out.push_str(if attributes.is_empty() { "" } else { "}" });
        Ok(())
    }

    /// Prints names of values, separated by commas.
    fn values(&mut self, ids: &[ValueId]) -> fmt::Result {
        for (place, id) in ids.iter().enumerate() {
            let separator = if place == 0 { "" } else { ", " };
            write!(self.out, "{separator}%{}", id.0)?;
        }
        Ok(())
    }

    /// Prints types of values, separated by commas.
    fn types(&mut self, ids: &[ValueId]) -> fmt::Result {
        for (place, &id) in ids.iter().enumerate() {
            let separator = if place == 0 { "" } else { ", " };
            let ty = self.ty(id);
            write!(self.out, "{separator}{ty}")?;
        }
        Ok(())
    }

    /// Returns the type of a value. The builder made values and types together.
    fn ty(&self, id: ValueId) -> TensorType {
        self.program.types()[id.index()].clone()
    }

    /// Prints two spaces for each level.
    fn indent(&mut self, depth: usize) {
        for _ in 0..depth {
            self.out.push_str("  ");
        }
    }
}
