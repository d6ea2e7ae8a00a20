//! Compilation of generic functions in the crate that declares them.

/// Declares a trait `Compiled` of functions, and implements it for `f32` and `f64` by generic ones.
///
/// A generic function is compiled in each crate that calls it, with the settings of that crate. These functions are
/// compiled where they are declared, which development builds optimise, so that they need not optimise the callers.
#[doc(hidden)]
#[macro_export]
macro_rules! compiled {
    ($(
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $function:path;
    )*) => {
        /// A type of elements for which the functions of this module are compiled: `f32` or `f64`.
        pub trait Compiled: $crate::Float {
            $(
                #[doc(hidden)]
                fn $name($($argument: $type),*) $(-> $result)?;
            )*
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
