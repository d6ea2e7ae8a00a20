/* What CUDA C has and C has not, as far as kernels here use it. A kernel's threads run one after another. */
#define DISTRIBUTE_SIMULATED 1

#define __device__ __attribute__((unused))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __constant__ const
#define bool _Bool
#define true 1
#define false 0
#define nullptr ((void *)0)
#define static_assert _Static_assert
#define alignas _Alignas
#define __align__(n) __attribute__((aligned(n)))

typedef struct { unsigned int x, y, z; } uint3;
typedef uint3 dim3;

/* For device functions; a kernel has constants of the same names as parameters, which the compiler sees through. */
static __thread uint3 threadIdx __attribute__((unused)), blockIdx __attribute__((unused));
static __thread dim3 blockDim __attribute__((unused)), gridDim __attribute__((unused));

/* Steps of a length without common divisor visit all blocks, in an order that the seed decides. */
static inline unsigned long long simulated_step(unsigned long long blocks, unsigned long long seed) {
  unsigned long long step = blocks < 2 ? 1 : 1 + seed % (blocks - 1);
  for (;; step = step % blocks + 1) {
    unsigned long long a = blocks, b = step;
    while (b != 0) {
      unsigned long long rest = a % b;
      a = b;
      b = rest;
    }
    if (a == 1) {
      return step;
    }
  }
}

/* What lies between a struct's fields is not to be taken for a pointer. */
#define SIMULATED_CLEAR(p) ((void)(p))
#ifdef __has_builtin
#if __has_builtin(__builtin_clear_padding)
#undef SIMULATED_CLEAR
#define SIMULATED_CLEAR(p) __builtin_clear_padding(p)
#endif
#endif

#define SIMULATED_PARAMETERS(Params) \
  const Params p, const uint3 threadIdx, const uint3 blockIdx, const dim3 blockDim, const dim3 gridDim

/* What is defined for each kernel. A block's threads run one after another, and all of them in each phase: in ascending
   or, if dims[6] is not 0, in descending order. */
#define SIMULATED_KERNEL(name, Params, max_threads, phases, BEGIN_BLOCK, RUN_THREAD) \
  const unsigned long long name##_params = sizeof(Params); \
  const unsigned int name##_threads = (max_threads); \
  void name##_clear(void *params) { SIMULATED_CLEAR((Params *)params); } \
  void name(void **arguments, const unsigned int *dims, unsigned long long seed) { \
    const Params p = *(const Params *)arguments[0]; \
    const dim3 grid = {dims[0], dims[1], dims[2]}, size = {dims[3], dims[4], dims[5]}; \
    const unsigned long long blocks = (unsigned long long)grid.x * grid.y * grid.z; \
    const unsigned long long step = simulated_step(blocks, seed); \
    const bool descends = dims[6] != 0; \
    unsigned long long at = seed % blocks; \
    gridDim = grid; \
    blockDim = size; \
    for (unsigned long long n = 0; n < blocks; n++) { \
      const uint3 block = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y}; \
      blockIdx = block; \
      BEGIN_BLOCK; \
      for (unsigned int phase = 0; phase < (phases); phase++) { \
        for (unsigned int z = 0; z < size.z; z++) { \
          for (unsigned int y = 0; y < size.y; y++) { \
            for (unsigned int x = 0; x < size.x; x++) { \
              const uint3 last = {size.x - 1 - x, size.y - 1 - y, size.z - 1 - z}; \
              const uint3 thread = {descends ? last.x : x, descends ? last.y : y, descends ? last.z : z}; \
              threadIdx = thread; \
              RUN_THREAD; \
            } \
          } \
        } \
      } \
      at += step; \
      at -= at >= blocks ? blocks : 0; \
    } \
  }

#define KERNEL(name, Params, max_threads) \
  static inline __attribute__((always_inline)) void name##_thread(SIMULATED_PARAMETERS(Params)); \
  SIMULATED_KERNEL(name, Params, max_threads, 1, , name##_thread(p, thread, block, size, grid)) \
  static inline __attribute__((always_inline)) void name##_thread(SIMULATED_PARAMETERS(Params))

/* Shared memory begins with anything. */
#define PHASED_KERNEL(name, Params, Shared, phases, max_threads) \
  static inline void name##_phase(const Params *p, Shared *shared, unsigned int phase); \
  SIMULATED_KERNEL(name, Params, max_threads, phases, Shared shared; __builtin_memset(&shared, 0xa5, sizeof(shared)), \
                   name##_phase(&p, &shared, phase)) \
  static inline void name##_phase(const Params *p, Shared *shared, unsigned int phase)

/* Atomics, also between kernels of different streams. */
#define atomicAdd(p, v) simulated_add(p, v)
#define atomicOr(p, v) __atomic_fetch_or((p), (v), __ATOMIC_RELAXED)
#define atomicAnd(p, v) __atomic_fetch_and((p), (v), __ATOMIC_RELAXED)
#define atomicExch(p, v) __atomic_exchange_n((p), (v), __ATOMIC_RELAXED)
#define __threadfence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define simulated_add(p, v) \
  _Generic(*(p), float: simulated_add_float, double: simulated_add_double, int: simulated_add_int, \
           unsigned int: simulated_add_uint, unsigned long long: simulated_add_ulong)((void *)(p), (v))
#define SIMULATED_ADD(name, T) \
  static inline T simulated_add_##name(void *p, T v) { \
    T old, new; \
    __atomic_load((T *)p, &old, __ATOMIC_RELAXED); \
    do { \
      new = old + v; \
    } while (!__atomic_compare_exchange((T *)p, &old, &new, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)); \
    return old; \
  }
SIMULATED_ADD(float, float)
SIMULATED_ADD(double, double)
SIMULATED_ADD(int, int)
SIMULATED_ADD(uint, unsigned int)
SIMULATED_ADD(ulong, unsigned long long)

#define __ldg(p) (*(p))
#define __popc(v) __builtin_popcount(v)
#define __popcll(v) __builtin_popcountll(v)

#define SIMULATED_CAST(name, From, To) \
  static inline To name(From value) { \
    union { From from; To to; } bits = {value}; \
    return bits.to; \
  }
SIMULATED_CAST(__float_as_uint, float, unsigned int)
SIMULATED_CAST(__uint_as_float, unsigned int, float)
SIMULATED_CAST(__float_as_int, float, int)
SIMULATED_CAST(__int_as_float, int, float)
SIMULATED_CAST(__double_as_longlong, double, long long)
SIMULATED_CAST(__longlong_as_double, long long, double)

#define SIMULATED_MATH(name) \
  double name(double); \
  float name##f(float);
SIMULATED_MATH(sqrt) SIMULATED_MATH(fabs) SIMULATED_MATH(exp) SIMULATED_MATH(log) SIMULATED_MATH(floor)
SIMULATED_MATH(ceil) SIMULATED_MATH(rint) SIMULATED_MATH(trunc) SIMULATED_MATH(tanh) SIMULATED_MATH(sin)
SIMULATED_MATH(cos)
double pow(double, double), fmin(double, double), fmax(double, double), fma(double, double, double);
float powf(float, float), fminf(float, float), fmaxf(float, float), fmaf(float, float, float);

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return sqrt(a); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
