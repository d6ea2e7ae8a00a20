// Rounds values to 16 bits, and keeps the rounding error, which is added to the next values (error feedback).
//
// T, NARROW, WIDEN: the 16-bit type and its conversions.

typedef struct {
    const f32 *values;
    const f32 *before;
    f32 *left;
    T *sent;
    u64 count;
} RoundOffParams;

KERNEL(round_off, RoundOffParams, 512)
{
    for (u64 at = FIRST_THREAD_OF_GRID; at < p.count; at += THREADS_OF_GRID) {
        f32 value = p.before[at] + p.values[at];
        T sent = NARROW(value);
        f32 left = value - WIDEN(sent);
        /* Infinity and NaN are sent once; they are not kept as an error. */
        p.left[at] = left - left == 0 ? left : 0;
        p.sent[at] = sent;
    }
}
