//! Products of tensors and convolutions.

use crate::shape::{convolution_window, distinct, length, others, windowed};
use crate::{Builder, Convolution, DotDimensions, ElementType, OpKind, Result, TensorType, Value};

impl Builder {
    /// Multiplies two tensors over dimensions that both have: batching dimensions stay, products are added over
    /// contracting ones.
    ///
    /// # Shapes
    /// The result has the batching dimensions, the other dimensions of `lhs`, then those of `rhs`.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if dimensions, sizes or element types do not match.
    ///
    /// # Examples
    /// ```
    /// use distribute_hlo::{Builder, DotDimensions, ElementType, TensorType};
    /// let mut b = Builder::new("product");
    /// let x = b.parameter(TensorType::new(ElementType::F32, [2, 3]));
    /// let y = b.parameter(TensorType::new(ElementType::F32, [4, 5]));
    /// let error = b.dot_general(x, y, &DotDimensions::matmul(0)).unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "dot_general: lhs is f32[2,3], rhs is f32[4,5]: contracting dimensions 1 (3) and 0 (4) differ in size"
    /// );
    /// ```
    pub fn dot_general(&mut self, lhs: Value, rhs: Value, dimensions: &DotDimensions) -> Result<Value> {
        let [left, right] = self.types("dot_general", [lhs, rhs])?;
        let result = product(&left, &right, dimensions)
            .map_err(|problem| self.refuse("dot_general", &[("lhs", lhs), ("rhs", rhs)], problem))?;
        let kind = OpKind::DotGeneral { dimensions: dimensions.clone(), precision: self.current_precision() };
        self.push(kind, &[lhs, rhs], result)
    }

    /// Convolves an input with a kernel; the kernel is not reversed unless asked for.
    ///
    /// # Shapes
    /// Those that [`Convolution`] names. Channels of the input are those of the kernel times `feature_group_count`.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if dimensions, sizes or element types do not match.
    pub fn convolution(&mut self, input: Value, kernel: Value, convolution: &Convolution) -> Result<Value> {
        let [lhs, rhs] = self.types("convolution", [input, kernel])?;
        let result = convolved(&lhs, &rhs, convolution)
            .map_err(|problem| self.refuse("convolution", &[("input", input), ("kernel", kernel)], problem))?;
        let kind = OpKind::Convolution { convolution: convolution.clone(), precision: self.current_precision() };
        self.push(kind, &[input, kernel], result)
    }
}

/// Returns the type of a product.
fn product(lhs: &TensorType, rhs: &TensorType, dims: &DotDimensions) -> Result<TensorType, String> {
    let element = result_element(lhs, rhs, dims.element)?;
    let left: Vec<usize> = dims.lhs_batching.iter().chain(&dims.lhs_contracting).copied().collect();
    let right: Vec<usize> = dims.rhs_batching.iter().chain(&dims.rhs_contracting).copied().collect();
    distinct("lhs_batching and lhs_contracting", &left, lhs.ndim())?;
    distinct("rhs_batching and rhs_contracting", &right, rhs.ndim())?;
    pairs("batching", lhs, rhs, &dims.lhs_batching, &dims.rhs_batching)?;
    pairs("contracting", lhs, rhs, &dims.lhs_contracting, &dims.rhs_contracting)?;
    let mut sizes: Vec<usize> = dims.lhs_batching.iter().map(|&dim| lhs.dims[dim]).collect();
    sizes.extend(others(lhs.ndim(), &left).into_iter().map(|dim| lhs.dims[dim]));
    sizes.extend(others(rhs.ndim(), &right).into_iter().map(|dim| rhs.dims[dim]));
    Ok(TensorType::new(element, sizes))
}

/// Checks that two lists name dimensions of the same sizes.
fn pairs(what: &str, lhs: &TensorType, rhs: &TensorType, left: &[usize], right: &[usize]) -> Result<(), String> {
    if left.len() != right.len() {
        return Err(format!("lhs has {} {what} dimensions and rhs {}; name pairs", left.len(), right.len()));
    }
    match left.iter().zip(right).find(|(l, r)| lhs.dims[**l] != rhs.dims[**r]) {
        Some((&l, &r)) => {
            Err(format!("{what} dimensions {l} ({}) and {r} ({}) differ in size", lhs.dims[l], rhs.dims[r]))
        }
        None => Ok(()),
    }
}

/// Returns the element type of sums of products.
fn result_element(lhs: &TensorType, rhs: &TensorType, asked: Option<ElementType>) -> Result<ElementType, String> {
    if lhs.element != rhs.element {
        return Err("the element types differ; convert one of them".to_owned());
    }
    if lhs.element == ElementType::Bool {
        return Err("expected numbers; convert truth values first".to_owned());
    }
    let element = asked.unwrap_or(lhs.element);
    let same_kind = lhs.element.is_float() == element.is_float()
        && lhs.element.is_signed_integer() == element.is_signed_integer()
        && element != ElementType::Bool;
    if !same_kind || element.bits() < lhs.element.bits() {
        return Err(format!(
            "sums of {} cannot be of type {}; ask for one of the same kind with at least as many bits",
            lhs.element.name(),
            element.name()
        ));
    }
    Ok(element)
}

/// Returns the type of a convolution.
fn convolved(lhs: &TensorType, rhs: &TensorType, conv: &Convolution) -> Result<TensorType, String> {
    let element = result_element(lhs, rhs, conv.element)?;
    let spatial = conv.strides.len();
    for (what, ty) in [("the input", lhs), ("the kernel", rhs)] {
        if ty.ndim() != spatial + 2 {
            return Err(format!("{what} has {} dimensions; expected {} for {spatial} strides", ty.ndim(), spatial + 2));
        }
    }
    let places = [
        ("input", conv.input_batch_dimension, conv.input_feature_dimension, &conv.input_spatial_dimensions),
        (
            "kernel",
            conv.kernel_input_feature_dimension,
            conv.kernel_output_feature_dimension,
            &conv.kernel_spatial_dimensions,
        ),
        ("output", conv.output_batch_dimension, conv.output_feature_dimension, &conv.output_spatial_dimensions),
    ];
    for (what, first, second, rest) in places {
        length(&format!("the {what}'s spatial dimensions"), rest, spatial)?;
        let all: Vec<usize> = [first, second].into_iter().chain(rest.iter().copied()).collect();
        distinct(&format!("the {what}'s dimensions"), &all, spatial + 2)?;
    }
    length("padding", &conv.padding, spatial)?;
    length("lhs_dilation", &conv.lhs_dilation, spatial)?;
    length("rhs_dilation", &conv.rhs_dilation, spatial)?;
    length("reversal", &conv.reversal, spatial)?;
    let (examples, channels) = (lhs.dims[conv.input_batch_dimension], lhs.dims[conv.input_feature_dimension]);
    let in_kernel = rhs.dims[conv.kernel_input_feature_dimension];
    let features = rhs.dims[conv.kernel_output_feature_dimension];
    let (groups, batches) = (conv.feature_group_count, conv.batch_group_count);
    if groups == 0 || batches == 0 || (groups > 1 && batches > 1) {
        return Err(format!(
            "feature_group_count is {groups} and batch_group_count {batches}; give 1 or more, and 1 for one of them"
        ));
    }
    if in_kernel.checked_mul(groups) != Some(channels) {
        return Err(format!(
            "the input has {channels} channels; expected {in_kernel}, those of the kernel, times {groups} groups"
        ));
    }
    if [(features, groups), (features, batches), (examples, batches)].iter().any(|(n, parts)| !n.is_multiple_of(*parts))
    {
        return Err(format!(
            "{features} output channels and {examples} examples cannot be divided into {groups} groups of channels and \
             {batches} groups of examples"
        ));
    }
    let sizes: Vec<usize> = conv.input_spatial_dimensions.iter().map(|&dim| lhs.dims[dim]).collect();
    let sizes = windowed(&sizes, &convolution_window(conv, rhs))?;
    let mut dims = vec![0; spatial + 2];
    dims[conv.output_batch_dimension] = examples / batches;
    dims[conv.output_feature_dimension] = features;
    for (&dim, size) in conv.output_spatial_dimensions.iter().zip(sizes) {
        dims[dim] = size;
    }
    Ok(TensorType::new(element, dims))
}
