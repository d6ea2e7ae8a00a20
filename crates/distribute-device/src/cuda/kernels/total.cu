// The sum of the sums of squares of all tensors, and whether they are finite; follows tensors.cu.

typedef struct {
    const Sums *sums;
    Sums *total;
    u64 count;
} TotalParams;

/* A single block counts the first sums that are not finite, and adds up the second ones. */
PHASED_KERNEL(total, TotalParams, Gathered, PHASES, THREADS)
{
    Sums own = {0, 0};
    if (phase == 0) {
        for (u64 at = threadIdx.x; at < p->count; at += THREADS) {
            own.first += p->sums[at].first - p->sums[at].first == 0 ? 0 : 1;
            own.second += p->sums[at].second;
        }
    }
    gather(shared, phase, own, p->total);
}
