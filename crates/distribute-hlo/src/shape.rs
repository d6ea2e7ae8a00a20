//! Rules about sizes that several operations share. Errors are the text of the problem.

use crate::{CollectiveGroups, Convolution, TensorType, Window};

/// Checks that dimensions are below `ndim` and differ from each other.
pub(crate) fn distinct(what: &str, dims: &[usize], ndim: usize) -> Result<(), String> {
    for (place, &dim) in dims.iter().enumerate() {
        in_range(what, dim, ndim)?;
        if dims[..place].contains(&dim) {
            return Err(format!("{what} names dimension {dim} twice; name each once"));
        }
    }
    Ok(())
}

/// Checks that a dimension is below `ndim`.
pub(crate) fn in_range(what: &str, dim: usize, ndim: usize) -> Result<(), String> {
    match dim < ndim {
        true => Ok(()),
        false if ndim == 0 => Err(format!("{what}: {dim} is not a dimension, since a scalar has none")),
        false => Err(format!("{what}: {dim} is not a dimension; expected 0 to {}", ndim - 1)),
    }
}

/// Checks that dimensions are in ascending order.
pub(crate) fn ascending(what: &str, dims: &[usize]) -> Result<(), String> {
    match dims.windows(2).all(|pair| pair[0] < pair[1]) {
        true => Ok(()),
        false => Err(format!("{what} is {dims:?}; give dimensions in ascending order")),
    }
}

/// Checks the number of entries.
pub(crate) fn length<T>(what: &str, entries: &[T], expected: usize) -> Result<(), String> {
    match entries.len() == expected {
        true => Ok(()),
        false => Err(format!("{what} has {} entries; expected {expected}, one for each dimension", entries.len())),
    }
}

/// Returns the dimensions below `ndim` that a list does not name.
pub(crate) fn others(ndim: usize, dims: &[usize]) -> Vec<usize> {
    (0..ndim).filter(|dim| !dims.contains(dim)).collect()
}

/// Returns a size with `gap − 1` elements between two: the extent from the first to the last one.
pub(crate) fn dilated(size: usize, gap: usize) -> Option<usize> {
    if size == 0 { Some(0) } else { (size - 1).checked_mul(gap)?.checked_add(1) }
}

/// Returns a size with padding, which may be negative. `None` if it overflows; a size below 0 is the error value.
pub(crate) fn padded(size: usize, low: i64, high: i64) -> Option<i128> {
    i128::try_from(size).ok()?.checked_add(i128::from(low) + i128::from(high))
}

/// Returns the sizes of the results of windows over sizes.
pub(crate) fn windowed(sizes: &[usize], window: &Window) -> Result<Vec<usize>, String> {
    let ndim = sizes.len();
    length("the window's dims", &window.dims, ndim)?;
    length("the window's strides", &window.strides, ndim)?;
    length("the window's padding", &window.padding, ndim)?;
    length("the window's base_dilations", &window.base_dilations, ndim)?;
    length("the window's window_dilations", &window.window_dilations, ndim)?;
    let positive = [
        ("dims", &window.dims),
        ("strides", &window.strides),
        ("base_dilations", &window.base_dilations),
        ("window_dilations", &window.window_dilations),
    ];
    for (what, entries) in positive {
        if entries.contains(&0) {
            return Err(format!("the window's {what} are {entries:?}; give 1 or more"));
        }
    }
    (0..ndim)
        .map(|dim| {
            let overflow = || format!("the extent of dimension {dim} overflows; use smaller sizes");
            let (low, high) = window.padding[dim];
            let base = dilated(sizes[dim], window.base_dilations[dim]).ok_or_else(overflow)?;
            let extent = padded(base, low, high).ok_or_else(overflow)?;
            if extent < 0 {
                return Err(format!(
                    "the padding ({low}, {high}) of dimension {dim} removes more than its {base} elements"
                ));
            }
            let reach = dilated(window.dims[dim], window.window_dilations[dim]).ok_or_else(overflow)? as i128;
            let windows = if extent < reach { 0 } else { (extent - reach) / window.strides[dim] as i128 + 1 };
            usize::try_from(windows).map_err(|_| overflow())
        })
        .collect()
}

/// Returns the spatial window of a convolution.
pub(crate) fn convolution_window(convolution: &Convolution, kernel: &TensorType) -> Window {
    Window {
        dims: convolution.kernel_spatial_dimensions.iter().map(|&dim| kernel.dims[dim]).collect(),
        strides: convolution.strides.clone(),
        padding: convolution.padding.clone(),
        base_dilations: convolution.lhs_dilation.clone(),
        window_dilations: convolution.rhs_dilation.clone(),
    }
}

/// Checks that each replica is in one group, and returns the size of a group.
pub(crate) fn group_size(groups: &CollectiveGroups, replicas: usize) -> Result<usize, String> {
    let CollectiveGroups::Groups(groups) = groups else { return Ok(replicas) };
    let size = groups.first().map_or(0, Vec::len);
    if let Some(other) = groups.iter().find(|group| group.len() != size || group.is_empty()) {
        return Err(format!("a group has {size} replicas and another {}; make groups of one size", other.len()));
    }
    let mut seen = vec![false; replicas];
    for &replica in groups.iter().flatten() {
        match seen.get_mut(replica) {
            Some(seen) if *seen => return Err(format!("replica {replica} is in two groups; name each replica once")),
            Some(seen) => *seen = true,
            None => return Err(format!("replica {replica} is in a group, and the program has {replicas} replicas")),
        }
    }
    match seen.iter().position(|&seen| !seen) {
        Some(replica) => Err(format!("replica {replica} is in no group; name each replica once")),
        None => Ok(size),
    }
}
