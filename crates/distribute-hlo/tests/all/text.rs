//! Texts of programs.

use distribute_hlo::{
    Builder, CollectiveGroups, CompareOp, DotDimensions, ElementType, Literal, Precision, Reducer, SortOrder,
    TensorType,
};

#[test]
fn a_whole_program() {
    let mut b = Builder::new("step").replicas(2);
    let w = b.donated_parameter(TensorType::new(ElementType::F32, [2]));
    let g = b.parameter(TensorType::new(ElementType::F32, [2]));
    let sum = b.all_reduce(g, Reducer::Sum, &CollectiveGroups::All).unwrap();
    let next = b.subtract(w, sum).unwrap();
    b.alias(w, 0).unwrap();
    let program = b.finish(&[next]).unwrap();
    let expected = "\
module @step attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
  func.func public @main(%0: tensor<2xf32> {tf.aliasing_output = 0 : i32}, %1: tensor<2xf32>) -> (tensor<2xf32>) {
    %2 = \"stablehlo.all_reduce\"(%1) ({^bb0(%lhs: tensor<f32>, %rhs: tensor<f32>): %both = \
        \"stablehlo.add\"(%lhs, %rhs) : (tensor<f32>, tensor<f32>) -> (tensor<f32>) \
        \"stablehlo.return\"(%both) : (tensor<f32>) -> ()}) \
        {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2xf32>) -> (tensor<2xf32>)
    %3 = \"stablehlo.subtract\"(%0, %2) : (tensor<2xf32>, tensor<2xf32>) -> (tensor<2xf32>)
    \"func.return\"(%3) : (tensor<2xf32>) -> ()
  }
}
";
    assert_eq!(program.text(), expected);
}

#[test]
fn types_have_their_names_in_stablehlo() {
    let mut names = ElementType::ALL.map(|element| TensorType::new(element, [2]).to_string());
    let expected = ["i1", "i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64", "f16", "bf16", "f32", "f64"];
    let mut expected = expected.map(|name| format!("tensor<2x{name}>"));
    names.sort();
    expected.sort();
    assert_eq!(names, expected);
    assert_eq!(TensorType::scalar(ElementType::Bool).to_string(), "tensor<i1>");
    assert_eq!(TensorType::scalar(ElementType::U64).to_string(), "tensor<ui64>");
}

#[test]
fn loops_print_their_regions() {
    let mut b = Builder::new("loop");
    let x = b.parameter(TensorType::scalar(ElementType::Bool));
    let last = b.while_loop(&[x], |_, state| Ok(state[0]), |b, state| Ok(vec![b.not(state[0])?])).unwrap();
    let program = b.finish(&last).unwrap();
    let expected = "    %4 = \"stablehlo.while\"(%0) ({
    ^bb0(%1: tensor<i1>):
      \"stablehlo.return\"(%1) : (tensor<i1>) -> ()
    }, {
    ^bb0(%2: tensor<i1>):
      %3 = \"stablehlo.not\"(%2) : (tensor<i1>) -> (tensor<i1>)
      \"stablehlo.return\"(%3) : (tensor<i1>) -> ()
    }) : (tensor<i1>) -> (tensor<i1>)
";
    assert!(program.text().contains(expected), "{}", program.text());
}

#[test]
fn constants_keep_every_bit() {
    let text = |literal: Literal| {
        let mut b = Builder::new("constant");
        let value = b.constant(literal).unwrap();
        let program = b.finish(&[value]).unwrap();
        let line = program.text().lines().find(|line| line.contains("constant\"")).unwrap();
        line.split_once("value = ").unwrap().1.split_once('}').unwrap().0.to_owned()
    };
    let splat = |element, value: f64| Literal::splat(TensorType::new(element, [2, 3]), value).unwrap();
    assert_eq!(text(splat(ElementType::F32, -0.0)), "dense<0x80000000> : tensor<2x3xf32>");
    assert_eq!(text(splat(ElementType::BF16, f64::INFINITY)), "dense<0x7F80> : tensor<2x3xbf16>");
    assert_eq!(text(splat(ElementType::F16, 1.0)), "dense<0x3C00> : tensor<2x3xf16>");
    assert_eq!(text(splat(ElementType::F64, 2.0)), "dense<0x4000000000000000> : tensor<2x3xf64>");
    assert_eq!(text(splat(ElementType::I8, -128.0)), "dense<-128> : tensor<2x3xi8>");
    // A little more than half way between two neighbours, by less than f32 has.
    let above = |tie: f64| tie + 2f64.powi(-24);
    assert_eq!(text(splat(ElementType::F16, above(2049.0))), "dense<0x6801> : tensor<2x3xf16>");
    assert_eq!(text(splat(ElementType::BF16, above(257.0))), "dense<0x4381> : tensor<2x3xbf16>");
    // By less than f64 has.
    let whole = Literal::splat(TensorType::scalar(ElementType::BF16), -((1i128 << 62) + (1i128 << 54) + 1) as i64);
    assert_eq!(text(whole.unwrap()), "dense<0xDE81> : tensor<bf16>");
    let most = Literal::splat(TensorType::scalar(ElementType::U64), u64::MAX).unwrap();
    assert_eq!(text(most), "dense<18446744073709551615> : tensor<ui64>");
    // Its lower half decides, which f64 does not hold.
    let odd = Literal::splat(TensorType::scalar(ElementType::F32), (1i64 << 62) + (1i64 << 38) + 1).unwrap();
    assert_eq!(text(odd), "dense<0x5E800001> : tensor<f32>");
    let dense = Literal::dense(&[1.0f32, f32::from_bits(0x7fc0_1234)], [2]).unwrap();
    assert_eq!(text(dense), "dense<\"0x0000803F3412C07F\"> : tensor<2xf32>");
    let truth = Literal::dense(&[true, false, false, true], [2, 2]).unwrap();
    assert_eq!(text(truth), "dense<[[true, false], [false, true]]> : tensor<2x2xi1>");
    assert_eq!(text(Literal::dense::<i32>(&[], [0, 2]).unwrap()), "dense<> : tensor<0x2xi32>");
    assert_eq!(text(Literal::dense(&[-5i16], [1]).unwrap()), "dense<-5> : tensor<1xi16>");
}

#[test]
fn comparisons_name_their_type() {
    for (element, kind) in [
        (ElementType::I8, "SIGNED"),
        (ElementType::I64, "SIGNED"),
        (ElementType::U32, "UNSIGNED"),
        (ElementType::Bool, "UNSIGNED"),
        (ElementType::BF16, "FLOAT"),
    ] {
        let mut b = Builder::new("comparison");
        let x = b.parameter(TensorType::new(element, [2]));
        let less = b.compare(CompareOp::Lt, x, x).unwrap();
        let program = b.finish(&[less]).unwrap();
        let expected = format!("comparison_direction LT>, compare_type = #stablehlo<comparison_type {kind}>}}");
        assert!(program.text().contains(&expected), "{expected}\n{}", program.text());
    }
}

#[test]
fn attributes_are_printed() {
    let mut b = Builder::new("attributes").precision(Precision::Default);
    let x = b.parameter(TensorType::new(ElementType::F32, [2, 2]));
    let product = b.dot_general(x, x, &DotDimensions::matmul(0)).unwrap();
    b.set_precision(Precision::Highest);
    let exact = b.dot_general(product, x, &DotDimensions::matmul(0)).unwrap();
    let sorted = b.sort(&[exact], 1, SortOrder::Descending).unwrap();
    let program = b.finish(&sorted).unwrap();
    for expected in [
        "{dot_dimension_numbers = #stablehlo.dot<lhs_batching_dimensions = [], rhs_batching_dimensions = [], \
         lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [0]>, precision_config = \
         [#stablehlo<precision DEFAULT>, #stablehlo<precision DEFAULT>]}",
        "precision_config = [#stablehlo<precision HIGHEST>, #stablehlo<precision HIGHEST>]}",
        "{comparison_direction = #stablehlo<comparison_direction GT>, compare_type = #stablehlo<comparison_type \
         TOTALORDER>}",
        "{dimension = 1 : i64, is_stable = true}",
    ] {
        assert!(program.text().contains(expected), "{expected}\n{}", program.text());
    }
}
