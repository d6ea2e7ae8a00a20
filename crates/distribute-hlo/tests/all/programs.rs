//! Values, parameters and finished programs.

use std::cell::Cell;

use distribute_hlo::{Builder, CollectiveGroups, CompareOp, ElementType, Error, OpKind, Reducer, TensorType};
use distribute_types::ErrorClass;

fn ty() -> TensorType {
    TensorType::new(ElementType::F32, [2])
}

#[test]
fn values_of_another_builder_are_refused() {
    let (mut b, mut other) = (Builder::new("one"), Builder::new("other"));
    let (x, y) = (b.parameter(ty()), other.parameter(ty()));
    assert_eq!(x.id(), y.id());
    let error = b.add(x, y).unwrap_err();
    assert_eq!(error, Error::ForeignValue { operation: "add", operand: 1 });
    assert!(!error.is_retryable());
    assert_eq!(b.type_of(y).unwrap_err(), Error::ForeignValue { operation: "type_of", operand: 0 });
    assert_eq!(b.finish(&[y]).unwrap_err(), Error::ForeignValue { operation: "finish", operand: 0 });
}

#[test]
fn values_of_a_body_end_with_it() {
    let mut b = Builder::new("scopes");
    let x = b.parameter(ty());
    let yes = b.scalar(true).unwrap();
    let inner = Cell::new(None);
    let chosen = b.if_else(
        yes,
        |b| {
            let doubled = b.add(x, x)?;
            inner.set(Some(doubled));
            Ok(vec![doubled])
        },
        |b| Ok(vec![b.negate(inner.get().unwrap_or(x))?]),
    );
    assert_eq!(chosen.unwrap_err(), Error::OutOfScope { operation: "negate", operand: 0 });
    let error = b.add(x, inner.get().unwrap()).unwrap_err();
    assert_eq!(error, Error::OutOfScope { operation: "add", operand: 1 });
    // After an error the builder is where it was.
    let sum = b.add(x, x).unwrap();
    let program = b.finish(&[sum]).unwrap();
    assert_eq!(program.counts().into_iter().collect::<Vec<_>>(), [("add", 1), ("constant", 1)]);
}

#[test]
fn aliases_are_compared_with_outputs() {
    let program = |alias: &dyn Fn(&mut Builder, [distribute_hlo::Value; 3]) -> distribute_hlo::Result<()>| {
        let mut b = Builder::new("aliases");
        let values = [b.donated_parameter(ty()), b.donated_parameter(ty()), b.parameter(ty())];
        alias(&mut b, values)?;
        let scalar = b.scalar(1i32)?;
        b.finish(&[values[0], values[1], scalar])
    };
    let found = program(&|b, v| b.alias(v[0], 1)).unwrap();
    assert_eq!(
        found.parameters().iter().map(|p| (p.donated, p.alias)).collect::<Vec<_>>(),
        [(true, Some(1)), (true, None), (false, None)]
    );
    assert!(
        found.text().contains(
            "%0: tensor<2xf32> {tf.aliasing_output = 1 : i32}, %1: tensor<2xf32> \
        {jax.buffer_donor = true}, %2: tensor<2xf32>)"
        ),
        "{}",
        found.text()
    );
    type Alias<'a> = &'a dyn Fn(&mut Builder, [distribute_hlo::Value; 3]) -> distribute_hlo::Result<()>;
    let refusals: [(Alias<'_>, &str); 5] = [
        (&|b, v| b.alias(v[2], 0), "alias: value is f32[2]: it keeps its buffer; add it by donated_parameter"),
        (&|b, v| b.alias(v[0], 0).and(b.alias(v[0], 1)), "alias: value is f32[2]: output 0 is written into it already"),
        (
            &|b, v| b.alias(v[0], 3),
            "program \"aliases\": output 3 is to be written into parameter 0, and there are 3 \
            outputs",
        ),
        (
            &|b, v| b.alias(v[0], 2),
            "program \"aliases\": output 2 is i32[] and is to be written into parameter 0, which \
            is f32[2]; alias values of one type",
        ),
        (
            &|b, v| b.alias(v[0], 0).and(b.alias(v[1], 0)),
            "program \"aliases\": output 0 is to be written into two \
            parameters",
        ),
    ];
    for (alias, text) in refusals {
        assert_eq!(program(alias).unwrap_err().to_string(), text);
    }
}

#[test]
fn a_program_has_replicas() {
    let error = Builder::new("none").replicas(0).finish(&[]).unwrap_err();
    assert_eq!(error.to_string(), "program \"none\": it has 0 replicas; expected 1 to 2147483647");
}

#[test]
fn replicas_are_set_before_collectives() {
    let build = |then: &dyn Fn(&mut Builder, distribute_hlo::Value) -> distribute_hlo::Result<()>| {
        let mut b = Builder::new("late").replicas(2);
        let x = b.parameter(ty());
        let gathered = b.all_gather(x, 0, &CollectiveGroups::All)?;
        let mut b = b.replicas(4);
        then(&mut b, x)?;
        b.finish(&[gathered])
    };
    assert_eq!(
        build(&|_, _| Ok(())).unwrap_err().to_string(),
        "program \"late\": it has 4 replicas, and collectives were added for 2; set replicas before collectives"
    );
    let error = build(&|b, x| b.all_gather(x, 0, &CollectiveGroups::All).map(|_| ())).unwrap_err();
    assert_eq!(error.to_string(), "program \"late\": the number of replicas was changed after a collective");
}

#[test]
fn operations_of_loops_are_found_and_counted() {
    let mut b = Builder::new("counts").replicas(2);
    let x = b.parameter(ty());
    let zero = b.scalar(0i32).unwrap();
    let last = b.while_loop(
        &[zero, x],
        |b, state| b.compare(CompareOp::Lt, state[0], zero),
        |b, state| Ok(vec![state[0], b.all_reduce(state[1], Reducer::Sum, &CollectiveGroups::All)?]),
    );
    let program = b.finish(&[last.unwrap()[1]]).unwrap();
    assert_eq!((program.count("all_reduce"), program.count("while"), program.count("add")), (1, 1, 0));
    assert_eq!(program.operations().filter(|operation| operation.kind.is_collective()).count(), 1);
    let loops = program.operations().find(|operation| operation.kind == OpKind::While).unwrap();
    assert_eq!(loops.regions[1].parameters.len(), 2);
    assert_eq!(program.outputs(), [ty()]);
}

#[test]
fn equal_calls_make_equal_programs() {
    let program = |value: f32| {
        let mut b = Builder::new("9 lives");
        let x = b.parameter(ty());
        let y = b.splat(&[2], value).unwrap();
        let sum = b.add(x, y).unwrap();
        b.finish(&[sum]).unwrap()
    };
    let (first, second, other) = (program(1.0), program(1.0), program(1.5));
    assert_eq!((first.text(), first.fingerprint()), (second.text(), second.fingerprint()));
    assert_ne!(first.fingerprint(), other.fingerprint());
    assert_eq!(first.name(), "_9_lives");
}
