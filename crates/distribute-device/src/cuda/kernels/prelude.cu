// Written in the common subset of C and CUDA C++, so that the same text runs on GPUs and, in tests, on the CPU.
// Each kernel takes one structure by value. There are no includes, since NVRTC has no headers.

#ifndef KERNEL
#define KERNEL(name, Params, threads) \
    extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Params p)
#endif

#ifdef DISTRIBUTE_SIMULATED
#define FUNCTION static inline
#define ALIGNED(bytes) __attribute__((aligned(bytes)))
#else
#define FUNCTION static __device__ __forceinline__
#define ALIGNED(bytes) __align__(bytes)
#endif

/* A kernel whose threads wait for each other between phases. BODY is a function of `p` and `shared`, pointers to the
   parameters and to memory that the threads of a block share, and of `phase`. */
#ifndef PHASED_KERNEL
#define PHASED_KERNEL(name, Params, Shared, phases, threads)                                    \
    FUNCTION void name##_phase(const Params *p, Shared *shared, unsigned int phase);            \
    KERNEL(name, Params, threads)                                                               \
    {                                                                                           \
        __shared__ Shared shared;                                                               \
        for (unsigned int phase = 0; phase < (phases); phase++) {                               \
            if (phase > 0)                                                                      \
                __syncthreads();                                                                \
            name##_phase(&p, &shared, phase);                                                   \
        }                                                                                       \
    }                                                                                           \
    FUNCTION void name##_phase(const Params *p, Shared *shared, unsigned int phase)
#endif

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

/* What one thread loads or stores at once. */
typedef struct ALIGNED(16) {
    u32 words[4];
} Vector;

FUNCTION u32 bits_of_f32(f32 value)
{
    union {
        f32 value;
        u32 bits;
    } both;
    both.value = value;
    return both.bits;
}

FUNCTION f32 f32_of_bits(u32 bits)
{
    union {
        f32 value;
        u32 bits;
    } both;
    both.bits = bits;
    return both.value;
}

FUNCTION u64 bits_of_f64(f64 value)
{
    union {
        f64 value;
        u64 bits;
    } both;
    both.value = value;
    return both.bits;
}

FUNCTION f32 widen_bf16(u16 bits)
{
    return f32_of_bits((u32)bits << 16);
}

/* Rounds to even; a NaN stays a NaN. */
FUNCTION u16 narrow_bf16(f32 value)
{
#if !defined(DISTRIBUTE_SIMULATED) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    u32 bits = bits_of_f32(value);
    u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (u16)(value != value ? (bits >> 16) | 0x40 : rounded);
#endif
}

#ifdef DISTRIBUTE_SIMULATED
FUNCTION f32 widen_f16(u16 half_bits)
{
    u32 bits = half_bits;
    f32 moved = f32_of_bits((bits & 0x7fff) << 13) * f32_of_bits((127 + 112) << 23);
    u32 special = moved >= 65536.0f ? 0x7f800000 : 0;
    return f32_of_bits(bits_of_f32(moved) | special | (bits & 0x8000) << 16);
}

FUNCTION u16 narrow_f16(f32 value)
{
    u32 sign = bits_of_f32(value) & 0x80000000;
    u32 bits = bits_of_f32(value) ^ sign;
    u32 special = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
    u32 denormal = bits_of_f32(f32_of_bits(bits) + 0.5f) - bits_of_f32(0.5f);
    u32 normal = (bits - (112u << 23) + (0xfff + ((bits >> 13) & 1))) >> 13;
    u32 small = bits < (113u << 23) ? denormal : normal;
    return (u16)((bits >= ((127u + 16u) << 23) ? special : small) | sign >> 16);
}
#else
FUNCTION f32 widen_f16(u16 bits)
{
    f32 value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

FUNCTION u16 narrow_f16(f32 value)
{
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

#define SAME(value) (value)
#define FIRST_THREAD_OF_GRID ((u64)blockIdx.x * blockDim.x + threadIdx.x)
#define THREADS_OF_GRID ((u64)gridDim.x * blockDim.x)
