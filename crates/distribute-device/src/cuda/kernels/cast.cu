// Converts between floating-point types, rounding to nearest.
//
// T, WIDE, WIDEN: types and conversion of the source; TARGET, TARGET_WIDE, TARGET_NARROW: those of the destination.

#define PER_THREAD 4

typedef struct {
    const T *source;
    TARGET *destination;
    u64 count;
    /* How many groups of PER_THREAD elements of the beginning are loaded and stored whole. */
    u64 vectors;
} CastParams;

typedef struct ALIGNED(PER_THREAD * sizeof(T)) {
    T lanes[PER_THREAD];
} Source;

typedef struct ALIGNED(PER_THREAD * sizeof(TARGET)) {
    TARGET lanes[PER_THREAD];
} Target;

KERNEL(cast, CastParams, 512)
{
    for (u64 at = FIRST_THREAD_OF_GRID; at < p.vectors; at += THREADS_OF_GRID) {
        Source from = ((const Source *)p.source)[at];
        Target to;
        for (int lane = 0; lane < PER_THREAD; lane++)
            to.lanes[lane] = TARGET_NARROW((TARGET_WIDE)WIDEN(from.lanes[lane]));
        ((Target *)p.destination)[at] = to;
    }
    for (u64 at = p.vectors * PER_THREAD + FIRST_THREAD_OF_GRID; at < p.count; at += THREADS_OF_GRID)
        p.destination[at] = TARGET_NARROW((TARGET_WIDE)WIDEN(p.source[at]));
}
