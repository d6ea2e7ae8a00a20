// Combines up to 16 buffers, element by element and in their order, and stores the result in up to 16 buffers.
//
// T: the element type; WIDE: the type of the computation; WIDEN, NARROW: conversions between the two; SUM, PRODUCT: of
// two WIDEs; DIVIDE: of a WIDE by a count.

#define BUFFERS 16
#define LANES (16 / (int)sizeof(T))

typedef struct {
    const T *sources[BUFFERS];
    T *destinations[BUFFERS];
    u64 count;
    /* How many vectors of the beginning are loaded whole: none where a buffer is not aligned. */
    u64 vectors;
    u32 source_count;
    u32 destination_count;
    /* By what the result is divided; 1 leaves it as it is. */
    u32 divisor;
} ReduceParams;

typedef union {
    Vector vector;
    T lanes[LANES];
} Lanes;

#define MINIMUM(a, b) ((a) != (a) || (a) < (b) ? (a) : (b))
#define MAXIMUM(a, b) ((a) != (a) || (a) > (b) ? (a) : (b))
#define FINISHED(value) NARROW((WIDE)(p.divisor == 1 ? (value) : DIVIDE(value, p.divisor)))

#define REDUCE(name, COMBINE)                                                                   \
    KERNEL(name, ReduceParams, 512)                                                             \
    {                                                                                           \
        for (u64 at = FIRST_THREAD_OF_GRID; at < p.vectors; at += THREADS_OF_GRID) {            \
            WIDE wide[LANES];                                                                   \
            Lanes loaded, result;                                                               \
            loaded.vector = ((const Vector *)p.sources[0])[at];                                 \
            for (int lane = 0; lane < LANES; lane++)                                            \
                wide[lane] = WIDEN(loaded.lanes[lane]);                                         \
            UNROLLED for (u32 source = 1; source < p.source_count; source++) {                  \
                loaded.vector = ((const Vector *)p.sources[source])[at];                        \
                for (int lane = 0; lane < LANES; lane++)                                        \
                    wide[lane] = (WIDE)COMBINE(wide[lane], WIDEN(loaded.lanes[lane]));          \
            }                                                                                   \
            for (int lane = 0; lane < LANES; lane++)                                            \
                result.lanes[lane] = FINISHED(wide[lane]);                                      \
            for (u32 destination = 0; destination < p.destination_count; destination++)         \
                ((Vector *)p.destinations[destination])[at] = result.vector;                    \
        }                                                                                       \
        u64 rest = p.vectors * LANES + FIRST_THREAD_OF_GRID;                                    \
        for (; rest < p.count; rest += THREADS_OF_GRID) {                                       \
            WIDE wide = WIDEN(p.sources[0][rest]);                                              \
            for (u32 source = 1; source < p.source_count; source++)                             \
                wide = (WIDE)COMBINE(wide, WIDEN(p.sources[source][rest]));                     \
            for (u32 destination = 0; destination < p.destination_count; destination++)         \
                p.destinations[destination][rest] = FINISHED(wide);                             \
        }                                                                                       \
    }

#ifdef DISTRIBUTE_SIMULATED
#define UNROLLED
#else
#define UNROLLED _Pragma("unroll 8")
#endif

REDUCE(reduce_sum, SUM)
REDUCE(reduce_product, PRODUCT)
REDUCE(reduce_min, MINIMUM)
REDUCE(reduce_max, MAXIMUM)
