//! Values of an evaluation.

use distribute_hlo::{ElementType, Literal, TensorType};
use distribute_types::{bf16, bf16_from_f64, f16, f16_from_f64};

use crate::number::Num;

macro_rules! data {
    ($($variant:ident $type:ty;)*) => {
        /// The elements of a tensor, in row-major order.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Data {
            $(
                #[doc = concat!("Elements of type `", stringify!($type), "`.")]
                $variant(Vec<$type>),
            )*
        }

        impl Data {
            /// Returns the number of elements.
            pub fn len(&self) -> usize {
                match self {
                    $(Data::$variant(values) => values.len(),)*
                }
            }

            /// Returns whether there are no elements.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Returns the element type.
            pub fn element(&self) -> ElementType {
                match self {
                    $(Data::$variant(_) => ElementType::$variant,)*
                }
            }
        }

        $(
            impl From<Vec<$type>> for Data {
                fn from(values: Vec<$type>) -> Data {
                    Data::$variant(values)
                }
            }
        )*
    };
}

data! {
    Bool bool;
    F16 f16;
    BF16 bf16;
    F32 f32;
    F64 f64;
    I8 i8;
    I16 i16;
    I32 i32;
    I64 i64;
    U8 u8;
    U16 u16;
    U32 u32;
    U64 u64;
}

/// A tensor: sizes and elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The type.
    ty: TensorType,
    /// The elements.
    data: Data,
}

impl Tensor {
    /// Creates a tensor.
    ///
    /// # Panics
    /// If the number of elements is not that of the sizes.
    pub fn new(dims: impl Into<Vec<usize>>, data: impl Into<Data>) -> Tensor {
        let data = data.into();
        let ty = TensorType::new(data.element(), dims);
        assert_eq!(ty.elements(), Some(data.len()), "{} elements were given for {}", data.len(), ty.short());
        Tensor { ty, data }
    }

    /// Returns the type.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// Returns the elements in row-major order.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// Creates a tensor from the bytes of its elements, least significant first.
    ///
    /// # Panics
    /// If the number of bytes is not that of the type.
    pub fn from_bytes(ty: TensorType, bytes: &[u8]) -> Tensor {
        assert_eq!(ty.size_bytes(), Some(bytes.len()), "{} bytes were given for {}", bytes.len(), ty.short());
        macro_rules! read {
            ($($variant:ident $type:ty;)*) => {
                match ty.element {
                    ElementType::Bool => Data::Bool(bytes.iter().map(|&byte| byte != 0).collect()),
                    $(ElementType::$variant => Data::$variant(
                        bytes.as_chunks().0.iter().map(|&chunk| <$type>::from_le_bytes(chunk)).collect()
                    ),)*
                }
            };
        }
        let data = read! {
            F16 f16; BF16 bf16; F32 f32; F64 f64; I8 i8; I16 i16; I32 i32; I64 i64; U8 u8; U16 u16; U32 u32; U64 u64;
        };
        Tensor { ty, data }
    }

    /// Returns the bytes of the elements, least significant first.
    pub fn to_bytes(&self) -> Vec<u8> {
        macro_rules! write {
            ($($variant:ident)*) => {
                match &self.data {
                    Data::Bool(values) => values.iter().map(|&value| u8::from(value)).collect(),
                    $(Data::$variant(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),)*
                }
            };
        }
        write!(F16 BF16 F32 F64 I8 I16 I32 I64 U8 U16 U32 U64)
    }

    /// Creates the tensor of a literal.
    pub(crate) fn from_literal(literal: &Literal) -> Tensor {
        let count = literal.ty().elements().unwrap_or(0);
        let bytes: Vec<u8> = (0..count).flat_map(|place| literal.element_bytes(place).to_vec()).collect();
        Tensor::from_bytes(literal.ty().clone(), &bytes)
    }

    /// Creates a tensor by computing each element from its index. Elements are rounded to the type.
    pub(crate) fn generate(ty: TensorType, mut element: impl FnMut(&[usize]) -> Num) -> Tensor {
        let numbers: Vec<Num> = indices(&ty.dims).map(|index| element(&index).rounded(ty.element)).collect();
        Tensor::from_numbers(ty, numbers)
    }

    /// Creates a tensor from numbers of its type.
    pub(crate) fn from_numbers(ty: TensorType, numbers: Vec<Num>) -> Tensor {
        macro_rules! pack {
            ($($float:ident $from:expr;)* ; $($variant:ident $type:ty;)*) => {
                match ty.element {
                    ElementType::Bool => Data::Bool(numbers.iter().map(|number| number.truth()).collect()),
                    $(ElementType::$float => Data::$float(numbers.iter().map(|n| $from(n.float())).collect()),)*
                    $(ElementType::$variant => Data::$variant(numbers.iter().map(|n| n.int() as $type).collect()),)*
                }
            };
        }
        let data = pack! {
            F16 f16_from_f64; BF16 bf16_from_f64; F32 |value| value as f32; F64 |value| value; ;
            I8 i8; I16 i16; I32 i32; I64 i64; U8 u8; U16 u16; U32 u32; U64 u64;
        };
        Tensor { ty, data }
    }

    /// Returns the sizes.
    pub(crate) fn dims(&self) -> &[usize] {
        &self.ty.dims
    }

    /// Returns an element by its place in row-major order.
    pub(crate) fn number(&self, place: usize) -> Num {
        macro_rules! get {
            ($($float:ident)* ; $($variant:ident)*) => {
                match &self.data {
                    Data::Bool(values) => Num::Bool(values[place]),
                    $(Data::$float(values) => Num::Float(f64::from(values[place])),)*
                    $(Data::$variant(values) => Num::Int(i128::from(values[place])),)*
                }
            };
        }
        get!(F16 BF16 F32 F64 ; I8 I16 I32 I64 U8 U16 U32 U64)
    }

    /// Returns an element by its index.
    pub(crate) fn at(&self, index: &[usize]) -> Num {
        let place = index.iter().zip(self.dims()).fold(0, |place, (&i, &size)| place * size + i);
        self.number(place)
    }
}

/// Returns all indices in row-major order.
pub(crate) fn indices(dims: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
    let count: usize = dims.iter().product();
    (0..count).map(move |place| {
        let mut rest = place;
        let mut index = vec![0; dims.len()];
        for (i, &size) in index.iter_mut().zip(dims).rev() {
            *i = rest % size;
            rest /= size;
        }
        index
    })
}
