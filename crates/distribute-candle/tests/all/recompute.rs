//! Blocks that are computed again in backward train as those whose results are kept, bit for bit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Module, ModuleT, Result, Shape, Storage, Tensor, Var};
use candle_nn::{BatchNorm, Linear, VarBuilder, VarMap, linear};
use distribute_candle::{
    Adam, AttentionMask, CandleContext, CandleStrategy, ColumnParallelLinear, ColumnParallelOptions, Dropout, Error,
    LayerNorm, Model, Optimizer, RowParallelLinear, RowParallelOptions, Sharded, SyncBatchNorm, add,
    column_parallel_linear, cross_entropy_per_example, dropout, gelu, layer_norm, relu, row_parallel_linear,
    self_attention, sync_batch_norm,
};
use distribute_strategy::{
    CentralStorageStrategy, CommunicationOptions, FullyShardedStrategy, MirroredStrategy, Strategy,
};
use distribute_values::PerReplica;
use parking_lot::Mutex;
use rand_chacha::rand_core::Rng;

use crate::common::*;

fn devices(replicas: usize) -> Vec<String> {
    (0..replicas).map(|index| format!("CPU:{index}")).collect()
}

fn sharded(replicas: usize, over: usize) -> Strategy {
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(60));
    let builder = FullyShardedStrategy::builder().devices(devices(replicas)).communication(communication);
    builder.shard_over(over).mirror_below(20).build().unwrap()
}

/// Runs a block in one of the two ways.
fn call<M: Send + Sync + 'static>(
    recomputes: bool,
    block: &Sharded<M>,
    x: &Tensor,
    forward: impl Fn(&M, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    if recomputes { block.recompute(x, forward) } else { block.run(x, forward) }
}

/// Blocks with a residual; two share a matrix, and one runs twice.
struct Deep {
    first: Linear,
    blocks: Vec<Sharded<(Linear, Linear)>>,
    last: Linear,
    recomputes: bool,
    /// The replica whose backward fails between two blocks, while the counter is above 0.
    fails: Option<(usize, Arc<AtomicUsize>)>,
}

impl Deep {
    fn new(vb: VarBuilder<'_>, recomputes: bool) -> Result<Deep> {
        Ok(Deep {
            first: linear(8, WIDTH, vb.pp("first"))?,
            blocks: (0..4).map(|index| residual(&vb, index)).collect::<Result<_>>()?,
            last: linear(WIDTH, 3, vb.pp("last"))?,
            recomputes,
            fails: None,
        })
    }
}

impl Module for Deep {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = self.first.forward(x)?;
        for index in [0, 1, 2, 3, 2] {
            if let (2, Some((replica, times))) = (index, &self.fails) {
                x = x.apply_op1(Fails(*replica, times.clone()))?;
            }
            // The block reads its input twice, and so does the model.
            let y = call(self.recomputes, &self.blocks[index], &x, |(first, second), x| {
                second.forward(&(first.forward(x)?.tanh()? + x.t()?.contiguous()?.t()?)?)
            })?;
            x = (x + y)?;
        }
        self.last.forward(&x)
    }
}

/// An operation whose backward fails on one replica, as often as the counter says.
struct Fails(usize, Arc<AtomicUsize>);

impl CustomOp1 for Fails {
    fn name(&self) -> &'static str {
        "fails"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let is_here = distribute_strategy::get_replica_context().is_some_and(|here| here.replica_id() == self.0);
        if is_here && self.1.load(Ordering::Relaxed) > 0 {
            self.1.fetch_sub(1, Ordering::Relaxed);
            candle_core::bail!("the power went out")
        }
        Ok(Some(gradient.clone()))
    }
}

fn wholes<M>(strategy: &Strategy, model: &Model<M>) -> Vec<(String, Vec<f32>)> {
    let whole = |variable: &distribute_candle::Variable| {
        let whole = variable.whole(strategy).unwrap().flatten_all().unwrap();
        (variable.name().to_owned(), whole.to_dtype(DType::F32).unwrap().to_vec1().unwrap())
    };
    model.variables().iter().map(whole).collect()
}

fn try_step<M: Module + Sync>(
    strategy: &Strategy,
    (model, optimizer): (&Model<M>, &Optimizer),
    accumulate: bool,
) -> distribute_candle::Result<f64> {
    let ranks = strategy.num_local_replicas() / strategy.num_replicas_in_sync();
    let batch = parts(strategy.num_replicas_in_sync(), 10).into_values();
    let batch = PerReplica::new(batch.into_iter().flat_map(|part| vec![part; ranks]).collect());
    let losses = strategy.run_with((model, optimizer, batch), |context, (model, optimizer, (x, y))| {
        let loss_of = |x: &Tensor| context.average_loss(&cross_entropy_per_example(&model.forward(x)?, &y)?, 10);
        if accumulate {
            optimizer.accumulate(context, &loss_of(&x.affine(0.5, 0.1)?)?)?;
        }
        // An evaluation, which never runs backward.
        model.forward(&x.affine(2.0, 0.0)?)?;
        let loss = loss_of(&x)?;
        optimizer.minimize(context, &loss)?;
        Ok::<_, Error>(f64::from(loss.to_scalar::<f32>()?))
    })?;
    Ok(losses.iter().sum())
}

type Trained = (Vec<(String, Vec<f32>)>, Vec<f64>);

fn train_deep(strategy: &Strategy, recomputes: bool, frozen: bool, accumulate: bool) -> Trained {
    let mut model = strategy.scope(|vb| Deep::new(vb, recomputes)).unwrap();
    if frozen {
        model.freeze(|name| name.starts_with("blocks.0") || name.starts_with("blocks.2.in")).unwrap();
    }
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    let losses = (0..4).map(|_| try_step(strategy, (&model, &optimizer), accumulate).unwrap()).collect();
    model.audit(strategy).unwrap();
    (wholes(strategy, &model), losses)
}

#[test]
fn recomputed_blocks_train_as_kept_ones() {
    let central = CentralStorageStrategy::builder().compute_devices(["CPU:0", "CPU:1"]).build().unwrap();
    for strategy in [mirrored(1), mirrored(2), central, sharded(2, 2), sharded(4, 2)] {
        for (frozen, accumulate) in [(false, false), (true, false), (false, true)] {
            let kept = train_deep(&strategy, false, frozen, accumulate);
            let recomputed = train_deep(&strategy, true, frozen, accumulate);
            assert!(kept.1[3] < kept.1[0], "{:?}", kept.1);
            assert_eq!(kept, recomputed, "{}, frozen {frozen}, accumulated {accumulate}", strategy.describe());
        }
    }
    let strategy = sharded(4, 4);
    assert_eq!(train_deep(&strategy, false, false, false), train_deep(&strategy, true, false, false));
}

/// A block of a transformer in the manner of Megatron-LM, whose matrices are split among tensor ranks.
struct Split {
    layers: Vec<Sharded<(LayerNorm, ColumnParallelLinear, RowParallelLinear)>>,
    last: Linear,
    recomputes: bool,
}

impl Split {
    fn new(vb: VarBuilder<'_>, recomputes: bool) -> Result<Split> {
        let column = ColumnParallelOptions::default().gather_output(false);
        let row = RowParallelOptions::default().input_is_parallel(true);
        let layer = |index: usize| {
            Sharded::new(vb.pp(format!("layers.{index}")), |vb| {
                let up = column_parallel_linear(8, 32, column, vb.pp("up"))?;
                Ok((layer_norm(8, 1e-5, vb.pp("norm"))?, up, row_parallel_linear(32, 8, row, vb.pp("down"))?))
            })
        };
        Ok(Split { layers: (0..3).map(layer).collect::<Result<_>>()?, last: linear(8, 3, vb.pp("last"))?, recomputes })
    }
}

impl Module for Split {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in &self.layers {
            x = call(self.recomputes, layer, &x, |(norm, up, down), x| {
                x + down.forward(&up.forward(&norm.forward(x)?)?.gelu()?)?
            })?;
        }
        self.last.forward(&x)
    }
}

#[test]
fn collectives_of_a_block_run_again_on_a_mesh() {
    let communication = CommunicationOptions::default().timeout(Duration::from_secs(20));
    let mesh = MirroredStrategy::builder().devices(devices(4)).tensor_parallel(2).communication(communication);
    let mesh = mesh.build().unwrap();
    let train = |recomputes: bool| {
        let model = mesh.scope(|vb| Split::new(vb, recomputes)).unwrap();
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        let losses: Vec<f64> = (0..4).map(|_| try_step(&mesh, (&model, &optimizer), false).unwrap()).collect();
        model.audit(&mesh).unwrap();
        (wholes(&mesh, &model), losses)
    };
    assert_eq!(train(false), train(true));
}

fn bytes(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(all)) => 4 * all.len(),
        _ => 0,
    }
}

/// The most bytes of intermediate results that a chain of blocks has in memory, seen between the blocks of backward.
struct Watch {
    results: Arc<Mutex<Vec<Tensor>>>,
    most: Arc<AtomicUsize>,
}

impl Watch {
    fn look(&self) -> usize {
        let results = self.results.lock();
        results.iter().map(bytes).sum()
    }
}

impl CustomOp1 for Watch {
    fn name(&self) -> &'static str {
        "watch"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.most.fetch_max(self.look(), Ordering::Relaxed);
        Ok(Some(gradient.clone()))
    }
}

/// Returns the layer with this crate's operation, or as it is.
fn linear_of(fused: bool, layer: &Linear, x: &Tensor) -> Result<Tensor> {
    match fused {
        true => distribute_candle::Linear::new(layer.weight().clone(), layer.bias().cloned()).forward(x),
        false => layer.forward(x),
    }
}

#[test]
fn one_block_at_a_time_has_its_results_in_memory() {
    one_block_at_a_time(|layer, x, seen| {
        let all = [layer.forward(x)?, x.clone(), x.clone()];
        let [wide, ..] = all;
        let (bent, shifted) = (wide.tanh()?, (wide.sqr()? + 1.0)?);
        seen.lock().extend([wide, bent.clone(), shifted.clone()]);
        bent / shifted
    });
    // Results that candle's graph does not show.
    one_block_at_a_time(|layer, x, seen| {
        let wide = linear_of(true, layer, x)?;
        let (bent, rectified) = (gelu(&wide)?, relu(&wide)?);
        seen.lock().extend([wide, bent.clone(), rectified.clone()]);
        add(&bent, &rectified)
    });
    // Such ones and others that are computed of them, or they of those.
    one_block_at_a_time(|layer, x, seen| {
        let wide = linear_of(true, layer, &x.sqr()?)?;
        let (bent, rectified) = (wide.tanh()?, relu(&wide)?);
        seen.lock().extend([wide, bent.clone(), rectified.clone()]);
        gelu(&(bent * rectified.t()?.contiguous()?.t()?)?)
    });
}

fn one_block_at_a_time(forward: fn(&Linear, &Tensor, &Mutex<Vec<Tensor>>) -> Result<Tensor>) {
    const BLOCKS: usize = 6;
    let one = 3 * 10 * WIDTH * 4;
    for (recomputes, after_forward, amid_backward) in [(true, 0, one), (false, BLOCKS * one, BLOCKS * one)] {
        for strategy in [mirrored(1), sharded(2, 2)] {
            let build = |vb: VarBuilder<'static>| {
                let block = |index: usize| Sharded::new(vb.pp(index), |vb| linear(WIDTH, WIDTH, vb));
                (0..BLOCKS).map(block).collect::<Result<Vec<_>>>()
            };
            let model = strategy.scope(build).unwrap();
            let optimizer = Adam::new(0.01).build(&model).unwrap();
            let run = strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
                let results = Arc::new(Mutex::new(Vec::new()));
                let most = Arc::new(AtomicUsize::new(0));
                let mut x = Tensor::ones((10, WIDTH), DType::F32, &Device::Cpu)?;
                for block in model {
                    let seen = results.clone();
                    x = call(recomputes, block, &x, move |layer, x| forward(layer, x, &seen))?;
                    x = x.apply_op1(Watch { results: results.clone(), most: most.clone() })?;
                }
                let watch = Watch { results, most };
                assert_eq!(watch.look(), after_forward);
                optimizer.minimize(context, &context.average_loss(&x.sqr()?.mean(1)?, 10)?)?;
                assert_eq!(watch.most.load(Ordering::Relaxed), amid_backward);
                assert_eq!(watch.look(), after_forward, "after the step");
                Ok::<_, Error>(())
            });
            run.unwrap();
        }
    }
}

#[test]
fn random_numbers_are_drawn_once_or_refused() {
    let strategy = mirrored(2);
    let train = |recomputes: bool| {
        let model = strategy.scope(|vb| Sharded::new(vb.pp("layers.0"), |vb| linear(8, 3, vb))).unwrap();
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        let random = strategy.random(3);
        for _ in 0..3 {
            let run = strategy.run_with((&model, &optimizer, parts(2, 10)), |context, (model, optimizer, (x, y))| {
                let generator = random.next(context);
                let logits = call(recomputes, model, &x, move |layer, x| {
                    let mut generator = generator.clone();
                    let mask: Vec<f32> = (0..15).map(|_| (generator.next_u32() % 2 * 2) as f32).collect();
                    layer.forward(x)? * Tensor::from_vec(mask, (5, 3), &Device::Cpu)?
                })?;
                optimizer.minimize(context, &context.average_loss(&cross_entropy_per_example(&logits, &y)?, 10)?)
            });
            run.unwrap();
        }
        wholes(&strategy, &model)
    };
    assert_eq!(train(false), train(true));
    // candle's dropout draws from a generator of its own.
    let model = strategy.scope(|vb| Sharded::new(vb.pp("layers.0"), |vb| linear(8, 3, vb))).unwrap();
    let optimizer = Adam::new(0.01).build(&model).unwrap();
    let before = wholes(&strategy, &model);
    let failed = strategy.run_with((&model, &optimizer, parts(2, 10)), |context, (model, optimizer, (x, y))| {
        let logits = model.recompute(&x, |layer, x| candle_nn::ops::dropout(&layer.forward(x)?, 0.5))?;
        optimizer.minimize(context, &context.average_loss(&cross_entropy_per_example(&logits, &y)?, 10)?)
    });
    let told = failed.unwrap_err().to_string();
    assert!(told.contains("layers.0") && told.contains("draws no random numbers of its own"), "{told}");
    assert_eq!(wholes(&strategy, &model), before);
}

/// Statistics of one's own examples and of all replicas', in blocks of which one is inside the other.
type Normed = Sharded<(Sharded<BatchNorm>, SyncBatchNorm, Linear)>;

#[test]
fn running_statistics_are_updated_once() {
    let strategy = mirrored(2);
    let train = |recomputes: bool| {
        let build = |vb: VarBuilder<'static>| {
            let inner = |vb: VarBuilder<'static>| Sharded::new(vb, |vb| candle_nn::batch_norm(8, 1e-5, vb));
            let block: Normed = Sharded::new(vb.pp("block"), |vb| {
                Ok((inner(vb.pp("own"))?, sync_batch_norm(8, 1e-5, vb.pp("all"))?, linear(8, 3, vb.pp("fc"))?))
            })?;
            Ok(block)
        };
        let model = strategy.scope(build).unwrap();
        let optimizer = Adam::new(0.01).build(&model).unwrap();
        for _ in 0..3 {
            let run = strategy.run_with((&model, &optimizer, parts(2, 10)), |context, (model, optimizer, (x, y))| {
                let logits = call(recomputes, model, &x, move |(own, all, fc), x| {
                    let x = call(recomputes, own, x, |norm, x| norm.forward_t(x, true))?;
                    fc.forward(&all.forward_t(&x.tanh()?, true)?)
                })?;
                optimizer.minimize(context, &context.average_loss(&cross_entropy_per_example(&logits, &y)?, 10)?)
            });
            run.unwrap();
        }
        let of_each = |variable: &distribute_candle::Variable| {
            let all = variable.components().iter().map(|c| c.flatten_all().unwrap().to_vec1::<f32>().unwrap());
            (variable.name().to_owned(), all.collect::<Vec<_>>())
        };
        model.variables().iter().map(of_each).collect::<Vec<_>>()
    };
    let (kept, recomputed) = (train(false), train(true));
    assert!(kept.iter().any(|(name, values)| name == "block.own.running_mean" && values[0] != values[1]));
    assert_eq!(kept, recomputed);
}

#[test]
fn a_backward_that_fails_leaves_nothing_behind() {
    for strategy in [mirrored(2), sharded(2, 2)] {
        let train = |failures: usize| {
            let times = Arc::new(AtomicUsize::new(0));
            let build = |vb: VarBuilder<'static>| {
                let deep = Deep::new(vb, true)?;
                Ok(Deep { fails: Some((1, times.clone())), ..deep })
            };
            let model = strategy.scope(build).unwrap();
            let optimizer = Adam::new(0.01).build(&model).unwrap();
            let mut losses = vec![try_step(&strategy, (&model, &optimizer), false).unwrap()];
            for _ in 0..failures {
                times.store(1, Ordering::Relaxed);
                let told = try_step(&strategy, (&model, &optimizer), false).unwrap_err().to_string();
                assert!(told.contains("the power went out"), "{told}");
            }
            losses.extend((0..3).map(|_| try_step(&strategy, (&model, &optimizer), true).unwrap()));
            (wholes(&strategy, &model), losses)
        };
        assert_eq!(train(2), train(0), "{}", strategy.describe());
    }
}

/// A transformer's block of this crate's operations, in which another one is nested.
struct Layer {
    norm: LayerNorm,
    qkv: distribute_candle::Linear,
    feed_forward: Sharded<FeedForward>,
}

type FeedForward = (distribute_candle::Linear, Dropout, distribute_candle::Linear);

struct Transformer {
    layers: Vec<Sharded<Layer>>,
    last: Linear,
    /// Whether layers recompute, and the blocks in them.
    recomputes: [bool; 2],
    /// Whether the second run of a layer fails on the last replica.
    fails: Arc<AtomicBool>,
}

impl Transformer {
    fn new(vb: VarBuilder<'_>, recomputes: [bool; 2], fails: Arc<AtomicBool>) -> Result<Transformer> {
        let inner = |vb: VarBuilder<'_>| {
            let layer = |inputs, outputs, name| distribute_candle::linear(inputs, outputs, vb.pp(name));
            Ok((layer(8, 16, "up")?, dropout(0.25, vb.pp("dropout"))?, layer(16, 8, "down")?))
        };
        let layer = |index: usize| {
            Sharded::new(vb.pp(format!("layers.{index}")), |vb| {
                let qkv = distribute_candle::linear(8, 24, vb.pp("qkv"))?;
                let feed_forward = Sharded::new(vb.pp("feed_forward"), inner)?;
                Ok(Layer { norm: layer_norm(8, 1e-5, vb.pp("norm"))?, qkv, feed_forward })
            })
        };
        let layers = (0..3).map(layer).collect::<Result<_>>()?;
        Ok(Transformer { layers, last: linear(8, 3, vb.pp("last"))?, recomputes, fails })
    }
}

impl Module for Transformer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let ([outer, inner], mut x) = (self.recomputes, x.clone());
        for (index, layer) in self.layers.iter().enumerate() {
            let fails = index == 1 && self.fails.load(Ordering::Relaxed) && is_last_replica();
            let calls = AtomicUsize::new(0);
            x = call(outer, layer, &x, move |layer, x| {
                let qkv = layer.qkv.forward(&layer.norm.forward(x)?)?.unsqueeze(0)?;
                let sum = add(x, &self_attention(&qkv, 2, AttentionMask::Causal)?.squeeze(0)?)?;
                if fails && calls.fetch_add(1, Ordering::Relaxed) == 1 {
                    candle_core::bail!("the power went out")
                }
                let y = call(inner, &layer.feed_forward, &sum, |(up, dropout, down), x| {
                    down.forward(&relu(&dropout.forward_t(&up.forward_gelu(x)?, true)?)?)
                })?;
                add(&sum, &gelu(&y)?)
            })?;
        }
        self.last.forward(&x)
    }
}

fn is_last_replica() -> bool {
    distribute_strategy::get_replica_context().is_some_and(|here| here.replica_id() + 1 == here.num_replicas_in_sync())
}

#[test]
fn operations_of_this_crate_are_recomputed_bit_for_bit() {
    for strategy in [mirrored(1), mirrored(2), sharded(2, 2), sharded(4, 2)] {
        let train = |recomputes: [bool; 2], failures: usize| {
            let fails = Arc::new(AtomicBool::new(false));
            let model = strategy.scope(|vb| Transformer::new(vb, recomputes, fails.clone())).unwrap();
            let optimizer = Adam::new(0.01).build(&model).unwrap();
            let mut losses = vec![try_step(&strategy, (&model, &optimizer), false).unwrap()];
            for _ in 0..failures {
                fails.store(true, Ordering::Relaxed);
                let told = try_step(&strategy, (&model, &optimizer), false).unwrap_err().to_string();
                assert!(told.contains("the power went out"), "{told}");
                fails.store(false, Ordering::Relaxed);
            }
            losses.extend((0..3).map(|_| try_step(&strategy, (&model, &optimizer), true).unwrap()));
            (wholes(&strategy, &model), losses)
        };
        let kept = train([false, false], 0);
        for recomputes in [[true, false], [false, true], [true, true]] {
            assert_eq!(train(recomputes, 0), kept, "{recomputes:?} under {}", strategy.describe());
        }
        assert_eq!(train([true, true], 2), kept, "{}", strategy.describe());
    }
}

/// An encoder of blocks in a block, and decoder blocks that read its result, which they take from outside.
struct Pair {
    encoder: Sharded<Vec<Sharded<Linear>>>,
    decoder: Vec<Sharded<(Linear, Linear)>>,
    last: Linear,
    /// Which of encoder, blocks of the encoder and decoder recompute.
    recomputes: [bool; 3],
    /// Whether operations are this crate's.
    fused: bool,
}

impl Pair {
    fn new(vb: VarBuilder<'_>, recomputes: [bool; 3], fused: bool) -> Result<Pair> {
        let encoder = Sharded::new(vb.pp("encoder"), |vb| {
            (0..2).map(|index| Sharded::new(vb.pp(index), |vb| linear(8, 8, vb))).collect::<Result<Vec<_>>>()
        })?;
        let layer = |index: usize| {
            Sharded::new(vb.pp(format!("decoder.{index}")), |vb| {
                Ok((linear(8, 8, vb.pp("query"))?, linear(8, 8, vb.pp("key"))?))
            })
        };
        let decoder = (0..2).map(layer).collect::<Result<_>>()?;
        Ok(Pair { encoder, decoder, last: linear(8, 3, vb.pp("last"))?, recomputes, fused })
    }
}

impl Module for Pair {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let ([encoder, inner, decoder], fused) = (self.recomputes, self.fused);
        let curve = move |layer: &Linear, x: &Tensor| match fused {
            true => relu(&gelu(&linear_of(true, layer, x)?)?),
            false => layer.forward(x)?.tanh(),
        };
        let encoded = call(encoder, &self.encoder, x, move |blocks, x| {
            let next = |x: Result<Tensor>, block| call(inner, block, &x?, curve);
            (blocks.iter().fold(Ok(x.clone()), next)? + x)?.sqr()
        })?;
        let mut x = x.clone();
        for block in &self.decoder {
            let encoded = encoded.clone();
            x = call(decoder, block, &x, move |(query, key), x| {
                // Backward goes through the right operand first, and there to the encoder.
                linear_of(fused, query, x)?.sqr()?.tanh()? * curve(key, &encoded)?
            })?;
        }
        self.last.forward(&x)
    }
}

#[test]
fn blocks_may_be_nested_and_read_values_from_outside() {
    for (strategy, fused) in [mirrored(2), sharded(2, 2)].into_iter().flat_map(|s| [(s.clone(), false), (s, true)]) {
        let train = |recomputes: [bool; 3]| {
            let model = strategy.scope(|vb| Pair::new(vb, recomputes, fused)).unwrap();
            let optimizer = Adam::new(0.01).build(&model).unwrap();
            let losses: Vec<f64> = (0..3).map(|_| try_step(&strategy, (&model, &optimizer), false).unwrap()).collect();
            (wholes(&strategy, &model), losses)
        };
        let kept = train([false; 3]);
        for recomputes in [[true, false, false], [false, true, false], [false, false, true], [true; 3]] {
            assert_eq!(train(recomputes), kept, "{recomputes:?}, fused {fused}, under {}", strategy.describe());
        }
    }
}

#[test]
fn a_program_of_its_own_may_run_backward_several_times() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let block = Sharded::new(vb, |vb| linear(4, 4, vb)).unwrap();
    let x = Var::new(&[[1f32, -2.0, 3.0, -4.0]], &Device::Cpu).unwrap();
    let gradients = |recomputes: bool, fused: bool| {
        let forward = move |layer: &Linear, x: &Tensor| match fused {
            true => gelu(&linear_of(true, layer, x)?)?.sqr(),
            false => layer.forward(x)?.tanh()?.sqr(),
        };
        let y = call(recomputes, &block, &x, forward).unwrap();
        let (one, other) = (y.sum_all().unwrap(), y.sqr().unwrap().sum_all().unwrap());
        let mut all: Vec<Vec<f32>> = Vec::new();
        for loss in [&one, &other, &one] {
            let found = loss.backward().unwrap();
            let of = |t: &Tensor| found.get(t).unwrap().flatten_all().unwrap().to_vec1().unwrap();
            all.push(of(&block.run(&x, |layer, _| Ok(layer.weight().clone())).unwrap()));
            all.push(of(&x));
        }
        all
    };
    for fused in [false, true] {
        let kept = gradients(false, fused);
        assert_eq!(kept, gradients(true, fused));
        assert_ne!(kept[0], kept[2]);
    }
}

#[test]
fn uses_that_do_not_recompute_are_sentences() {
    let device = Device::Cpu;
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &device);
    let block = Sharded::new(vb.pp("layers.2"), |vb| linear(4, 4, vb)).unwrap();
    let x = Tensor::ones((2, 4), DType::F32, &device).unwrap();
    let kept = Arc::new(Mutex::new(None));
    let leak = kept.clone();
    let y = block.recompute(&x, move |layer, x| {
        let wide = layer.forward(x)?;
        *leak.lock() = Some(wide.clone());
        wide.tanh()
    });
    let told = Error::from(kept.lock().clone().unwrap().sqr().unwrap_err()).to_string();
    assert!(told.contains("intermediate result of a recomputed block"), "{told}");
    drop(y);
    // A result of this crate's operations, which read it as well.
    let leak = kept.clone();
    let y = block.recompute(&x, move |layer, x| {
        let wide = linear_of(true, layer, x)?;
        *leak.lock() = Some(wide.clone());
        gelu(&wide)
    });
    let leaked = kept.lock().clone().unwrap();
    for read in [gelu(&leaked), add(&leaked, &leaked), leaked.sqr()] {
        let told = Error::from(read.unwrap_err()).to_string();
        assert!(told.contains("intermediate result of a recomputed block"), "{told}");
    }
    drop(y);
    // The same values by another way.
    let calls = Arc::new(AtomicUsize::new(0));
    let y = block.recompute(&x, move |layer, x| match calls.fetch_add(1, Ordering::Relaxed) {
        0 => layer.forward(x),
        _ => layer.forward(x)?.neg()?.neg(),
    });
    let told = y.unwrap().sum_all().unwrap().backward().unwrap_err().to_string();
    assert!(told.contains("layers.2") && told.contains("by other operations"), "{told}");
    let calls = AtomicUsize::new(0);
    let y = block.recompute(&x, move |layer, x| match calls.fetch_add(1, Ordering::Relaxed) {
        0 => relu(&linear_of(true, layer, x)?),
        _ => relu(&relu(&linear_of(true, layer, x)?)?),
    });
    let told = y.unwrap().sum_all().unwrap().backward().unwrap_err().to_string();
    assert!(told.contains("layers.2") && told.contains("by other operations"), "{told}");
    // A result without a gradient is not recorded.
    let y = block.recompute(&x, |layer, x| layer.forward(x)?.argmax(1)).unwrap();
    assert!(!y.track_op());
    assert_eq!(y.dims(), [2]);
}
