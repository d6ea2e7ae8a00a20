//! Attention whose memory does not grow with the square of the number of tokens.

use candle_core::{CpuStorage, DType, Error, Layout, Result, Shape, Storage, Tensor};
use distribute_kernels::attention::{Arguments, Attention, Results, Vectors};

use crate::host::{Element, Kept, Stored, elements, is_fused, tensor, with};
use crate::relay::{Operation, apply};
use crate::rows::softmax;
use crate::tensor::is_short;

/// Which keys a query attends to.
#[derive(Clone, Copy, Debug)]
pub enum AttentionMask<'a> {
    /// All.
    None,
    /// The last query attends to all keys, and each one before it to one key less than the next.
    Causal,
    /// Numbers that are added to scores, as −∞ for keys that are hidden: of a shape that broadcasts to (batch, heads,
    /// queries, keys), and of the queries' type. They get no gradient.
    Additive(&'a Tensor),
}

/// Computes scaled dot-product attention, `softmax(q · kᵀ / √width + mask) · v`.
///
/// In host memory neither forward nor backward keep the matrix of scores; tensors of f32 and f64 may be views, as
/// transposed ones, and are not copied if the elements of a vector are side by side. Those of 16 bits are converted to
/// f32, and the result back. Elsewhere these are candle's operations, of which those on scores of 16 bits are in f32.
///
/// # Shapes
/// `q`: (batch, heads, queries, width). `k` and `v`: (batch, heads, keys, width); of their heads, each may serve
/// several heads of queries, one after another. Result: (batch, heads, queries, width), where heads are side by side in
/// memory, so that `transpose(1, 2)` and `flatten_from(2)` copy nothing.
///
/// A query that is kept from all keys gets NaN.
///
/// # Errors
/// [`candle_core::Error`] if shapes, types or devices do not fit together.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use distribute_candle::{AttentionMask, attention};
///
/// let x = Tensor::new(&[[[[1f32], [3.0]]]], &Device::Cpu)?;
/// let zeros = x.zeros_like()?;
/// let means = attention(&zeros, &zeros, &x, AttentionMask::Causal)?;
/// assert_eq!(means.flatten_all()?.to_vec1::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Source
/// Vaswani and others, "Attention is all you need", 2017; Dao and others, "FlashAttention", 2022.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: AttentionMask<'_>) -> Result<Tensor> {
    let (batch, heads, queries, width) = q.dims4()?;
    let (_, key_heads, keys, _) = k.dims4()?;
    let fits = k.dims() == [batch, key_heads, keys, width] && v.dims() == k.dims();
    let alike = [k, v].iter().all(|x| x.dtype() == q.dtype() && x.device().same_device(q.device()));
    if !fits || !alike || key_heads == 0 || !heads.is_multiple_of(key_heads) {
        candle_core::bail!(
            "attention of {:?} {:?} to {:?} {:?} and {:?} {:?}; give equal types and devices, shapes (batch, heads, \
             tokens, width), and a number of heads of queries that is a multiple of that of keys",
            q.dtype(),
            q.dims(),
            k.dtype(),
            k.dims(),
            v.dtype(),
            v.dims()
        );
    }
    let held = additive_in_32_bits(mask, q.dtype())?;
    let mask = held.as_ref().map_or(mask, AttentionMask::Additive);
    if is_short(q.dtype()) && q.device().is_cpu() {
        let wide = |x: &Tensor| x.to_dtype(DType::F32);
        return attention(&wide(q)?, &wide(k)?, &wide(v)?, mask)?.to_dtype(q.dtype());
    }
    let scale = 1.0 / (width as f64).sqrt();
    let causal = matches!(mask, AttentionMask::Causal);
    if !is_fused(q) || keys == 0 || width == 0 {
        return composed([q, k, v], mask, scale);
    }
    let of = Attention { batch, heads, key_heads, queries, keys, width, scale, causal };
    let mask = additive(mask, &of)?;
    let (q, k, v) = (side_by_side(q)?, side_by_side(k)?, side_by_side(v)?);
    let out = match q.dtype() {
        DType::F64 => apply([&q, &k, &v], Attend { of, mask, sums: Kept::<f64>::none() }),
        _ => apply([&q, &k, &v], Attend { of, mask, sums: Kept::<f32>::none() }),
    };
    out?.transpose(1, 2)
}

/// Computes the [`attention`] of tokens to each other, from queries, keys and values in one tensor, as one linear layer
/// makes them. The gradient is one tensor too, so nothing is copied.
///
/// # Shapes
/// `qkv`: (batch, tokens, 3 · heads · width), of which queries are the first third and values the last. Result: (batch,
/// tokens, heads · width).
///
/// # Errors
/// [`candle_core::Error`] if `qkv` has other than three axes, or its last one does not make heads.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use distribute_candle::{AttentionMask, self_attention};
///
/// let qkv = Tensor::ones((2, 5, 3 * 4 * 8), DType::F32, &Device::Cpu)?;
/// assert_eq!(self_attention(&qkv, 4, AttentionMask::Causal)?.dims(), [2, 5, 4 * 8]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn self_attention(qkv: &Tensor, heads: usize, mask: AttentionMask<'_>) -> Result<Tensor> {
    let (batch, tokens, size) = qkv.dims3()?;
    if heads == 0 || size == 0 || !size.is_multiple_of(3 * heads) {
        candle_core::bail!("self-attention of shape {:?}; give (batch, tokens, 3 · {heads} · width)", qkv.dims());
    }
    let held = additive_in_32_bits(mask, qkv.dtype())?;
    let mask = held.as_ref().map_or(mask, AttentionMask::Additive);
    if is_short(qkv.dtype()) && qkv.device().is_cpu() {
        return self_attention(&qkv.to_dtype(DType::F32)?, heads, mask)?.to_dtype(qkv.dtype());
    }
    let width = size / 3 / heads;
    let scale = 1.0 / (width as f64).sqrt();
    if !is_fused(qkv) || tokens == 0 {
        let parts = qkv.reshape((batch, tokens, 3, heads, width))?;
        let part = |at| parts.narrow(2, at, 1)?.squeeze(2)?.transpose(1, 2);
        let (q, k, v): (Tensor, Tensor, Tensor) = (part(0)?, part(1)?, part(2)?);
        return composed([&q, &k, &v], mask, scale)?.transpose(1, 2)?.flatten_from(2);
    }
    let causal = matches!(mask, AttentionMask::Causal);
    let of = Attention { batch, heads, key_heads: heads, queries: tokens, keys: tokens, width, scale, causal };
    let mask = additive(mask, &of)?;
    let qkv = qkv.contiguous()?;
    match qkv.dtype() {
        DType::F64 => apply([&qkv], Attend { of, mask, sums: Kept::<f64>::none() }),
        _ => apply([&qkv], Attend { of, mask, sums: Kept::<f32>::none() }),
    }
}

/// Returns what is added to the scores of queries of 16 bits, which are f32.
fn additive_in_32_bits(mask: AttentionMask<'_>, queries: DType) -> Result<Option<Tensor>> {
    match mask {
        AttentionMask::Additive(mask) if is_short(queries) && mask.dtype().is_float() => {
            mask.detach().to_dtype(DType::F32).map(Some)
        }
        _ => Ok(None),
    }
}

/// Computes attention by candle's operations.
fn composed([q, k, v]: [&Tensor; 3], mask: AttentionMask<'_>, scale: f64) -> Result<Tensor> {
    let (batch, heads, queries, _) = q.dims4()?;
    let (_, key_heads, keys, width) = k.dims4()?;
    let [k, v] = [k, v].map(|x| {
        let shape = (batch, key_heads, heads / key_heads, keys, width);
        x.unsqueeze(2)?.broadcast_as(shape)?.reshape((batch, heads, keys, width))?.contiguous()
    });
    let wide = if is_short(q.dtype()) { DType::F32 } else { q.dtype() };
    let scores = (q.contiguous()?.matmul(&k?.t()?)?.to_dtype(wide)? * scale)?;
    let scores = match mask {
        AttentionMask::None => scores,
        AttentionMask::Causal => {
            let hidden = |at: usize| if at % keys + queries > at / keys + keys { f32::NEG_INFINITY } else { 0.0 };
            let mask = (0..queries * keys).map(hidden).collect::<Vec<f32>>();
            let mask = Tensor::from_vec(mask, (queries, keys), q.device())?.to_dtype(wide)?;
            scores.broadcast_add(&mask)?
        }
        AttentionMask::Additive(mask) => scores.broadcast_add(&mask.detach())?,
    };
    softmax(&scores)?.to_dtype(q.dtype())?.matmul(&v?)
}

/// Returns what is added to the scores of each batch, head, query and key.
fn additive(mask: AttentionMask<'_>, of: &Attention) -> Result<Option<Tensor>> {
    let AttentionMask::Additive(mask) = mask else { return Ok(None) };
    side_by_side(&mask.detach().broadcast_as((of.batch, of.heads, of.queries, of.keys))?).map(Some)
}

/// Returns a tensor whose last axis has no gaps; a copy, if it has some.
fn side_by_side(x: &Tensor) -> Result<Tensor> {
    if x.stride().last() == Some(&1) { Ok(x.clone()) } else { x.contiguous() }
}

/// Returns the vectors of a tensor of shape (batch, heads, tokens, width).
fn vectors<'a, T: Element>(storage: &'a CpuStorage, layout: &Layout) -> Result<Vectors<'a, T>> {
    let &[batch, head, token, step] = layout.stride() else {
        candle_core::bail!("not batch, heads and tokens: {layout:?}")
    };
    if step != 1 && layout.dims().last() != Some(&1) {
        candle_core::bail!("vectors have gaps: {layout:?}");
    }
    let data = T::cpu_storage_as_slice(storage)?.get(layout.start_offset()..);
    let data = data.ok_or_else(|| Error::Msg("a tensor is longer than its memory".to_owned()))?;
    Ok(Vectors { data, batch, head, token })
}

/// Calls `f` with the vectors of tensors of shape (batch, heads, tokens, width) in host memory.
fn with_vectors<T: Element, R>(tensors: [&Tensor; 3], f: impl FnOnce([Vectors<'_, T>; 3]) -> Result<R>) -> Result<R> {
    let [q, k, v] = tensors.map(Tensor::storage_and_layout);
    match (&*q.0, &*k.0, &*v.0) {
        (Storage::Cpu(of_q), Storage::Cpu(of_k), Storage::Cpu(of_v)) => {
            f([vectors(of_q, q.1)?, vectors(of_k, k.1)?, vectors(of_v, v.1)?])
        }
        _ => candle_core::bail!("a tensor is not in host memory"),
    }
}

struct Attend<T> {
    of: Attention,
    mask: Option<Tensor>,
    /// One number of each query, from forward for backward.
    sums: Kept<T>,
}

impl<T: Element> Attend<T> {
    /// Calls `f` with the vectors of the mask.
    fn with_mask<R>(&self, f: impl FnOnce(Option<Vectors<'_, T>>) -> Result<R>) -> Result<R> {
        let Some(mask) = &self.mask else { return f(None) };
        let (storage, layout) = mask.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { candle_core::bail!("the mask is not in host memory") };
        f(Some(vectors(storage, layout)?))
    }

    fn results(&self, [q, k, v]: [Vectors<'_, T>; 3]) -> Result<CpuStorage> {
        let Results { means, sums } = self.with_mask(|mask| Ok(self.of.forward(&Arguments { q, k, v, mask })))?;
        self.sums.set(sums)?;
        Ok(T::to_cpu_storage_owned(means))
    }

    /// Returns what a function makes of the arguments, the means, the sums and the gradient of the means.
    fn gradients<R>(
        &self,
        [q, k, v]: [Vectors<'_, T>; 3],
        y: &Tensor,
        gradient: &Tensor,
        f: impl FnOnce(&Attention, &Arguments<'_, T>, &[T], &[T], &[T]) -> R,
    ) -> Result<R> {
        with([self.sums.tensor()?, y, gradient], |[sums, means, gradient]: [&[T]; 3]| {
            self.with_mask(|mask| Ok(f(&self.of, &Arguments { q, k, v, mask }, means, sums, gradient)))
        })?
    }

    /// Returns queries, keys and values of a tensor of all three.
    fn parts<'a>(&self, all: &'a [T]) -> [Vectors<'a, T>; 3] {
        let (row, head) = (3 * self.of.heads * self.of.width, self.of.width);
        let part = |at: usize| all.get(at * self.of.heads * head..).unwrap_or_default();
        [0, 1, 2].map(|at| Vectors { data: part(at), batch: self.of.keys * row, head, token: row })
    }
}

impl<T: Element> Operation<1> for Attend<T> {
    const NAME: &'static str = "self-attention";

    fn forward(&self, [(storage, layout)]: [Stored<'_>; 1]) -> Result<(CpuStorage, Shape)> {
        let of = &self.of;
        let out = self.results(self.parts(elements(storage, layout)?))?;
        Ok((out, Shape::from((of.batch, of.queries, of.heads * of.width))))
    }

    fn backward(&self, [qkv]: [&Tensor; 1], y: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let change = with([qkv], |[elements]: [&[T]; 1]| {
            self.gradients(self.parts(elements), y, gradient, Attention::backward_packed)
        })??;
        Ok([Some(tensor(change, qkv)?)])
    }

    fn kept(&self) -> Option<&Tensor> {
        self.sums.get()
    }
}

impl<T: Element> Operation<3> for Attend<T> {
    const NAME: &'static str = "attention";

    fn forward(&self, parts: [Stored<'_>; 3]) -> Result<(CpuStorage, Shape)> {
        let (of, [q, k, v]) = (&self.of, parts.map(|(storage, layout)| vectors(storage, layout)));
        let out = self.results([q?, k?, v?])?;
        Ok((out, Shape::from((of.batch, of.queries, of.heads, of.width))))
    }

    fn backward(&self, inputs: [&Tensor; 3], y: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let changes = with_vectors(inputs, |vectors| self.gradients(vectors, y, gradient, Attention::backward))?;
        let of = |elements: Vec<T>, like: &Tensor| {
            let (batch, heads, tokens, width) = like.dims4()?;
            Tensor::from_vec(elements, (batch, tokens, heads, width), like.device())?.transpose(1, 2).map(Some)
        };
        let ([of_q, of_k, of_v], [q, k, v]) = (changes, inputs);
        Ok([of(of_q, q)?, of(of_k, k)?, of(of_v, v)?])
    }

    fn kept(&self) -> Option<&Tensor> {
        self.sums.get()
    }
}
