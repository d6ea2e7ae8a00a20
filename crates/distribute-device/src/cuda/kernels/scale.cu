// Multiplies every element by a factor.
//
// T, WIDE, WIDEN, NARROW: as in reduce.cu.

#define LANES (16 / (int)sizeof(T))

typedef struct {
    T *values;
    u64 count;
    u64 vectors;
    f64 factor;
} ScaleParams;

typedef union {
    Vector vector;
    T lanes[LANES];
} Lanes;

KERNEL(scale, ScaleParams, 512)
{
    WIDE factor = (WIDE)p.factor;
    for (u64 at = FIRST_THREAD_OF_GRID; at < p.vectors; at += THREADS_OF_GRID) {
        Lanes both;
        both.vector = ((const Vector *)p.values)[at];
        for (int lane = 0; lane < LANES; lane++)
            both.lanes[lane] = NARROW(WIDEN(both.lanes[lane]) * factor);
        ((Vector *)p.values)[at] = both.vector;
    }
    for (u64 at = p.vectors * LANES + FIRST_THREAD_OF_GRID; at < p.count; at += THREADS_OF_GRID)
        p.values[at] = NARROW(WIDEN(p.values[at]) * factor);
}
