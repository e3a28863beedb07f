/* Vectors and products of small matrices in registers, for every instruction set: what mol.c, mol_scores.c and hstu.c
   share.

   A source that includes this file defines SOURCE before, its own path from here, ONLY_FP32 if it has no form with
   products of BF16 numbers, and WITH_INT8 if it has one with products of INT8 numbers. It is then included in turn, once
   for each instruction set and precision, with VARIANT defined: FN(name) is a function of one of them. */

#ifndef VARIANT

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define X86 1
#include <immintrin.h>
#if defined(__linux__) && __GNUC__ >= 11 && !defined(ONLY_FP32)
#define WITH_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define UP(n, multiple) (((n) + (multiple) - 1) / (multiple) * (multiple))
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define FN(name) JOIN(name, VARIANT)
#define JOIN_W_(a, b) a##b
#define JOIN_W(a, b) JOIN_W_(a, b)
#define JOIN_M_(a, b) a##b##m
#define JOIN_M(a, b) JOIN_M_(a, b)

/* Vectors of 4, 8 and 16 lanes, and the same in memory, aligned like their elements. */
#define LANES(n)                                                                                                       \
    typedef float f##n __attribute__((vector_size(4 * n), may_alias));                                                 \
    typedef int32_t i##n __attribute__((vector_size(4 * n), may_alias));                                               \
    typedef uint32_t u##n __attribute__((vector_size(4 * n), may_alias));                                              \
    typedef uint16_t h##n __attribute__((vector_size(2 * n), may_alias));                                              \
    typedef int8_t b##n __attribute__((vector_size(n), may_alias));                                                    \
    typedef f##n f##n##m __attribute__((aligned(4)));                                                                  \
    typedef i##n i##n##m __attribute__((aligned(4)));                                                                  \
    typedef u##n u##n##m __attribute__((aligned(4)));                                                                  \
    typedef h##n h##n##m __attribute__((aligned(2)));                                                                  \
    typedef b##n b##n##m __attribute__((aligned(1)))
LANES(4);
LANES(8);
LANES(16);

static inline uint16_t to_bf16(float x) {
    union { float f; uint32_t u; } bits = {.f = x};
    return (uint16_t)((bits.u + 0x7fff + (bits.u >> 16 & 1)) >> 16);
}

/* Few elements, mostly as many as one register holds. */
INLINE void copy_few(void *to, const void *from, int64_t bytes) {
    switch (bytes) {
    case 8: memcpy(to, from, 8); break;
    case 16: memcpy(to, from, 16); break;
    case 32: memcpy(to, from, 32); break;
    default: memcpy(to, from, (size_t)bytes);
    }
}

#define ROWS(DO, columns)                                                                                              \
    DO(1, columns) DO(2, columns) DO(3, columns) DO(4, columns)                                                        \
    DO(5, columns) DO(6, columns) DO(7, columns) DO(8, columns)

#ifdef WITH_AMX
/* Linux gives a process the tiles' registers when it asks for them. */
static int may_use_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
           !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}
#endif

/* What this machine can do: 0 any, 1 AVX2, 2 AVX-512, 3 its products of BF16 numbers, 4 those of AMX. */
static int level_of_machine(void) {
#ifdef X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        if (!__builtin_cpu_supports("avx512bf16")) return 2;
#ifdef WITH_AMX
        if (may_use_tiles()) return 4;
#endif
        return 3;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

/* Results near zero become zero until `restore_subnormals` is given what it returns. Subnormal numbers, such as products
   with gates that are almost zero, would take a hundred times as long as others. */
static inline unsigned flush_subnormals(void) {
#ifdef X86
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON);
    return before;
#else
    return 0;
#endif
}

static inline void restore_subnormals(unsigned before) {
#ifdef X86
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

/* Width: lanes of a vector. Columns: the most vectors of accumulators that fit beside each other in a tile. */
#define VARIANT any
#define WIDTH 4
#define COLUMNS 2
#include "tiles.h"

#ifdef X86
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define AVX2
#define VARIANT avx2
#define WIDTH 8
#define COLUMNS 2
#include "tiles.h"
#undef AVX2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define AVX512
#define VARIANT avx512
#define WIDTH 16
#define COLUMNS 4
#include "tiles.h"

#ifndef ONLY_FP32
#pragma GCC target("avx512bf16")
#define BF16
#define VARIANT bf16
#define WIDTH 16
#define COLUMNS 4
#include "tiles.h"

#ifdef WITH_AMX
#pragma GCC target("amx-tile,amx-bf16")
#define AMX
#define VARIANT amx
#define WIDTH 16
#define COLUMNS 4
#include "tiles.h"
#undef AMX
#endif
#undef BF16
#endif
#pragma GCC pop_options

#ifdef WITH_INT8
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")
#define INT8_PRODUCTS
#define VARIANT int8
#define WIDTH 16
#define COLUMNS 4
#include "tiles.h"
#undef INT8_PRODUCTS
#pragma GCC pop_options
#endif
#undef AVX512
#endif

#else /* one variant */

#define VF JOIN_W(f, WIDTH)
#define VI JOIN_W(i, WIDTH)
#define VU JOIN_W(u, WIDTH)
#define VH JOIN_W(h, WIDTH)
#define VFM JOIN_M(f, WIDTH)
#define VIM JOIN_M(i, WIDTH)
#define VUM JOIN_M(u, WIDTH)
#define VHM JOIN_M(h, WIDTH)
#define VBM JOIN_M(b, WIDTH)

/* A word is what one step of a product's inner sum takes of each side: an FP32 number, two BF16 numbers, or four INT8
   numbers, unsigned on the left and signed on the right. Sums of the latter are INT32, in vectors of FP32 by name. */
#if defined(INT8_PRODUCTS)
#define ELEMENT int8_t
#define PER_WORD 4
#elif defined(BF16)
#define ELEMENT uint16_t
#define PER_WORD 2
#define ROUND(x) to_bf16(x)
#else
#define ELEMENT float
#define PER_WORD 1
#define ROUND(x) (x)
#endif

/* --- vectors -------------------------------------------------------------------------------------------------- */

INLINE VF FN(all)(float x) { return x - (VF){0}; }
INLINE VF FN(get)(const float *p) { return *(const VFM *)p; }
INLINE void FN(put)(float *p, VF x) { *(VFM *)p = x; }

#ifndef INT8_PRODUCTS
INLINE VF FN(load)(const ELEMENT *p) {
#ifdef BF16
    return (VF)(__builtin_convertvector(*(const VHM *)p, VU) << 16);
#else
    return *(const VFM *)p;
#endif
}

INLINE void FN(store)(ELEMENT *p, VF x) {
#ifdef BF16
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    *(VFM *)p = x;
#endif
}
#endif

/* Both give b where either is not a number. */
INLINE VF FN(larger)(VF a, VF b) {
#if defined(AVX512)
    return (VF)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(AVX2)
    return (VF)_mm256_max_ps((__m256)a, (__m256)b);
#else
    VI more = a > b;
    return (VF)((more & (VI)a) | (~more & (VI)b));
#endif
}

INLINE VF FN(smaller)(VF a, VF b) {
#if defined(AVX512)
    return (VF)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(AVX2)
    return (VF)_mm256_min_ps((__m256)a, (__m256)b);
#else
    VI less = a < b;
    return (VF)((less & (VI)a) | (~less & (VI)b));
#endif
}

INLINE VF FN(inverse)(VF x) {
#if defined(BF16) || defined(INT8_PRODUCTS)
    return (VF)_mm512_rcp14_ps((__m512)x); /* 2^-14: BF16 keeps 2^-9 */
#else
    return 1.0f / x;
#endif
}

INLINE float FN(sum)(VF x) {
#if defined(AVX512)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < WIDTH; i++) total += x[i];
    return total;
#endif
}

INLINE float FN(largest)(VF x) {
#if defined(AVX512)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < WIDTH; i++) most = MAX(most, x[i]);
    return most;
#endif
}

/* e^x for x in [-87, 88], constant beyond, NaN for NaN, exact at 0. 1 ulp in FP32, 5e-6 in BF16. */
INLINE VF FN(exp)(VF x) {
    x = FN(larger)(FN(all)(-87.0f), FN(smaller)(FN(all)(88.0f), x));
    /* Adding 1.5 * 2^23 rounds to an integer, and leaves it in the low bits. */
    VF shifted = x * 1.44269504f + 12582912.0f, whole = shifted - 12582912.0f;
    VF r = x - whole * 0.693359375f;
    r = r - whole * -2.12194440e-4f;
#ifdef BF16
    VF p = (0.04127775f * r + 0.16753514f) * r + 0.50005116f;
#else
    VF p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
#endif
    p = p * (r * r) + r + 1.0f;
    return (VF)((VI)p + ((VI)shifted << 23));
}

/* SiLU and its derivative. */
INLINE VF FN(silu)(VF x, VF *slope) {
    VF s = FN(inverse)(1.0f + FN(exp)(-x)), y = x * s;
    *slope = s + y * (1.0f - s);
    return y;
}

/* --- products ------------------------------------------------------------------------------------------------- */

/* sum + the product of two words. */
INLINE VF FN(step)(VF sum, uint32_t a, VU b) {
#if defined(INT8_PRODUCTS)
    return (VF)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32((int)a), (__m512i)b);
#elif defined(BF16)
    return (VF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
#else
    union { uint32_t u; float f; } bits = {.u = a};
    return bits.f * (VF)b + sum;
#endif
}

/* A rows x (columns * WIDTH) tile of c = from + a b, in registers. Words of a: [row, k] at row * a_row + k * a_k.
   Meanwhile, K lines of memory are requested where `ahead` is not null. */
INLINE void FN(tile)(
    const int rows, const int columns, int64_t K, const uint32_t *a, int64_t a_row, int64_t a_k, const uint32_t *b,
    int64_t b_k, const float *from, int64_t from_row, float *c, int64_t c_row, const char *const *ahead
) {
    /* A variable for each vector, not an array: compilers keep an array in memory. */
#define START(r, j)                                                                                                    \
    VF sum##r##j = {0};                                                                                         \
    if (from && r < rows && j < columns) sum##r##j = FN(get)(from + r * from_row + j * WIDTH);
#define STEP(r, j)                                                                                                     \
    if (r < rows && j < columns) sum##r##j = FN(step)(sum##r##j, a[r * a_row], right##j);
#define END(r, j)                                                                                                      \
    if (r < rows && j < columns) FN(put)(c + r * c_row + j * WIDTH, sum##r##j);
#define ROW(DO, r) DO(r, 0) DO(r, 1) DO(r, 2) DO(r, 3)
#define ALL(DO) ROW(DO, 0) ROW(DO, 1) ROW(DO, 2) ROW(DO, 3) ROW(DO, 4) ROW(DO, 5) ROW(DO, 6) ROW(DO, 7)
    ALL(START)
    do {
        const VUM *right = (const VUM *)b;
        VU right0 = right[0], right1 = right[columns > 1], right2 = right[columns > 2 ? 2 : 0];
        VU right3 = right[columns > 3 ? 3 : 0];
        ALL(STEP)
        if (ahead) __builtin_prefetch(*ahead++);
        a += a_k, b += b_k;
    } while (--K);
    ALL(END)
#undef START
#undef STEP
#undef END
#undef ROW
#undef ALL
}

/* Each in a function of its own, which gets all registers. */
#define TILE(rows, columns)                                                                                            \
    static __attribute__((noinline)) void FN(tile##rows##columns)(                                                     \
        int64_t K, const uint32_t *a, int64_t a_row, int64_t a_k, const uint32_t *b, int64_t b_k, const float *from,   \
        int64_t from_row, float *c, int64_t c_row, const char *const *ahead                                            \
    ) {                                                                                                                \
        FN(tile)(rows, columns, K, a, a_row, a_k, b, b_k, from, from_row, c, c_row, ahead);                            \
    }
#define PLACE(rows, columns) [columns - 1][rows - 1] = FN(tile##rows##columns),
#if COLUMNS == 4
#define EACH_TILE(DO) ROWS(DO, 1) ROWS(DO, 2) ROWS(DO, 3) ROWS(DO, 4)
#else
#define EACH_TILE(DO) ROWS(DO, 1) ROWS(DO, 2)
#endif
EACH_TILE(TILE)
static void (*const FN(tiles)[][8])(
    int64_t, const uint32_t *, int64_t, int64_t, const uint32_t *, int64_t, const float *, int64_t, float *, int64_t,
    const char *const *
) = {EACH_TILE(PLACE)};
#undef TILE
#undef PLACE
#undef EACH_TILE

#ifdef AVX512
/* to[k, j] = rows[j][from + k], 16 words of 16 rows; `row` words lie between to[k] and to[k + 1]. */
INLINE void FN(transpose)(const uint32_t *const *rows, int64_t from, uint32_t *to, int64_t row) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + from);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    /* a[4 g + k]: words k, k + 4, k + 8 and k + 12 of rows 4 g to 4 g + 3. */
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m512i low = _mm512_shuffle_i32x4(a[k], a[k + 4], 0x88), more = _mm512_shuffle_i32x4(a[k], a[k + 4], 0xdd);
        __m512i high = _mm512_shuffle_i32x4(a[k + 8], a[k + 12], 0x88);
        __m512i most = _mm512_shuffle_i32x4(a[k + 8], a[k + 12], 0xdd);
        _mm512_storeu_si512(to + k * row, _mm512_shuffle_i32x4(low, high, 0x88));
        _mm512_storeu_si512(to + (k + 4) * row, _mm512_shuffle_i32x4(more, most, 0x88));
        _mm512_storeu_si512(to + (k + 8) * row, _mm512_shuffle_i32x4(low, high, 0xdd));
        _mm512_storeu_si512(to + (k + 12) * row, _mm512_shuffle_i32x4(more, most, 0xdd));
    }
}
#endif

#ifdef AMX
/* How AMX's tile registers are used: 0 to 3 are sums, 2 x 2 of up to 16 rows and 16 columns; 4 and 5 are rows of the
   left side, 6 and 7 columns of the right side, of up to 16 words. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} FN(AmxConfig);

INLINE void FN(amx_configure)(int64_t upper, int64_t lower, int64_t words) {
    lower = MAX(lower, 1);
    FN(AmxConfig) config = {
        .palette = 1,
        .row_bytes = {64, 64, 64, 64, (uint16_t)(4 * words), (uint16_t)(4 * words), 64, 64},
        .rows = {(uint8_t)upper, (uint8_t)upper, (uint8_t)lower, (uint8_t)lower, (uint8_t)upper, (uint8_t)lower,
                 (uint8_t)words, (uint8_t)words},
    };
    /* Not the intrinsic, which in some versions of GCC does not say that it reads all of it. */
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

/* A block of c = from + a b, `words` of K at a time: rows as the registers are configured, with those of the lower
   registers if `lower`, and 16 columns, or 32 if `right`. */
INLINE void FN(amx_block)(
    int lower, int right, int64_t K, int64_t words, const uint32_t *a, int64_t a_row, const uint32_t *b, int64_t b_k,
    const float *from, int64_t from_row, float *c, int64_t c_row
) {
    const size_t bytes = sizeof(float);
    /* The loads' intrinsics do not say that they read memory. */
    __asm__ volatile("" : : : "memory");
    if (from) {
        _tile_loadd(0, from, from_row * bytes);
        if (right) _tile_loadd(1, from + 16, from_row * bytes);
        if (lower) _tile_loadd(2, from + 16 * from_row, from_row * bytes);
        if (lower && right) _tile_loadd(3, from + 16 * from_row + 16, from_row * bytes);
    } else {
        _tile_zero(0);
        if (right) _tile_zero(1);
        if (lower) _tile_zero(2);
        if (lower && right) _tile_zero(3);
    }
    for (int64_t k = 0; k < K; k += words, a += words, b += words * b_k) {
        _tile_loadd(4, a, a_row * bytes);
        _tile_loadd(6, b, b_k * bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (lower) {
            _tile_loadd(5, a + 16 * a_row, a_row * bytes);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (right) {
            _tile_loadd(7, b + 16, b_k * bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (lower && right) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_row * bytes);
    if (right) _tile_stored(1, c + 16, c_row * bytes);
    if (lower) _tile_stored(2, c + 16 * c_row, c_row * bytes);
    if (lower && right) _tile_stored(3, c + 16 * c_row + 16, c_row * bytes);
}

/* As product below, where `words`, which are no more than 16, divide K, and the words of a's rows are dense. */
static void FN(amx_blocks)(
    int64_t rows, int64_t vectors, int64_t K, int64_t words, const uint32_t *a, int64_t a_row, const uint32_t *b,
    int64_t b_k, const float *from, int64_t from_row, float *c, int64_t c_row
) {
    for (int64_t row = 0, last = 0; row < rows; row += 32) {
        int64_t upper = MIN(16, rows - row), lower = MAX(0, MIN(16, rows - row - 16));
        if (last != upper + lower) FN(amx_configure)(upper, lower, words);
        last = upper + lower;
        for (int64_t vector = 0; vector < vectors; vector += 2) {
            const uint32_t *left = a + row * a_row, *right = b + vector * WIDTH;
            const float *start = from ? from + row * from_row + vector * WIDTH : NULL;
            float *to = c + row * c_row + vector * WIDTH;
            FN(amx_block)(lower > 0, vector + 1 < vectors, K, words, left, a_row, right, b_k, start, from_row, to,
                          c_row);
        }
    }
    _tile_release();
}

/* The product below with AMX; returns 0, having done nothing, for sizes that do not fit its registers. */
static int FN(amx_product)(
    int64_t rows, int64_t vectors, int64_t K, const uint32_t *a, int64_t a_row, int64_t a_k, const uint32_t *b,
    int64_t b_k, const float *from, int64_t from_row, float *c, int64_t c_row
) {
    enum { MOST = 64 };
    if (a_k == 1) {
        int64_t words = MIN(K, 16);
        while (K % words) words--;
        if (words < 4) return 0;
        FN(amx_blocks)(rows, vectors, K, words, a, a_row, b, b_k, from, from_row, c, c_row);
        return 1;
    }
    if (a_row != 1 || K % 16 || rows % 16) return 0;
    /* A part of the left side, with dense rows. */
    uint32_t part[32 * MOST];
    for (int64_t row = 0; row < rows; row += 32) {
        int64_t count = MIN(32, rows - row);
        const float *start = from ? from + row * from_row : NULL;
        for (int64_t k = 0; k < K; k += MOST) {
            int64_t deep = MIN(MOST, K - k);
            for (int64_t i = 0; i < deep; i += 16) {
                const uint32_t *lines[16];
                for (int64_t line = 0; line < 16; line++) lines[line] = a + row + (k + i + line) * a_k;
                for (int64_t j = 0; j < count; j += 16) FN(transpose)(lines, j, part + j * MOST + i, MOST);
            }
            float *to = c + row * c_row;
            FN(amx_blocks)(count, vectors, deep, 16, part, MOST, b + k * b_k, b_k, k ? to : start, k ? c_row : from_row,
                        to, c_row);
        }
    }
    return 1;
}
#endif

/* c [rows, vectors * WIDTH] = from + a b over K > 0 words; from: rows from_row apart (0: one row for all), or null.
   Words of b are dense along the columns: the numbers of a word lie beside each other, k, k + 1, …. Meanwhile, memory is
   requested at `lines` addresses. */
static void FN(product_ahead)(
    int64_t rows, int64_t vectors, int64_t K, const void *a, int64_t a_row, int64_t a_k, const void *b, int64_t b_k,
    const float *from, int64_t from_row, float *c, int64_t c_row, const char *const *ahead, int64_t lines
) {
#ifdef AMX
    for (int64_t line = 0; line < lines; line++) __builtin_prefetch(ahead[line]);
    lines = 0;
    if (FN(amx_product)(rows, vectors, K, a, a_row, a_k, b, b_k, from, from_row, c, c_row)) return;
#endif
    for (int64_t column = 0; column < vectors * WIDTH;) {
        int64_t wide = MIN(vectors - column / WIDTH, COLUMNS), most = wide == COLUMNS ? 6 : 8;
        for (int64_t row = 0; row < rows;) {
            int64_t tiles = (rows - row + most - 1) / most, tall = (rows - row + tiles - 1) / tiles;
            FN(tiles)[wide - 1][tall - 1](
                K, (const uint32_t *)a + row * a_row, a_row, a_k, (const uint32_t *)b + column, b_k,
                from ? from + row * from_row + column : NULL, from_row, c + row * c_row + column, c_row,
                lines >= K ? ahead : NULL
            );
            if (lines >= K) ahead += K, lines -= K;
            row += tall;
        }
        column += wide * WIDTH;
    }
    for (int64_t line = 0; line < lines; line++) __builtin_prefetch(ahead[line]);
}

static void FN(product)(
    int64_t rows, int64_t vectors, int64_t K, const void *a, int64_t a_row, int64_t a_k, const void *b, int64_t b_k,
    const float *from, int64_t from_row, float *c, int64_t c_row
) {
    FN(product_ahead)(rows, vectors, K, a, a_row, a_k, b, b_k, from, from_row, c, c_row, NULL, 0);
}

/* The element [k, column] of words that are `row` apart. */
INLINE ELEMENT *FN(at)(void *words, int64_t row, int64_t k, int64_t column) {
    return (ELEMENT *)words + (k / PER_WORD * row + column) * PER_WORD + k % PER_WORD;
}

#include SOURCE

#undef VF
#undef VI
#undef VU
#undef VH
#undef VFM
#undef VIM
#undef VUM
#undef VHM
#undef VBM
#undef ELEMENT
#undef PER_WORD
#undef ROUND
#undef VARIANT
#undef WIDTH
#undef COLUMNS

#endif
