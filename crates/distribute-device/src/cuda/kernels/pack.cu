// Copies between many tensors and one bucket in one launch.
//
// CAPACITY: the number of tensors that one launch can list.

#define CHUNK_BYTES 32768

typedef struct {
    u8 *tensor;
    u64 bucket_offset;
    u64 bytes;
} Piece;

typedef struct {
    u8 *bucket;
    /* Where in the bucket the first block begins: at a multiple of CHUNK_BYTES from there begins the next. */
    u64 start;
    u32 pieces;
    /* In the order of their offsets. */
    Piece piece[CAPACITY];
} PackParams;

#define COPY(Unit, from, to, bytes)                                                             \
    for (u64 at = threadIdx.x; at < (bytes) / sizeof(Unit); at += blockDim.x)                   \
    ((Unit *)(to))[at] = ((const Unit *)(from))[at]

#define ALL_ALIGNED(from, to, bytes, unit) ((((u64)(from) | (u64)(to) | (bytes)) & ((unit) - 1)) == 0)

/* The threads of one block copy together. */
#define COPY_BYTES(from, to, bytes)                                                             \
    do {                                                                                        \
        u64 whole = (bytes) & ~(u64)15;                                                         \
        if (ALL_ALIGNED(from, to, whole, 16)) {                                                 \
            COPY(Vector, from, to, whole);                                                      \
            COPY(u8, (from) + whole, (to) + whole, (bytes) - whole);                            \
        } else if (ALL_ALIGNED(from, to, bytes, 4)) {                                           \
            COPY(u32, from, to, bytes);                                                         \
        } else {                                                                                \
            COPY(u8, from, to, bytes);                                                          \
        }                                                                                       \
    } while (0)

/* FROM and TO are in terms of the bucket's part and the tensor's part. */
#define PACK(name, FROM, TO)                                                                    \
    KERNEL(name, PackParams, 512)                                                               \
    {                                                                                           \
        u64 begin = p.start + (u64)blockIdx.x * CHUNK_BYTES;                                    \
        u64 end = begin + CHUNK_BYTES;                                                          \
        u32 low = 0, high = p.pieces;                                                           \
        while (low < high) {                                                                    \
            u32 middle = (low + high) / 2;                                                      \
            if (p.piece[middle].bucket_offset + p.piece[middle].bytes > begin)                  \
                high = middle;                                                                  \
            else                                                                                \
                low = middle + 1;                                                               \
        }                                                                                       \
        for (; low < p.pieces && p.piece[low].bucket_offset < end; low++) {                     \
            u64 offset = p.piece[low].bucket_offset;                                            \
            u64 from = offset > begin ? offset : begin;                                         \
            u64 to = offset + p.piece[low].bytes < end ? offset + p.piece[low].bytes : end;     \
            u8 *in_bucket = p.bucket + from;                                                    \
            u8 *in_tensor = p.piece[low].tensor + (from - offset);                              \
            COPY_BYTES(FROM, TO, to - from);                                                    \
        }                                                                                       \
    }

PACK(pack, in_tensor, in_bucket)
PACK(unpack, in_bucket, in_tensor)
