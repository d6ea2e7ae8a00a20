// Sums of squares of tensors in the table of tensors.cu.

/* Each block's sums of the squares of gradients: as they are, and divided by the loss scale. */
PHASED_KERNEL(square_sums, TensorParams, Gathered, PHASES, THREADS)
{
    Sums own = {0, 0};
    if (phase == 0) {
        Part part = part_of_block(p);
        f64 divisor = p->divisor;
        EACH(part, GRADIENT, 0, f64 given = (f64)g;
             f64 small = (f64)divided(g, divisor);
             own.first += given * given;
             own.second += small * small;);
    }
    gather(shared, phase, own, p->partial + blockIdx.x);
}

/* Each tensor's sums: one block adds up those of a tensor's blocks. */
PHASED_KERNEL(fold, TensorParams, Gathered, PHASES, THREADS)
{
    Sums own = {0, 0};
    if (phase == 0) {
        const Listed *tensor = &p->tensor[blockIdx.x];
        u64 blocks = (tensor->count + CHUNK - 1) / CHUNK;
        for (u64 at = threadIdx.x; at < blocks; at += THREADS)
            own = added(own, p->partial[tensor->first_block + at]);
    }
    gather(shared, phase, own, p->sums + blockIdx.x);
}
