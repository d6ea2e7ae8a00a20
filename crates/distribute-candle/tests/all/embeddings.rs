//! Embeddings whose gradients have few rows: they train as candle's do, bit for bit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{CpuStorage, CustomOp1, D, DType, Device, Layout, Module, Shape, Tensor};
use candle_nn::VarBuilder;
use distribute_candle::{
    Adam, CandleContext, CandleStrategy, Clip, Error, Lamb, LossScale, Model, Optimizer, Sgd, embedding,
    sharded_embedding,
};
use distribute_strategy::{CentralStorageStrategy, MirroredStrategy, Strategy};

/// A table of a megabyte.
const WORDS: usize = 4096;
const WIDTH: usize = 64;

/// A model whose table is looked up twice, and may be that of its head too.
struct Net<E> {
    words: E,
    head: candle_nn::Linear,
    table: Option<Tensor>,
}

impl<E: Module> Net<E> {
    fn new(words: E, table: &Tensor, is_tied: bool, vb: &VarBuilder<'_>) -> candle_core::Result<Net<E>> {
        let head = candle_nn::linear(WIDTH, 3, vb.pp("head"))?;
        Ok(Net { words, head, table: is_tied.then(|| table.clone()) })
    }
}

impl<E: Module> Module for Net<E> {
    /// Maps (examples, 6) words to (examples) losses.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let [first, second] = [x.narrow(1, 0, 4)?, x.narrow(1, 4, 2)?].map(|x| self.words.forward(&x));
        let mixed = (first?.sum(1)? + second?.sum(1)?.sqr()?)?;
        let losses = self.head.forward(&mixed)?.sqr()?.sum(D::Minus1)?;
        match &self.table {
            Some(table) => losses + (mixed.matmul(&table.t()?)? * 1e-3)?.sqr()?.sum(D::Minus1)?,
            None => Ok(losses),
        }
    }
}

fn ours(strategy: &Strategy, is_tied: bool) -> Model<Net<distribute_candle::Embedding>> {
    let net = |vb: VarBuilder<'_>| {
        let words = embedding(WORDS, WIDTH, vb.pp("words"))?;
        let table = words.embeddings().clone();
        Net::new(words, &table, is_tied, &vb)
    };
    strategy.scope(net).unwrap()
}

fn candles(strategy: &Strategy, is_tied: bool) -> Model<Net<candle_nn::Embedding>> {
    let net = |vb: VarBuilder<'_>| {
        let words = candle_nn::embedding(WORDS, WIDTH, vb.pp("words"))?;
        let table = words.embeddings().clone();
        Net::new(words, &table, is_tied, &vb)
    };
    strategy.scope(net).unwrap()
}

/// Returns the words of a replica's examples: some of them twice, and those of other replicas.
fn words(step: usize, replica: usize, examples: usize) -> candle_core::Result<Tensor> {
    let word = |at: usize| ((at * at * 7 + step * 13 + replica * (at % 3) * 101) % WORDS) as u32;
    Tensor::from_vec((0..examples * 6).map(|at| word(at / 2 * 2)).collect::<Vec<u32>>(), (examples, 6), &Device::Cpu)
}

/// Makes some steps with 5 examples on each replica, in the third with one on the last of several.
fn train<E: Module>(strategy: &Strategy, model: &Model<Net<E>>, optimizer: &Optimizer) -> Vec<Vec<f32>>
where
    Net<E>: Send + Sync,
{
    for step in 0..5 {
        let run = strategy.run_with((model, optimizer), |context, (model, optimizer)| {
            let (replica, replicas) = (context.replica_id(), context.num_replicas_in_sync());
            let examples = if step == 2 && replica > 0 && replica + 1 == replicas { 1 } else { 5 };
            let total = if step == 2 && replicas > 1 { 5 * replicas - 4 } else { 5 * replicas };
            if step == 3 {
                let losses = model.forward(&words(9, replica, 5)?)?;
                optimizer.accumulate(context, &context.average_loss(&losses, total)?)?;
            }
            let losses = model.forward(&words(step, replica, examples)?)?;
            optimizer.minimize(context, &context.average_loss(&losses, total)?)?;
            Ok::<_, Error>(())
        });
        run.unwrap();
    }
    model.audit(strategy).unwrap();
    let values = |variable: &distribute_candle::Variable| variable.components()[0].flatten_all()?.to_vec1::<f32>();
    model.variables().iter().map(values).collect::<candle_core::Result<_>>().unwrap()
}

fn optimizer<E>(what: &str, model: &Model<Net<E>>) -> distribute_candle::Result<Optimizer> {
    match what {
        "Adam" => Adam::new(0.01).build(model),
        "SGD" => Sgd::new(0.01).build(model),
        "LAMB" => Lamb::new(0.01).build(model),
        "clipped" => Adam::new(0.01).build(model)?.clip(Clip::GlobalNorm(0.5)),
        _ => Sgd::new(0.01).build(model)?.scale_losses(LossScale::fixed(64.0)),
    }
}

#[test]
fn a_table_is_trained_as_candles_is() {
    for what in ["Adam", "SGD", "LAMB", "clipped", "scaled"] {
        let arrangements = [(2, false), (1, false), (2, true)];
        for (replicas, is_tied) in arrangements.into_iter().take(if what == "Adam" { 3 } else { 1 }) {
            let strategy = MirroredStrategy::builder().num_replicas(replicas).build().unwrap();
            let (first, second) = (ours(&strategy, is_tied), candles(&strategy, is_tied));
            let (by_rows, whole) = (optimizer(what, &first).unwrap(), optimizer(what, &second).unwrap());
            let [got, expected] = [train(&strategy, &first, &by_rows), train(&strategy, &second, &whole)];
            assert!(got == expected, "{what}, {replicas} replicas, tied: {is_tied}");
            assert_eq!([by_rows.reduces_rows(0), whole.reduces_rows(0)], [!is_tied, false], "{what}");
        }
    }
}

#[test]
fn shared_tables_and_tables_of_servers_elsewhere_are_candles() {
    let strategy = CentralStorageStrategy::builder().compute_devices(["CPU:0", "CPU:1"]).build().unwrap();
    let (first, second) = (ours(&strategy, false), candles(&strategy, false));
    let (by_rows, whole) = (Sgd::new(0.01).build(&first).unwrap(), Sgd::new(0.01).build(&second).unwrap());
    assert!(train(&strategy, &first, &by_rows) == train(&strategy, &second, &whole));
    // Without servers, a table of theirs is an embedding.
    let strategy = MirroredStrategy::builder().num_replicas(2).build().unwrap();
    let net = |vb: VarBuilder<'_>| {
        let words = sharded_embedding(WORDS, WIDTH, vb.pp("words"))?;
        let head = candle_nn::linear(WIDTH, 3, vb.pp("head"))?;
        Ok(Net { words, head, table: None })
    };
    let (first, second) = (strategy.scope(net).unwrap(), candles(&strategy, false));
    let (by_rows, whole) = (Sgd::new(0.01).build(&first).unwrap(), Sgd::new(0.01).build(&second).unwrap());
    assert!(train(&strategy, &first, &by_rows) == train(&strategy, &second, &whole));
    assert!(by_rows.reduces_rows(0));
}

/// An operation whose backward fails while the flag is set.
struct Fails(Arc<AtomicBool>);

impl CustomOp1 for Fails {
    fn name(&self) -> &'static str {
        "fails"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        if self.0.load(Ordering::Relaxed) {
            candle_core::bail!("failed on purpose")
        } else {
            Ok(Some(gradient.clone()))
        }
    }
}

#[test]
fn a_backward_that_fails_leaves_no_rows_behind() {
    // Backward comes to one of the lookups before the other; in one of the two orders it fails between them.
    for fails_first in [true, false] {
        let strategy = Strategy::default_strategy().unwrap();
        let values = [false, true].map(|fails| {
            let model = ours(&strategy, false);
            let optimizer = Sgd::new(0.01).build(&model).unwrap();
            let flag = Arc::new(AtomicBool::new(false));
            let step = |from: usize| {
                strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
                    let look_up = |row: usize, is_failing: bool| {
                        let rows = model.words.forward(&Tensor::new(&[row as u32], &Device::Cpu)?)?;
                        if is_failing { rows.contiguous()?.apply_op1(Fails(flag.clone())) } else { Ok(rows) }
                    };
                    let rows = (look_up(from, fails_first)?.sqr()? + look_up(from + 1, !fails_first)?.sqr()?)?;
                    optimizer.minimize(context, &context.average_loss(&rows.sum(1)?, 1)?)
                })
            };
            if fails {
                flag.store(true, Ordering::Relaxed);
                assert!(step(10).unwrap_err().to_string().contains("failed on purpose"));
                flag.store(false, Ordering::Relaxed);
            }
            step(20).unwrap();
            model.first().words.embeddings().to_vec2::<f32>().unwrap()
        });
        assert!(values[0] == values[1], "fails first: {fails_first}");
    }
}

#[test]
fn an_index_that_is_no_row_is_refused() {
    let strategy = Strategy::default_strategy().unwrap();
    let model = strategy.scope(|vb| embedding(10, 4, vb)).unwrap();
    let look_up = |index: i64| model.first().forward(&Tensor::new(&[[0, index]], &Device::Cpu).unwrap());
    assert_eq!(look_up(9).unwrap().dims(), [1, 2, 4]);
    for index in [10, -1, i64::MAX, 1 << 32] {
        let told = look_up(index).unwrap_err().to_string();
        assert!(
            told.contains(&format!("index 1 is {index}, but there are 10 rows; give indices from 0 to 9")),
            "{told}"
        );
    }
    let floats = Tensor::zeros((1, 2), DType::F32, &Device::Cpu).unwrap();
    let told = model.first().forward(&floats).unwrap_err().to_string();
    assert!(told.contains("indices of rows are of F32; give u32, i64 or u8"), "{told}");
    // Without a gate, and in a type of which the greatest number is an index.
    let variables = candle_nn::VarMap::new();
    let vb = candle_nn::VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let table = embedding(256, 2, vb).unwrap();
    let row = table.forward(&Tensor::new(&[255u8], &Device::Cpu).unwrap()).unwrap();
    let last = table.embeddings().narrow(0, 255, 1).unwrap();
    assert_eq!(row.to_vec2::<f32>().unwrap(), last.to_vec2::<f32>().unwrap());
    assert!(table.forward(&Tensor::new(&[u32::MAX], &Device::Cpu).unwrap()).is_err());
    let none = model.first().forward(&Tensor::zeros((0, 3), DType::U32, &Device::Cpu).unwrap()).unwrap();
    assert_eq!(none.dims(), [0, 3, 4]);
}
