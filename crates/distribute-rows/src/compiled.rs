//! What is compiled in this crate, for both types of elements.

use crate::cross_entropy::{self, LogSum};
use crate::normalise::{Gradients, Normalise};
use crate::{gelu, relu, softmax};

/// Declares a trait of functions, and implements it for `f32` and `f64` by generic ones.
///
/// A generic function is compiled in each crate that calls it, with the settings of that crate. These functions are
/// compiled where they are declared, which development builds optimise, so that they need not optimise the callers.
#[doc(hidden)]
#[macro_export]
macro_rules! compiled {
    ($(
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $function:path;
    )*) => {
        pub trait Compiled: Sized {
            $(fn $name($($argument: $type),*) $(-> $result)?;)*
        }
        $crate::compiled!(for f32: $(fn $name($($argument: $type),*) $(-> $result)? = $function;)*);
        $crate::compiled!(for f64: $(fn $name($($argument: $type),*) $(-> $result)? = $function;)*);
    };
    (for $float:ty: $(
        fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? = $function:path;
    )*) => {
        impl Compiled for $float {
            $(
                #[inline(never)]
                fn $name($($argument: $type),*) $(-> $result)? {
                    $function($($argument),*)
                }
            )*
        }
    };
}

compiled! {
    fn cross_entropy_forward(
        logits: &[Self],
        size: usize,
        classes: &[usize],
        losses: &mut [Self],
        sums: &mut [LogSum<Self>],
    ) = cross_entropy::forward_generic;
    fn cross_entropy_backward(
        logits: &[Self],
        size: usize,
        classes: &[usize],
        sums: &[LogSum<Self>],
        gradient: &[Self],
        out: &mut [Self],
    ) = cross_entropy::backward_generic;
    fn gelu_forward(x: &[Self], out: &mut [Self]) = gelu::forward_generic;
    fn gelu_backward(x: &[Self], gradient: &[Self], out: &mut [Self]) = gelu::backward_generic;
    fn relu_forward(x: &[Self], out: &mut [Self]) = relu::forward_generic;
    fn relu_backward(y: &[Self], gradient: &[Self], out: &mut [Self]) = relu::backward_generic;
    fn softmax_forward(x: &[Self], size: usize, out: &mut [Self]) = softmax::forward_generic;
    fn softmax_backward(y: &[Self], size: usize, gradient: &[Self], out: &mut [Self]) = softmax::backward_generic;
    fn normalise_forward(
        of: Normalise,
        x: &[Self],
        weight: &[Self],
        bias: Option<&[Self]>,
        out: &mut [Self],
    ) = Normalise::forward_generic;
    fn normalise_backward(
        of: Normalise,
        x: &[Self],
        weight: &[Self],
        gradient: &[Self],
        out: &mut [Self],
    ) -> Gradients<Self> = Normalise::backward_generic;
}
