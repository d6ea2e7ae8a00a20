// One step of an optimizer on all elements of a bucket.
//
// T: f32 or f64; ROOT: its square root.

#define LANES (16 / (int)sizeof(T))

typedef struct {
    T *parameter;
    const T *gradient;
    /* What the optimizer keeps; null where it keeps less. */
    T *first;
    T *second;
    u64 count;
    u64 vectors;
    f64 factors[6];
} StepParams;

typedef union {
    Vector vector;
    T lanes[LANES];
} Lanes;

/* Runs ELEMENT on `w`, `g`, `a` and `b`: parameter, gradient and what is kept. SLOTS says how much is. */
#define STEP(name, SLOTS, FACTORS, ELEMENT)                                                     \
    KERNEL(name, StepParams, 512)                                                               \
    {                                                                                           \
        FACTORS                                                                                 \
        for (u64 at = FIRST_THREAD_OF_GRID; at < p.vectors; at += THREADS_OF_GRID) {            \
            Lanes weights, gradients, firsts, seconds;                                          \
            weights.vector = ((const Vector *)p.parameter)[at];                                 \
            gradients.vector = ((const Vector *)p.gradient)[at];                                \
            if (SLOTS > 0)                                                                      \
                firsts.vector = ((const Vector *)p.first)[at];                                  \
            if (SLOTS > 1)                                                                      \
                seconds.vector = ((const Vector *)p.second)[at];                                \
            for (int lane = 0; lane < LANES; lane++) {                                          \
                T w = weights.lanes[lane], g = gradients.lanes[lane];                           \
                T a = SLOTS > 0 ? firsts.lanes[lane] : 0, b = SLOTS > 1 ? seconds.lanes[lane] : 0; \
                ELEMENT                                                                         \
                weights.lanes[lane] = w, firsts.lanes[lane] = a, seconds.lanes[lane] = b;       \
            }                                                                                   \
            ((Vector *)p.parameter)[at] = weights.vector;                                       \
            if (SLOTS > 0)                                                                      \
                ((Vector *)p.first)[at] = firsts.vector;                                        \
            if (SLOTS > 1)                                                                      \
                ((Vector *)p.second)[at] = seconds.vector;                                      \
        }                                                                                       \
        u64 rest = p.vectors * LANES + FIRST_THREAD_OF_GRID;                                    \
        for (; rest < p.count; rest += THREADS_OF_GRID) {                                       \
            T w = p.parameter[rest], g = p.gradient[rest];                                      \
            T a = SLOTS > 0 ? p.first[rest] : 0, b = SLOTS > 1 ? p.second[rest] : 0;            \
            ELEMENT                                                                             \
            p.parameter[rest] = w;                                                              \
            if (SLOTS > 0)                                                                      \
                p.first[rest] = a;                                                              \
            if (SLOTS > 1)                                                                      \
                p.second[rest] = b;                                                             \
        }                                                                                       \
    }

#define SGD_FACTORS T lr = (T)p.factors[0], momentum = (T)p.factors[1];

STEP(sgd, 0, T lr = (T)p.factors[0];, w -= lr * g; a = 0; b = 0;)
STEP(sgd_momentum, 1, SGD_FACTORS, a = momentum * a - lr * g; w += a; b = 0;)
STEP(sgd_nesterov, 1, SGD_FACTORS, a = momentum * a - lr * g; w += momentum * a - lr * g; b = 0;)

/* Bias corrections are the same for all elements, so they are in the rate and the scale. */
#define ADAM_FACTORS                                                                            \
    T rate = (T)p.factors[0], scale = (T)p.factors[1], keep = (T)p.factors[2];                  \
    T beta1 = (T)p.factors[3], beta2 = (T)p.factors[4], epsilon = (T)p.factors[5], one = (T)1;

STEP(adam, 2, ADAM_FACTORS, a = beta1 * a + (one - beta1) * g; b = beta2 * b + (one - beta2) * g * g;
     w = w * keep - rate * a / (ROOT(b * scale) + epsilon);)
