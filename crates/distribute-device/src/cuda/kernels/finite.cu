// Sets a flag if a value is infinite or NaN, by examining its bits.
//
// BITS: an unsigned integer of an element's size; EXPONENT: the bits that are all set in such a value.

#define LANES (16 / (int)sizeof(BITS))

typedef struct {
    const BITS *values;
    u32 *flag;
    u64 count;
    u64 vectors;
} FiniteParams;

typedef union {
    Vector vector;
    BITS lanes[LANES];
} Lanes;

#define IS_FINITE(bits) (((bits) & EXPONENT) != EXPONENT)

KERNEL(flag_non_finite, FiniteParams, 512)
{
    u32 found = 0;
    for (u64 at = FIRST_THREAD_OF_GRID; at < p.vectors; at += THREADS_OF_GRID) {
        Lanes loaded;
        loaded.vector = ((const Vector *)p.values)[at];
        for (int lane = 0; lane < LANES; lane++)
            found |= !IS_FINITE(loaded.lanes[lane]);
    }
    for (u64 at = p.vectors * LANES + FIRST_THREAD_OF_GRID; at < p.count; at += THREADS_OF_GRID)
        found |= !IS_FINITE(p.values[at]);
    if (found)
        atomicOr(p.flag, 1);
}
