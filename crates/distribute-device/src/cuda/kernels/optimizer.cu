// One step of an optimizer on all elements of many tensors, in the table of tensors.cu.

/* Zero for a subnormal number, as on the CPU. */
#define FLUSHED(x) ((x) < LEAST && (x) > -LEAST ? (T)0 : (x))

/* Runs ELEMENT on each element of gradients as they are limited, parameters and slots. */
#define STEP(name, SLOTS, FACTORS, ELEMENT)                                                     \
    KERNEL(name, TensorParams, THREADS)                                                         \
    {                                                                                           \
        Part part = part_of_block(&p);                                                          \
        Limit limit = limit_of(&p, part.tensor);                                                \
        FACTORS                                                                                 \
        EACH(part, PARAMETER | GRADIENT | (SLOTS), PARAMETER | (SLOTS), g = limited(g, limit); ELEMENT);               \
    }

#define SGD_FACTORS T lr = (T)p.factors[0], momentum = (T)p.factors[1];

STEP(sgd, 0, T lr = (T)p.factors[0];, w -= lr * g;)
STEP(sgd_momentum, FIRST, SGD_FACTORS, a = momentum * a - lr * g; a = FLUSHED(a); w += a;)
STEP(sgd_nesterov, FIRST, SGD_FACTORS, a = momentum * a - lr * g; a = FLUSHED(a); w += momentum * a - lr * g;)

/* Bias corrections are the same for all elements, so they are in the rate and the scale. */
#define ADAM_FACTORS                                                                            \
    T rate = (T)p.factors[0], scale = (T)p.factors[1], keep = (T)p.factors[2];                  \
    T beta1 = (T)p.factors[3], rest1 = (T)p.factors[4];                                         \
    T beta2 = (T)p.factors[5], rest2 = (T)p.factors[6], epsilon = (T)p.factors[7];

STEP(adam, FIRST | SECOND, ADAM_FACTORS, a = beta1 * a + rest1 * g; a = FLUSHED(a);
     b = beta2 * b + rest2 * g * g; b = FLUSHED(b);
     w = w * keep - rate * a / (ROOT(b * scale) + epsilon);)

STEP(adagrad, FIRST, T lr = (T)p.factors[0]; T epsilon = (T)p.factors[1];, a += g * g; w -= lr * g / ROOT(a + epsilon);)

#define RMS_FACTORS                                                                             \
    T lr = (T)p.factors[0], rho = (T)p.factors[1], fresh = (T)p.factors[2];                     \
    T epsilon = (T)p.factors[3];

#define RMS_MOMENTUM RMS_FACTORS T momentum = (T)p.factors[4];

/* The mean square in `a`; the mean of gradients in the next slot if there is one; then the momentum. */
#define SPREAD a = rho * a + fresh * g * g; a = FLUSHED(a);
/* Rounding can make this variance slightly negative if gradients hardly change. */
#define VARIANCE                                                                                \
    b = rho * b + fresh * g;                                                                    \
    b = FLUSHED(b);                                                                             \
    T variance = a - b * b;                                                                     \
    variance = variance < 0 ? (T)0 : variance;

STEP(rms_prop, FIRST, RMS_FACTORS, SPREAD w -= lr * g / ROOT(a + epsilon);)
STEP(rms_prop_centered, FIRST | SECOND, RMS_FACTORS, SPREAD VARIANCE w -= lr * g / ROOT(variance + epsilon);)
STEP(rms_prop_momentum, FIRST | SECOND, RMS_MOMENTUM, SPREAD
     b = momentum * b + lr * g / ROOT(a + epsilon); b = FLUSHED(b); w -= b;)
STEP(rms_prop_centered_momentum, FIRST | SECOND | THIRD, RMS_MOMENTUM, SPREAD VARIANCE
     c = momentum * c + lr * g / ROOT(variance + epsilon); c = FLUSHED(c); w -= c;)

#define ADADELTA_FACTORS                                                                        \
    T lr = (T)p.factors[0], rho = (T)p.factors[1], fresh = (T)p.factors[2];                     \
    T epsilon = (T)p.factors[3];

STEP(adadelta, FIRST | SECOND, ADADELTA_FACTORS, SPREAD
     T change = ROOT(b + epsilon) / ROOT(a + epsilon) * g;
     b = rho * b + fresh * change * change; b = FLUSHED(b); w -= lr * change;)

#define ADAMAX_FACTORS                                                                          \
    T rate = (T)p.factors[0], beta1 = (T)p.factors[1], rest1 = (T)p.factors[2];                 \
    T beta2 = (T)p.factors[3], epsilon = (T)p.factors[4];

STEP(adamax, FIRST | SECOND, ADAMAX_FACTORS, a = beta1 * a + rest1 * g; a = FLUSHED(a);
     T decayed = beta2 * b; decayed = FLUSHED(decayed);
     T size = g < 0 ? (T)0 - g : g;
     b = decayed > size ? decayed : size; w -= rate * a / (b + epsilon);)

#define NADAM_FACTORS                                                                           \
    T of_moment = (T)p.factors[0], of_gradient = (T)p.factors[1], scale = (T)p.factors[2];      \
    T beta1 = (T)p.factors[3], rest1 = (T)p.factors[4];                                         \
    T beta2 = (T)p.factors[5], rest2 = (T)p.factors[6], epsilon = (T)p.factors[7];

STEP(nadam, FIRST | SECOND, NADAM_FACTORS, a = beta1 * a + rest1 * g; a = FLUSHED(a);
     b = beta2 * b + rest2 * g * g; b = FLUSHED(b);
     w -= (of_moment * a + of_gradient * g) / (ROOT(b * scale) + epsilon);)

#define FTRL_FACTORS                                                                            \
    T lr = (T)p.factors[0], l1 = (T)p.factors[1];                                               \
    T shrinkage = (T)p.factors[2], flat = (T)p.factors[3];

STEP(ftrl, FIRST | SECOND, FTRL_FACTORS, T before = ROOT(a); a += g * g;
     T after = ROOT(a);
     b += g + shrinkage * w - (after - before) / lr * w;
     T below = (T)0 - l1;
     T clipped = b > l1 ? l1 : b < below ? below : b;
     w = (clipped - b) / (after / lr + flat);)

#define DIRECTION(w, a, b) ((a) * scale1 / (ROOT((b) * scale2) + epsilon) + decay * (w))

/* The moments of LAMB, and each block's sums of squares of parameters and of directions. */
PHASED_KERNEL(lamb_moments, TensorParams, Gathered, PHASES, THREADS)
{
    Sums own = {0, 0};
    if (phase == 0) {
        Part part = part_of_block(p);
        Limit limit = limit_of(p, part.tensor);
        T scale1 = (T)p->factors[0], scale2 = (T)p->factors[1], epsilon = (T)p->factors[2], decay = (T)p->factors[3];
        T beta1 = (T)p->factors[4], rest1 = (T)p->factors[5];
        T beta2 = (T)p->factors[6], rest2 = (T)p->factors[7];
        EACH(part, PARAMETER | GRADIENT | FIRST | SECOND, FIRST | SECOND, g = limited(g, limit);
             a = beta1 * a + rest1 * g; a = FLUSHED(a);
             b = beta2 * b + rest2 * g * g; b = FLUSHED(b);
             f64 towards = (f64)DIRECTION(w, a, b);
             own.first += (f64)w * (f64)w;
             own.second += towards * towards;);
    }
    gather(shared, phase, own, p->partial + blockIdx.x);
}

/* The step of LAMB, whose length each tensor's sums of squares decide. */
KERNEL(lamb, TensorParams, THREADS)
{
    Part part = part_of_block(&p);
    Sums squares = p.sums[part.tensor];
    T scale1 = (T)p.factors[0], scale2 = (T)p.factors[1], epsilon = (T)p.factors[2], decay = (T)p.factors[3];
    f64 ratio = squares.first > 0 && squares.second > 0 ? sqrt(squares.first / squares.second) : 1;
    T rate = (T)(p.factors[4] * ratio);
    EACH(part, PARAMETER | FIRST | SECOND, PARAMETER, w -= rate * DIRECTION(w, a, b););
}
