//! The layers that are split, the operations of which they consist, and what they refuse.

use super::*;

#[test]
fn conjugate_operations_have_the_gradients_of_the_whole() {
    for ranks in [2, 4] {
        let strategy = mesh(1, ranks);
        let values: Vec<f64> = (0..24).map(|at| (at as f64 * 0.7).sin()).collect();
        let x = || Var::from_tensor(&Tensor::from_vec(values.clone(), (3, 8), &Device::Cpu).unwrap()).unwrap();
        let weights: Vec<f64> = (0..24).map(|at| (at as f64 * 1.3).cos()).collect();
        let weights = Tensor::from_vec(weights, (3, 8), &Device::Cpu).unwrap();
        // (x² scattered, cubed in parts, gathered) · weights, and the sum over ranks of rank + 1 times it.
        let whole = x();
        let cubed = whole.sqr().unwrap().powf(3.0).unwrap();
        let loss = (&cubed * &weights).unwrap().sum_all().unwrap();
        let factor = (ranks * (ranks + 1) / 2) as f64;
        let loss = (loss + (cubed.sum_all().unwrap() * factor).unwrap()).unwrap();
        let expected: Vec<Vec<f64>> = loss.backward().unwrap().get(&whole).unwrap().to_vec2().unwrap();
        strategy
            .run_with((), |context, ()| {
                let group = context.tensor_group().unwrap();
                let x = x();
                let part = scatter_to_tensor_group(&group, &x.sqr()?)?.powf(3.0)?;
                assert_eq!(part.dims(), [3, 8 / ranks]);
                let cubed = gather_from_tensor_group(&group, &part)?;
                let term = (copy_to_tensor_group(&group, &cubed)? * (context.tensor_rank() + 1) as f64)?;
                let summed = sum_over_tensor_group(&group, &term.sum_all()?)?;
                let total = ((&cubed * &weights)?.sum_all()? + summed)?;
                assert!((total.to_scalar::<f64>()? - loss.to_scalar::<f64>()?).abs() < 1e-9);
                let gradients = total.backward()?;
                let gradient: Vec<Vec<f64>> = gradients.get(&x).unwrap().to_vec2()?;
                assert!(apart(&gradient.concat(), &expected.concat()) < 1e-9, "{gradient:?} {expected:?}");
                let odd = Tensor::zeros((2, 7), DType::F32, &Device::Cpu)?;
                let told = scatter_to_tensor_group(&group, &odd).unwrap_err().to_string();
                assert!(told.contains("[2, 7]") && told.contains(&format!("multiple of {ranks}")), "{told}");
                Ok::<_, Error>(())
            })
            .unwrap();
    }
}

#[test]
fn losses_of_parts_are_those_of_whole_logits() {
    let logits: Vec<f32> = (0..5 * 8).map(|at| (at as f32 * 0.9).sin() * 40.0).collect();
    let mut logits = Tensor::from_vec(logits, (5, 8), &Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
    (logits[0][6], logits[1][0], logits[2][3]) = (f32::NEG_INFINITY, 3e4, f32::NEG_INFINITY);
    let logits = Tensor::new(logits, &Device::Cpu).unwrap();
    let targets = Tensor::new(&[0i64, 7, 2, 3, 5], &Device::Cpu).unwrap();
    let variable = Var::from_tensor(&logits).unwrap();
    let losses = cross_entropy_per_example(&variable, &targets).unwrap();
    let gradient = losses.sum_all().unwrap().backward().unwrap().get(&variable).unwrap().to_vec2::<f32>().unwrap();
    let losses: Vec<f32> = losses.to_vec1().unwrap();
    for ranks in [2, 4] {
        let strategy = mesh(1, ranks);
        strategy
            .run_with((), |context, ()| {
                let (width, place) = (8 / ranks, context.tensor_rank());
                let part = Var::from_tensor(&logits.narrow(1, place * width, width)?.contiguous()?)?;
                let got = vocab_parallel_cross_entropy_per_example(&part, &targets)?;
                let close = |a: &f32, b: &f32| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
                assert!(got.to_vec1::<f32>()?.iter().zip(&losses).all(|(a, b)| close(a, b)), "{got} {losses:?}");
                let gradients = got.sum_all()?.backward()?;
                let own = gradients.get(&part).unwrap().to_vec2::<f32>()?;
                for (got, whole) in own.iter().zip(&gradient) {
                    let expected = &whole[place * width..(place + 1) * width];
                    assert!(got.iter().zip(expected).all(|(a, b)| close(a, b)), "{got:?} {expected:?}");
                }
                let outside = Tensor::new(&[0u32, 1, 2, 8, 3], &Device::Cpu)?;
                let told = vocab_parallel_cross_entropy_per_example(&part, &outside).unwrap_err().to_string();
                assert!(told.contains("example 3 is 8") && told.contains("8 classes"), "{told}");
                let few = Tensor::new(&[0u32], &Device::Cpu)?;
                assert!(vocab_parallel_cross_entropy_per_example(&part, &few).is_err());
                Ok::<_, Error>(())
            })
            .unwrap();
    }
}

#[test]
fn what_does_not_fit_is_refused_in_words() {
    let strategy = mesh(1, 2);
    let column = ColumnParallelOptions::default();
    let told = strategy.scope(|vb| column_parallel_linear(8, 7, column, vb.pp("odd"))).map(drop).unwrap_err();
    let told = told.to_string();
    assert!(told.contains("odd.weight") && told.contains("[7, 8]") && told.contains("multiple of 2"), "{told}");
    let told = strategy.scope(|vb| column_parallel_linear(8, 8, column.blocks(3), vb)).map(drop).unwrap_err();
    assert!(told.to_string().contains("multiple of 6"), "{told}");
    let told = strategy.scope(|vb| row_parallel_linear(7, 8, RowParallelOptions::default(), vb)).map(drop).unwrap_err();
    assert!(told.to_string().contains("axis 1"), "{told}");
    let told = strategy.scope(|vb| vocab_parallel_embedding(97, 8, vb)).map(drop).unwrap_err();
    assert!(told.to_string().contains("[97, 8]"), "{told}");
    // A variable of two layers that split it differently.
    let tied = strategy.scope(|vb| Ok((vocab_parallel_embedding(8, 4, vb.pp("w"))?, vb.get((8, 4), "w.weight")?)));
    let told = tied.map(drop).unwrap_err().to_string();
    assert!(told.contains("w.weight") && told.contains("split among tensor ranks in one layer"), "{told}");

    let model = strategy.scope(Net::new).unwrap();
    let (x, y) = examples(0);
    let told = model.first().losses(&x, &y).unwrap_err().to_string();
    assert!(told.contains("vocab_parallel_embedding") && told.contains("call the model in run"), "{told}");
    let other = mesh(1, 4);
    let both = PerReplica::new(vec![(); 4]);
    let told = other.run_with(both, |_, ()| Ok::<_, Error>(model.first().losses(&x, &y)?)).map(drop).unwrap_err();
    assert!(told.to_string().contains("groups of 4"), "{told}");
    let told = Lamb::new(0.01).build(&model).map(drop).unwrap_err().to_string();
    assert!(told.contains("split among tensor ranks") && told.contains("AdamW"), "{told}");
    let compressed = |compression| Adam::new(0.01).build(&model).unwrap().compress(compression).map(drop);
    let told = compressed(Compression::TopK(0.1)).unwrap_err().to_string();
    assert!(told.contains("compression of whole buckets") && told.contains("Bf16"), "{told}");
}

/// A scale that is not split, of a column-parallel layer's output.
struct Scaled(ColumnParallelLinear, Tensor, RowParallelLinear, bool);

impl Scaled {
    fn new(vb: VarBuilder<'_>, copied: bool) -> candle_core::Result<Scaled> {
        let up = column_parallel_linear(4, 8, ColumnParallelOptions::default().gather_output(false), vb.pp("up"))?;
        let down = row_parallel_linear(8, 4, RowParallelOptions::default().input_is_parallel(true), vb.pp("down"))?;
        Ok(Scaled(up, vb.get_with_hints(1, "scale", Init::Const(0.5))?, down, copied))
    }

    fn forward(&self, x: &Tensor, context: &ReplicaContext) -> candle_core::Result<Tensor> {
        let scale = match context.tensor_group().filter(|_| self.3) {
            Some(group) => copy_to_tensor_group(&group, &self.1)?,
            None => self.1.clone(),
        };
        self.2.forward(&self.0.forward(x)?.broadcast_mul(&scale)?)
    }
}

#[test]
fn a_whole_variable_inside_a_split_layer_needs_the_sum_of_its_gradient() {
    let step = |strategy: &Strategy, copied: bool| {
        let model = strategy.scope(|vb| Scaled::new(vb, copied)).unwrap();
        let optimizer = Sgd::new(0.5).build(&model)?;
        let x = Tensor::arange(0f32, 12., &Device::Cpu)?.reshape((3, 4))?;
        strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
            let y = model.forward(&x, context)?;
            optimizer.minimize(context, &context.average_loss(&y.sqr()?.sum(1)?, 300)?)
        })?;
        Ok::<_, Error>(whole(&model))
    };
    let expected = step(&alone(), true).unwrap();
    close(&step(&mesh(1, 2), true).unwrap(), &expected, 1e-5, "copied");
    // The audit after the first step names the copies that diverged.
    let told = step(&mesh(1, 2), false).unwrap_err().to_string();
    assert!(told.contains("variable scale of tensor rank 1 of replica 0"), "{told}");
}

#[test]
fn layers_are_whole_where_there_are_no_tensor_groups() {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let net = Net::new(vb).unwrap();
    assert_eq!((net.up.parts(), net.down.parts(), net.words.parts()), (1, 1, 1));
    let (x, y) = examples(1);
    assert_eq!(net.losses(&x, &y).unwrap().dims(), [EXAMPLES]);
}

#[test]
fn tied_logits_are_those_of_the_whole_table() {
    struct Tied(VocabParallelEmbedding);
    let run = |strategy: &Strategy| {
        let model = strategy.scope(|vb| Ok(Tied(vocab_parallel_embedding(VOCABULARY, WIDTH, vb.pp("w"))?))).unwrap();
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        for step in 0..5 {
            strategy
                .run_with((&model, &optimizer, parts(strategy, step)), |context, (model, optimizer, (x, y))| {
                    let logits = model.0.logits(&model.0.forward(&x)?.tanh()?)?;
                    let losses = vocab_parallel_cross_entropy_per_example(&logits, &y)?;
                    optimizer.minimize(context, &context.average_loss(&losses, EXAMPLES)?)
                })
                .unwrap();
        }
        whole(&model)
    };
    close(&run(&mesh(2, 2)), &run(&alone()), TOLERANCE, "tied");
}

#[test]
fn a_row_that_is_not_a_number_is_that_of_its_word_alone() {
    let strategy = mesh(1, 2);
    let model = strategy.scope(|vb| vocab_parallel_embedding(VOCABULARY, WIDTH, vb.pp("w"))).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let first_of_each = |word: i64| -> Vec<bool> {
        let rows = strategy.run_with((&model, &optimizer), |_, (model, _)| {
            let words = Tensor::new(&[word, 1, VOCABULARY as i64 - 1], &Device::Cpu)?;
            let rows: Vec<Vec<f32>> = model.forward(&words)?.to_vec2()?;
            Ok::<_, Error>(rows.iter().map(|row| row.iter().all(|x| x.is_finite())).collect::<Vec<bool>>())
        });
        rows.unwrap().into_iter().next().unwrap()
    };
    // The first row of each part stands for words of other parts.
    let half = VOCABULARY as i64 / 2;
    for word in [0, half] {
        let step = strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
            let rows = model.forward(&Tensor::new(&[word], &Device::Cpu)?)?;
            optimizer.minimize(context, &(rows.sum_all()? * f64::NAN)?)
        });
        step.unwrap();
        assert_eq!(first_of_each(word), [false, true, true], "after word {word}");
    }
}
