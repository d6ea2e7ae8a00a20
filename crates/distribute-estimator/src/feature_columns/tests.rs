//! Columns computed by hand.

use candle_nn::VarBuilder;
use distribute_candle::{CandleStrategy, Model};
use distribute_input::{Array, Element};
use distribute_strategy::Strategy;
use distribute_values::TensorStorage;

use super::*;

fn scope<M>(build: impl Fn(VarBuilder<'static>) -> candle_core::Result<M>) -> Model<M> {
    Strategy::default_strategy().unwrap().scope(build).unwrap()
}

fn one(name: &str, column: impl Into<distribute_input::Column>) -> Features {
    Features::new([(name, column.into())]).unwrap()
}

fn dense(column: impl Into<FeatureColumn>, features: &Features) -> Vec<Vec<f32>> {
    let columns = FeatureColumns::new().with(column);
    let layer = scope(|vb| InputLayer::new(&columns, vb));
    layer.first().forward(features).unwrap().to_vec2().unwrap()
}

fn ids(column: &Categorical, features: &Features) -> Vec<Option<u32>> {
    column.ids(features).unwrap().ids
}

#[test]
fn numbers_are_normalised_and_put_into_buckets() {
    let x = Numeric::new("x").normalizer(|x| x / 10.0);
    let features = one("x", vec![-5.0, 10.0, 25.0]);
    assert_eq!(dense(x.clone(), &features), [[-0.5], [1.0], [2.5]]);
    let buckets = x.bucketized([0.0, 1.0, 2.0]);
    assert_eq!(buckets.buckets(), 4);
    // A boundary belongs to the interval above it.
    assert_eq!(ids(&buckets, &features), [Some(0), Some(2), Some(3)]);
    let wide = one("x", Array::new([1, 2], vec![-5.0, 5.0]).unwrap());
    let pair = Numeric::new("x").shape([2]).bucketized([0.0]);
    assert_eq!(dense(pair, &wide), [[1.0, 0.0, 0.0, 1.0]]);
    assert_eq!(dense(Numeric::new("x"), &one("x", vec![3, 4])), [[3.0], [4.0]]);
}

#[test]
fn categories_are_places_in_a_list_numbers_or_hashes() {
    let words = one("w", vec!["b", "z", "", "a"]);
    let vocabulary = Categorical::vocabulary("w", ["a", "b"]);
    assert_eq!(ids(&vocabulary, &words), [Some(1), None, None, Some(0)]);
    assert_eq!(ids(&vocabulary.clone().default_category(0), &words), [Some(1), Some(0), None, Some(0)]);
    assert_eq!(ids(&vocabulary.clone().oov_buckets(1), &words), [Some(1), Some(2), None, Some(0)]);
    assert_eq!(vocabulary.oov_buckets(5).buckets(), 7);
    assert_eq!(ids(&Categorical::vocabulary("n", [10, 20]), &one("n", vec![20, -1, 30])), [Some(1), None, None]);
    let identity = Categorical::identity("n", 3);
    assert_eq!(ids(&identity, &one("n", vec![2, -1, 0])), [Some(2), None, Some(0)]);
    // Padding stays without a category.
    let padded = one("n", Array::new([2, 2], vec![2, -1, 7, -1]).unwrap());
    assert_eq!(ids(&identity.default_category(1), &padded), [Some(2), None, Some(1), None]);
    let hashed = Categorical::hash_bucket("w", 10);
    // FNV-1a of "a" is af63dc4c8601ec8c.
    assert_eq!(ids(&hashed, &one("w", vec!["a"])), [Some((0xaf63_dc4c_8601_ec8c_u64 % 10) as u32)]);
    assert_eq!(ids(&hashed, &one("w", vec!["7"])), ids(&hashed, &one("w", vec![7])));
}

#[test]
fn several_categories_of_an_example_are_counted_or_combined() {
    let words = |shape: [usize; 2], words: &[&str]| {
        one("w", Array::new(shape, words.iter().map(|word| (*word).to_owned()).collect()).unwrap())
    };
    let vocabulary = Categorical::vocabulary("w", ["a", "b", "c"]);
    let pair = words([2, 3], &["a", "c", "c", "b", "", ""]);
    assert_eq!(dense(vocabulary.clone().indicator(), &pair), [[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]]);
    for (combiner, factor) in [(Combiner::Sum, 1.0), (Combiner::Mean, 1.0 / 3.0), (Combiner::SqrtN, 1.0 / 3f32.sqrt())]
    {
        let embedding = FeatureColumns::new().with(vocabulary.clone().embedding(2).combiner(combiner));
        let layer = scope(|vb| InputLayer::new(&embedding, vb));
        let table = layer.variables()[0].components()[0].to_vec2::<f32>().unwrap();
        let rows = layer.first().forward(&pair).unwrap().to_vec2::<f32>().unwrap();
        for place in 0..2 {
            let expected = factor * (table[0][place] + 2.0 * table[2][place]);
            assert!((rows[0][place] - expected).abs() < 1e-6, "{combiner:?}: {rows:?} {table:?}");
            assert!((rows[1][place] - table[1][place]).abs() < 1e-6);
        }
    }
}

#[test]
fn crossed_categories_depend_on_all_sides() {
    let crossed = Categorical::crossed(["a".into(), Numeric::new("x").bucketized([0.0]).into()], 1 << 20);
    let features = |words: Vec<&str>, x: Vec<f32>| {
        Features::new([("a", distribute_input::Column::from(words)), ("x", x.into())]).unwrap()
    };
    let found = ids(&crossed, &features(vec!["u", "u", "v", "u", ""], vec![-1.0, 1.0, -1.0, -2.0, 1.0]));
    assert_eq!(found[0], found[3]);
    assert!(found[0] != found[1] && found[0] != found[2] && found[1] != found[2] && found[4].is_none(), "{found:?}");
    // Two words for each example: two combinations.
    let several = one("a", Array::new([1, 2], vec!["u".to_owned(), "v".to_owned()]).unwrap());
    let both = Categorical::crossed(["a".into(), "a".into()], 1 << 20).ids(&several).unwrap();
    assert_eq!((both.width, both.ids.len()), (4, 4));
}

#[test]
fn a_linear_model_adds_weights_and_no_examples_are_no_trouble() {
    let columns = FeatureColumns::new()
        .with(Numeric::new("x"))
        .with(Categorical::vocabulary("w", ["a", "b"]))
        .with(Categorical::vocabulary("w", ["a", "b"]).embedding(2));
    let linear = scope(|vb| LinearModel::new(&columns, 1, vb));
    let value = |name: &str| {
        linear.variables().iter().find(|variable| variable.name() == name).unwrap().components()[0].clone()
    };
    let set = |name: &str, numbers: &[f32]| {
        value(name).write(&mut |mut weights| weights.as_mut_slice::<f32>().unwrap().copy_from_slice(numbers)).unwrap();
    };
    set("x.weights", &[2.0]);
    set("w.weights", &[10.0, 20.0]);
    let features =
        Features::new([("x", vec![1.0, 2.0].into()), ("w", distribute_input::Column::from(vec!["b", "a"]))]).unwrap();
    assert_eq!(linear.first().forward(&features).unwrap().to_vec2::<f32>().unwrap(), [[22.0], [14.0]]);
    let none = features.slice(0..0).unwrap();
    let sum = linear.first().forward(&none).unwrap();
    assert_eq!(sum.dims(), [0, 1]);
    assert!(sum.sum_all().unwrap().backward().is_ok());
}

#[test]
fn mistakes_are_answered_by_a_sentence() {
    let said = |column: FeatureColumn| FeatureColumns::new().with(column).check().unwrap_err().to_string();
    let x = Numeric::new("x");
    for (column, words) in [
        (x.clone().bucketized([1.0, 0.0]).into(), "boundaries are [1.0, 0.0]; give them in ascending order"),
        (x.clone().bucketized([f32::NAN]).into(), "boundaries are [NaN]"),
        (x.clone().bucketized([]).into(), "no boundaries"),
        (x.clone().shape([0]).into(), "holds nothing"),
        (Categorical::vocabulary("w", Vec::<String>::new()).into(), "its vocabulary is empty"),
        (Categorical::vocabulary("w", ["a", "a"]).into(), "2 words, of which 1 differ"),
        (Categorical::vocabulary("w", ["a"]).oov_buckets(1).default_category(0).into(), "both a default and buckets"),
        (Categorical::vocabulary("w", ["a"]).default_category(1).into(), "its default is category 1, but it has 1"),
        (Categorical::identity("n", 0).indicator(), "0 categories"),
        (Categorical::hash_bucket("n", 3).embedding(0).into(), "0 elements"),
        (Categorical::crossed(["a".into()], 3).into(), "crosses 1 features"),
        (Categorical::hash_bucket("n", 3).oov_buckets(1).into(), "oov_buckets is a setting of vocabularies"),
        (x.clone().bucketized([0.0]).default_category(1).into(), "default_category is a setting of"),
    ] {
        let text = said(column);
        assert!(text.contains(words), "{text}");
    }
    let text = FeatureColumns::new().check().unwrap_err().to_string();
    assert!(text.contains("at least one"), "{text}");
    let twice = FeatureColumns::new().with(x.clone()).with(x.clone()).check().unwrap_err().to_string();
    assert!(twice.contains("given twice"), "{twice}");
    let sparse = FeatureColumns::new().with(Categorical::identity("n", 3)).check_dense().unwrap_err().to_string();
    assert!(sparse.contains("call indicator() or embedding"), "{sparse}");

    let said = |column: Categorical, features: Features| column.ids(&features).err().unwrap().to_string();
    let text = said(Categorical::identity("n", 3), one("n", vec![1, 3]));
    assert!(text.contains("it holds 3") && text.contains("from 0 to 2"), "{text}");
    let text = said(Categorical::identity("m", 3), one("n", vec![1]));
    assert!(text.contains("\"m\"") && text.contains("the data have n"), "{text}");
    assert!(said(Categorical::identity("n", 3), one("n", vec!["a"])).contains("it holds texts"));
    assert!(said(Categorical::hash_bucket("n", 3), one("n", vec![1.0])).contains("bucketized"));
    // A NaN in the data, and one from a normalizer.
    let logarithm = Numeric::new("x").normalizer(f32::ln).bucketized([0.0]);
    for (column, value) in [(x.clone().bucketized([0.0]), f32::NAN), (logarithm, -1.0)] {
        let crossed = Categorical::crossed([column.clone().into(), column.clone().into()], 5);
        for column in [column, crossed] {
            let text = said(column, one("x", vec![1.0, value]));
            assert!(text.contains("\"x\": it holds NaN") && text.contains("replace it in the input"), "{text}");
        }
    }
    let text = x.values(&one("x", vec!["a"])).unwrap_err().to_string();
    assert!(text.contains("it holds texts"), "{text}");
    let text = x.values(&one("x", Array::new([1, 2], vec![0f32, 1.0]).unwrap())).unwrap_err().to_string();
    assert!(text.contains("shape [2]") && text.contains("of shape []"), "{text}");
}
