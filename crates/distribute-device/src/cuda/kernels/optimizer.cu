// One step of an optimizer on all elements of many tensors.
//
// T: f32 or f64; ROOT: its square root; LEAST: its least normal number; CAPACITY: the number of tensors that one launch can list.

#define CHUNK 8192
#define LANES (16 / (int)sizeof(T))

typedef struct {
    T *parameter;
    const T *gradient;
    /* What the optimizer keeps; null where it keeps less. */
    T *first;
    T *second;
    u64 count;
    /* The first of the blocks that step this tensor, CHUNK elements each. */
    u32 first_block;
    /* Whether all four begin at multiples of 16 bytes. */
    u32 aligned;
} Stepped;

typedef struct {
    /* FACTORS of them, in f64; each is rounded to T once. */
    f64 factors[8];
    u32 tensors;
    Stepped tensor[CAPACITY];
} StepParams;

typedef union {
    Vector vector;
    T lanes[LANES];
} Lanes;

/* Zero for a subnormal number, as on the CPU. */
#define FLUSHED(x) ((x) < LEAST && (x) > -LEAST ? (T)0 : (x))

/* Runs ELEMENT on `w`, `g`, `a` and `b`: parameter, gradient and what is kept. SLOTS says how much is. */
#define STEP(name, SLOTS, FACTORS, ELEMENT)                                                     \
    KERNEL(name, StepParams, 512)                                                               \
    {                                                                                           \
        u32 low = 0, high = p.tensors;                                                          \
        while (high - low > 1) {                                                                \
            u32 middle = (low + high) / 2;                                                      \
            if (p.tensor[middle].first_block <= blockIdx.x)                                     \
                low = middle;                                                                   \
            else                                                                                \
                high = middle;                                                                  \
        }                                                                                       \
        T *parameter = p.tensor[low].parameter, *first = p.tensor[low].first;                   \
        T *second = p.tensor[low].second;                                                       \
        const T *gradient = p.tensor[low].gradient;                                             \
        u64 begin = (u64)(blockIdx.x - p.tensor[low].first_block) * CHUNK, end = begin + CHUNK; \
        if (end > p.tensor[low].count)                                                          \
            end = p.tensor[low].count;                                                          \
        u64 whole = p.tensor[low].aligned ? end / LANES * LANES : begin;                        \
        FACTORS                                                                                 \
        for (u64 at = begin / LANES + threadIdx.x; at < whole / LANES; at += blockDim.x) {      \
            Lanes weights, gradients, firsts, seconds;                                          \
            weights.vector = ((const Vector *)parameter)[at];                                   \
            gradients.vector = ((const Vector *)gradient)[at];                                  \
            if (SLOTS > 0)                                                                      \
                firsts.vector = ((const Vector *)first)[at];                                    \
            if (SLOTS > 1)                                                                      \
                seconds.vector = ((const Vector *)second)[at];                                  \
            for (int lane = 0; lane < LANES; lane++) {                                          \
                T w = weights.lanes[lane], g = gradients.lanes[lane];                           \
                T a = SLOTS > 0 ? firsts.lanes[lane] : 0, b = SLOTS > 1 ? seconds.lanes[lane] : 0; \
                ELEMENT                                                                         \
                weights.lanes[lane] = w, firsts.lanes[lane] = a, seconds.lanes[lane] = b;       \
            }                                                                                   \
            ((Vector *)parameter)[at] = weights.vector;                                         \
            if (SLOTS > 0)                                                                      \
                ((Vector *)first)[at] = firsts.vector;                                          \
            if (SLOTS > 1)                                                                      \
                ((Vector *)second)[at] = seconds.vector;                                        \
        }                                                                                       \
        for (u64 at = whole + threadIdx.x; at < end; at += blockDim.x) {                        \
            T w = parameter[at], g = gradient[at];                                              \
            T a = SLOTS > 0 ? first[at] : 0, b = SLOTS > 1 ? second[at] : 0;                    \
            ELEMENT                                                                             \
            parameter[at] = w;                                                                  \
            if (SLOTS > 0)                                                                      \
                first[at] = a;                                                                  \
            if (SLOTS > 1)                                                                      \
                second[at] = b;                                                                 \
        }                                                                                       \
    }

#define SGD_FACTORS T lr = (T)p.factors[0], momentum = (T)p.factors[1];

STEP(sgd, 0, T lr = (T)p.factors[0];, w -= lr * g; a = 0; b = 0;)
STEP(sgd_momentum, 1, SGD_FACTORS, a = momentum * a - lr * g; a = FLUSHED(a); w += a; b = 0;)
STEP(sgd_nesterov, 1, SGD_FACTORS, a = momentum * a - lr * g; a = FLUSHED(a); w += momentum * a - lr * g; b = 0;)

/* Bias corrections are the same for all elements, so they are in the rate and the scale. */
#define ADAM_FACTORS                                                                            \
    T rate = (T)p.factors[0], scale = (T)p.factors[1], keep = (T)p.factors[2];                  \
    T beta1 = (T)p.factors[3], rest1 = (T)p.factors[4];                                         \
    T beta2 = (T)p.factors[5], rest2 = (T)p.factors[6], epsilon = (T)p.factors[7];

STEP(adam, 2, ADAM_FACTORS, a = beta1 * a + rest1 * g; a = FLUSHED(a);
     b = beta2 * b + rest2 * g * g; b = FLUSHED(b);
     w = w * keep - rate * a / (ROOT(b * scale) + epsilon);)
