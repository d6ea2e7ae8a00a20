// A table of tensors that one launch works on, and sums over them in an order that is always the same.
//
// T: f32 or f64; ROOT: its square root; LEAST: its least normal number; CAPACITY: the number of tensors that one launch
// can list.

#define THREADS 512
#define CHUNK 8192
#define LANES (16 / (int)sizeof(T))

/* Two sums over the same elements. */
typedef struct {
    f64 first;
    f64 second;
} Sums;

typedef struct {
    T *parameter;
    const T *gradient;
    /* What the optimizer keeps; null where it keeps less. */
    T *slots[3];
    u64 count;
    /* The first of the blocks that work on this tensor, CHUNK elements each. */
    u32 first_block;
    /* Whether all of them begin at multiples of 16 bytes. */
    u32 aligned;
} Listed;

typedef struct {
    /* FACTORS of them, in f64; each is rounded to T once. */
    f64 factors[8];
    /* The loss scale that gradients are divided by. */
    f64 divisor;
    f64 limit;
    /* A sum of squares that is added to the one in `squares`. */
    f64 others;
    /* The squares of norms: one for each tensor, or one for all of them if `stride` is 0. */
    const Sums *squares;
    /* The sums of each block, and of each tensor. */
    Sums *partial;
    Sums *sums;
    u32 stride;
    /* One of KEEP, CLAMP and SHRINK. */
    u32 limiting;
    u32 tensors;
    Listed tensor[CAPACITY];
} TensorParams;

typedef union {
    Vector vector;
    T lanes[LANES];
} Lanes;

/* The elements of one tensor that one block works on. */
typedef struct {
    const Listed *of;
    /* The place of the tensor in the table. */
    u32 tensor;
    u64 begin;
    u64 end;
    /* Up to where vectors are loaded whole. */
    u64 whole;
} Part;

FUNCTION Part part_of_block(const TensorParams *p)
{
    u32 low = 0, high = p->tensors;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (p->tensor[middle].first_block <= blockIdx.x)
            low = middle;
        else
            high = middle;
    }
    Part part;
    part.of = &p->tensor[low];
    part.tensor = low;
    part.begin = (u64)(blockIdx.x - part.of->first_block) * CHUNK;
    part.end = part.begin + CHUNK < part.of->count ? part.begin + CHUNK : part.of->count;
    part.whole = part.of->aligned ? part.end / LANES * LANES : part.begin;
    return part;
}

#define PARAMETER 1
#define GRADIENT 2
#define FIRST 4
#define SECOND 8
#define THIRD 16

/* Runs ELEMENT on `w`, `g`, `a`, `b` and `c`: parameter, gradient and slots. LOADS and STORES say which of them. */
#define EACH(part, LOADS, STORES, ELEMENT)                                                      \
    do {                                                                                        \
        T *w_ = (part).of->parameter, *a_ = (part).of->slots[0];                                \
        T *b_ = (part).of->slots[1], *c_ = (part).of->slots[2];                                 \
        const T *g_ = (part).of->gradient;                                                      \
        for (u64 at = (part).begin / LANES + threadIdx.x; at < (part).whole / LANES; at += THREADS) { \
            Lanes ws, gs, as, bs, cs;                                                           \
            LOAD_VECTOR(LOADS, PARAMETER, ws, w_)                                               \
            LOAD_VECTOR(LOADS, GRADIENT, gs, g_)                                                \
            LOAD_VECTOR(LOADS, FIRST, as, a_)                                                   \
            LOAD_VECTOR(LOADS, SECOND, bs, b_)                                                  \
            LOAD_VECTOR(LOADS, THIRD, cs, c_)                                                   \
            for (int lane = 0; lane < LANES; lane++) {                                          \
                T w = ws.lanes[lane], g = gs.lanes[lane], a = as.lanes[lane], b = bs.lanes[lane]; \
                T c = cs.lanes[lane];                                                           \
                ELEMENT                                                                         \
                ws.lanes[lane] = w, gs.lanes[lane] = g, as.lanes[lane] = a, bs.lanes[lane] = b; \
                cs.lanes[lane] = c;                                                             \
            }                                                                                   \
            STORE_VECTOR(STORES, PARAMETER, ws, w_)                                             \
            STORE_VECTOR(STORES, FIRST, as, a_)                                                 \
            STORE_VECTOR(STORES, SECOND, bs, b_)                                                \
            STORE_VECTOR(STORES, THIRD, cs, c_)                                                 \
        }                                                                                       \
        for (u64 at = (part).whole + threadIdx.x; at < (part).end; at += THREADS) {             \
            T w = (LOADS) & PARAMETER ? w_[at] : 0, g = (LOADS) & GRADIENT ? g_[at] : 0;        \
            T a = (LOADS) & FIRST ? a_[at] : 0, b = (LOADS) & SECOND ? b_[at] : 0;              \
            T c = (LOADS) & THIRD ? c_[at] : 0;                                                 \
            ELEMENT                                                                             \
            STORE(STORES, PARAMETER, w_[at], w)                                                 \
            STORE(STORES, FIRST, a_[at], a)                                                     \
            STORE(STORES, SECOND, b_[at], b)                                                    \
            STORE(STORES, THIRD, c_[at], c)                                                     \
            (void)g;                                                                            \
        }                                                                                       \
    } while (0)

#define LOAD_VECTOR(LOADS, bit, lanes_, from)                                                   \
    if ((LOADS) & (bit))                                                                        \
        lanes_.vector = ((const Vector *)(from))[at];                                           \
    else                                                                                        \
        for (int lane = 0; lane < LANES; lane++)                                                \
            lanes_.lanes[lane] = 0;
#define STORE_VECTOR(STORES, bit, lanes_, to)                                                   \
    if ((STORES) & (bit))                                                                       \
        ((Vector *)(to))[at] = lanes_.vector;
#define STORE(STORES, bit, to, value)                                                           \
    if ((STORES) & (bit))                                                                       \
        (to) = (value);

/* How gradients are limited. */
#define KEEP 0
#define CLAMP 1
#define SHRINK 2

/* The limit for one tensor, after norms were looked at. */
typedef struct {
    u32 limiting;
    f64 divisor;
    f64 limit;
    f64 factor;
} Limit;

FUNCTION Limit limit_of(const TensorParams *p, u32 tensor)
{
    Limit limit;
    limit.limiting = p->limiting;
    limit.divisor = p->divisor;
    limit.limit = p->limit;
    limit.factor = 1;
    if (limit.limiting == SHRINK) {
        f64 norm = sqrt(p->squares[(u64)tensor * p->stride].second + p->others);
        limit.limiting = norm > p->limit ? SHRINK : KEEP;
        limit.factor = p->limit / norm;
    }
    return limit;
}

/* As on the CPU, each change is computed in f64 and rounded. */
FUNCTION T divided(T g, f64 divisor)
{
    return divisor == 1 ? g : (T)((f64)g / divisor);
}

FUNCTION T limited(T g, Limit limit)
{
    g = divided(g, limit.divisor);
    if (limit.limiting == CLAMP) {
        f64 wide = g;
        return (T)(wide < -limit.limit ? -limit.limit : wide > limit.limit ? limit.limit : wide);
    }
    return limit.limiting == SHRINK ? (T)((f64)g * limit.factor) : g;
}

#define ROWS 16
#define PHASES 3

typedef struct {
    Sums threads[THREADS];
    Sums rows[ROWS];
} Gathered;

FUNCTION Sums added(Sums a, Sums b)
{
    a.first += b.first;
    a.second += b.second;
    return a;
}

/* Adds up the sums of all threads of a block, in three phases. Thread 0 stores the result in the last one. */
FUNCTION void gather(Gathered *shared, u32 phase, Sums own, Sums *result)
{
    Sums sum = {0, 0};
    if (phase == 0) {
        shared->threads[threadIdx.x] = own;
    } else if (phase == 1 && threadIdx.x < ROWS) {
        for (u32 thread = threadIdx.x; thread < THREADS; thread += ROWS)
            sum = added(sum, shared->threads[thread]);
        shared->rows[threadIdx.x] = sum;
    } else if (phase == 2 && threadIdx.x == 0) {
        for (u32 row = 0; row < ROWS; row++)
            sum = added(sum, shared->rows[row]);
        *result = sum;
    }
}
