//! Attributes of operations.

/// A function of each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnaryOp {
    /// The absolute value of signed integers and floating-point numbers.
    Abs,
    /// The negative.
    Negate,
    /// e to the power of the operand.
    Exp,
    /// e to the power of the operand, minus 1.
    ExpMinusOne,
    /// The natural logarithm.
    Log,
    /// The natural logarithm of 1 plus the operand.
    LogPlusOne,
    /// The square root.
    Sqrt,
    /// The reciprocal of the square root.
    Rsqrt,
    /// The cube root.
    Cbrt,
    /// The sine of an angle in radians.
    Sine,
    /// The cosine of an angle in radians.
    Cosine,
    /// The tangent of an angle in radians.
    Tan,
    /// The hyperbolic tangent.
    Tanh,
    /// 1 / (1 + exp(−x)).
    Logistic,
    /// The largest whole number that is not above the operand.
    Floor,
    /// The smallest whole number that is not below the operand.
    Ceil,
    /// The nearest whole number; the even one of two.
    RoundNearestEven,
    /// The nearest whole number; of two the one further from zero.
    RoundNearestAwayFromZero,
    /// −1, 0 or 1 with the operand's sign; zeros and NaN stay as they are.
    Sign,
    /// The logical negation of truth values, or of each bit of integers.
    Not,
    /// Whether a floating-point number is neither infinite nor NaN.
    IsFinite,
}

impl UnaryOp {
    /// All functions.
    pub const ALL: [UnaryOp; 21] = [
        UnaryOp::Abs,
        UnaryOp::Negate,
        UnaryOp::Exp,
        UnaryOp::ExpMinusOne,
        UnaryOp::Log,
        UnaryOp::LogPlusOne,
        UnaryOp::Sqrt,
        UnaryOp::Rsqrt,
        UnaryOp::Cbrt,
        UnaryOp::Sine,
        UnaryOp::Cosine,
        UnaryOp::Tan,
        UnaryOp::Tanh,
        UnaryOp::Logistic,
        UnaryOp::Floor,
        UnaryOp::Ceil,
        UnaryOp::RoundNearestEven,
        UnaryOp::RoundNearestAwayFromZero,
        UnaryOp::Sign,
        UnaryOp::Not,
        UnaryOp::IsFinite,
    ];

    /// Returns the name in StableHLO, without the dialect.
    pub const fn name(self) -> &'static str {
        match self {
            UnaryOp::Abs => "abs",
            UnaryOp::Negate => "negate",
            UnaryOp::Exp => "exponential",
            UnaryOp::ExpMinusOne => "exponential_minus_one",
            UnaryOp::Log => "log",
            UnaryOp::LogPlusOne => "log_plus_one",
            UnaryOp::Sqrt => "sqrt",
            UnaryOp::Rsqrt => "rsqrt",
            UnaryOp::Cbrt => "cbrt",
            UnaryOp::Sine => "sine",
            UnaryOp::Cosine => "cosine",
            UnaryOp::Tan => "tan",
            UnaryOp::Tanh => "tanh",
            UnaryOp::Logistic => "logistic",
            UnaryOp::Floor => "floor",
            UnaryOp::Ceil => "ceil",
            UnaryOp::RoundNearestEven => "round_nearest_even",
            UnaryOp::RoundNearestAwayFromZero => "round_nearest_afz",
            UnaryOp::Sign => "sign",
            UnaryOp::Not => "not",
            UnaryOp::IsFinite => "is_finite",
        }
    }
}

/// A function of two elements of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BinaryOp {
    /// The sum; integers wrap around.
    Add,
    /// The difference; integers wrap around.
    Subtract,
    /// The product; integers wrap around.
    Multiply,
    /// The quotient; integers are rounded towards zero. Division of integers by zero is not defined.
    Divide,
    /// The remainder, with the sign of the first operand.
    Remainder,
    /// The first operand to the power of the second. For integers, powers with negative exponents are not defined, nor
    /// those with unsigned exponents from half the range on.
    Power,
    /// The larger one; NaN if either is NaN.
    Maximum,
    /// The smaller one; NaN if either is NaN.
    Minimum,
    /// The angle of the point with the first operand as its ordinate and the second as its abscissa, in radians.
    Atan2,
    /// Logical or bitwise conjunction.
    And,
    /// Logical or bitwise disjunction.
    Or,
    /// Logical or bitwise exclusive disjunction.
    Xor,
    /// The bits of the first operand, moved to higher places by the second one; 0 from the width on.
    ShiftLeft,
    /// The bits moved to lower places, filled with the sign.
    ShiftRightArithmetic,
    /// The bits moved to lower places, filled with zeros.
    ShiftRightLogical,
}

impl BinaryOp {
    /// All functions.
    pub const ALL: [BinaryOp; 15] = [
        BinaryOp::Add,
        BinaryOp::Subtract,
        BinaryOp::Multiply,
        BinaryOp::Divide,
        BinaryOp::Remainder,
        BinaryOp::Power,
        BinaryOp::Maximum,
        BinaryOp::Minimum,
        BinaryOp::Atan2,
        BinaryOp::And,
        BinaryOp::Or,
        BinaryOp::Xor,
        BinaryOp::ShiftLeft,
        BinaryOp::ShiftRightArithmetic,
        BinaryOp::ShiftRightLogical,
    ];

    /// Returns the name in StableHLO, without the dialect.
    pub const fn name(self) -> &'static str {
        match self {
            BinaryOp::Add => "add",
            BinaryOp::Subtract => "subtract",
            BinaryOp::Multiply => "multiply",
            BinaryOp::Divide => "divide",
            BinaryOp::Remainder => "remainder",
            BinaryOp::Power => "power",
            BinaryOp::Maximum => "maximum",
            BinaryOp::Minimum => "minimum",
            BinaryOp::Atan2 => "atan2",
            BinaryOp::And => "and",
            BinaryOp::Or => "or",
            BinaryOp::Xor => "xor",
            BinaryOp::ShiftLeft => "shift_left",
            BinaryOp::ShiftRightArithmetic => "shift_right_arithmetic",
            BinaryOp::ShiftRightLogical => "shift_right_logical",
        }
    }
}

/// The relation of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompareOp {
    /// Equal.
    Eq,
    /// Not equal.
    Ne,
    /// Less.
    Lt,
    /// Less or equal.
    Le,
    /// Greater.
    Gt,
    /// Greater or equal.
    Ge,
}

impl CompareOp {
    /// Returns the name in StableHLO.
    pub const fn name(self) -> &'static str {
        match self {
            CompareOp::Eq => "EQ",
            CompareOp::Ne => "NE",
            CompareOp::Lt => "LT",
            CompareOp::Le => "LE",
            CompareOp::Gt => "GT",
            CompareOp::Ge => "GE",
        }
    }
}

/// The function of two elements by which a reduction combines them.
///
/// XLA on CPUs keeps NaN in `Max` and `Min`, and in [`BinaryOp::Maximum`] and [`BinaryOp::Minimum`], only if it
/// compiles with the option `xla_cpu_enable_fast_min_max` set to false.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reducer {
    /// The sum of integers or floating-point numbers, from 0.
    Sum,
    /// The product of integers or floating-point numbers, from 1.
    Prod,
    /// The largest one, from the smallest value of the type (−∞, or false). NaN if any is NaN.
    Max,
    /// The smallest one, from the largest value of the type (∞, or true). NaN if any is NaN.
    Min,
    /// Logical or bitwise conjunction, from true or all ones.
    And,
    /// Logical or bitwise disjunction, from false or 0.
    Or,
}

impl Reducer {
    /// All functions.
    pub const ALL: [Reducer; 6] = [Reducer::Sum, Reducer::Prod, Reducer::Max, Reducer::Min, Reducer::And, Reducer::Or];

    /// Returns the function as an operation on two tensors.
    pub const fn binary(self) -> BinaryOp {
        match self {
            Reducer::Sum => BinaryOp::Add,
            Reducer::Prod => BinaryOp::Multiply,
            Reducer::Max => BinaryOp::Maximum,
            Reducer::Min => BinaryOp::Minimum,
            Reducer::And => BinaryOp::And,
            Reducer::Or => BinaryOp::Or,
        }
    }
}

/// The precision of multiplications on devices that have a choice.
///
/// TPUs multiply in bf16: `Default` rounds both factors to it, `High` and `Highest` use three and six passes. Others
/// compute in the type of the operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// The fastest.
    Default,
    /// More than the fastest.
    High,
    /// That of the operands' type.
    #[default]
    Highest,
}

impl Precision {
    /// Returns the name in StableHLO.
    pub const fn name(self) -> &'static str {
        match self {
            Precision::Default => "DEFAULT",
            Precision::High => "HIGH",
            Precision::Highest => "HIGHEST",
        }
    }
}

/// The algorithm of a random bit generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RngAlgorithm {
    /// ThreeFry-2x32 with 20 rounds. The state is `u64[2]`: key and counter.
    ThreeFry,
    /// Philox-4x32 with 10 rounds. The state is `u64[2]` or `u64[3]`: key and counter.
    Philox,
}

impl RngAlgorithm {
    /// Returns the name in StableHLO.
    pub const fn name(self) -> &'static str {
        match self {
            RngAlgorithm::ThreeFry => "THREE_FRY",
            RngAlgorithm::Philox => "PHILOX",
        }
    }
}

/// The order of a sort. Floating-point numbers are compared by IEEE 754's total order: −NaN, −∞, …, −0, 0, …, ∞, NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SortOrder {
    /// The smallest first.
    Ascending,
    /// The largest first.
    Descending,
}

/// The replicas among which a collective exchanges data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum CollectiveGroups {
    /// All replicas of the program, in order.
    #[default]
    All,
    /// Groups of one size, in which each replica occurs once. The order in a group is that of gathered parts.
    Groups(Vec<Vec<usize>>),
}

impl CollectiveGroups {
    /// Returns the groups of a program with this number of replicas.
    pub fn resolve(&self, replicas: usize) -> Vec<Vec<usize>> {
        match self {
            CollectiveGroups::All => vec![(0..replicas).collect()],
            CollectiveGroups::Groups(groups) => groups.clone(),
        }
    }
}
