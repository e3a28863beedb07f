/* The FP8 codec of fp8.py for the CPU: the same bytes, at the speed of memory.
 *
 * A plain C interface, loaded with ctypes: it knows neither Python nor torch, so that it builds wherever there is a C
 * compiler and serves every version of both. Every FP32 operation is rounded by itself, as in fp8.py: build it with
 * -ffp-contract=off and without -ffast-math. The loops hold no branch on values, so that compilers turn them into
 * vector instructions.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../common/cpu.h"

#define INLINE static inline __attribute__((always_inline))

#define EXPORT __attribute__((visibility("default")))

enum { SCALE_BYTES = 2, NAN_BYTE = 0x7F };
/* Elements to a loop of known length: twice as many where the row has them, which fills AVX-512's registers. gcc 12
 * spells a loop of 16 out and then finds no vectors in it. Bytes are made of words, and words of bytes, in loops of
 * their own: in one loop gcc computes partly with bytes, and packs each part for itself. */
enum { BLOCK = 32 };

static const uint32_t INFINITY_BITS = 0x7F800000u;
static const uint32_t LARGEST_BF16_BITS = 0x7F7Fu;
static const float TINY = 0x1p-60f;
static const float LIFT = 0x1p100f;

/* A format by its bits of mantissa, 3 (E4M3) or 2 (E5M2); constants once the functions below are inlined. */
#define SHIFT(mantissa) (23 - (mantissa))
#define SMALLEST_NORMAL(mantissa) ((mantissa) == 3 ? 0x1p-6f : 0x1p-14f)
#define SMALLEST_NORMAL_BITS(mantissa) ((mantissa) == 3 ? 121u << 23 : 113u << 23)
#define LARGEST(mantissa) ((mantissa) == 3 ? 448.0f : 57344.0f)
#define LARGEST_BYTE(mantissa) ((mantissa) == 3 ? 0x7Eu : 0x7Bu)

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Noise: see `noise` in fp8.py. */

typedef struct {
    uint32_t first, second;
} Keys;

INLINE uint32_t mix(uint32_t bits) {
    bits = (bits ^ bits >> 16) * 0x7FEB352Du;
    bits = (bits ^ bits >> 15) * 0x846CA68Bu;
    return bits ^ bits >> 16;
}

INLINE Keys keys_of(uint64_t seed) {
    Keys keys;
    keys.first = mix(mix(0x9E3779B9u) ^ (uint32_t)seed);
    keys.second = mix(keys.first ^ (uint32_t)(seed >> 32) ^ 0x85EBCA6Bu);
    return keys;
}

/* Encoding */

/* The byte of a magnitude, given as FP32 bits that round to no more than the format's largest, in the lowest 8 bits;
 * the others are noise. */
INLINE uint32_t nearest(uint32_t bits, int mantissa) {
    /* Adding a power of two whose last place is the FP8 step rounds to nearest even and leaves the count of steps in
     * the lowest bits of the sum. Below the smallest normal number the step stays what it is there. The byte is that
     * count and, above it, by how many exponents the number exceeds the least: `offset` takes the least off
     * beforehand. It is even, so that ties fall as they would without it. */
    uint32_t least = SMALLEST_NORMAL_BITS(mantissa), offset = (0u - (least >> SHIFT(mantissa))) & 0xFFu;
    uint32_t exponent = (bits > least ? bits : least) & INFINITY_BITS;
    uint32_t step = exponent + (((uint32_t)SHIFT(mantissa) << 23) | offset);
    return bits_of(float_of(bits) + float_of(step)) + (exponent >> SHIFT(mantissa));
}

INLINE uint32_t at_random(uint32_t bits, uint32_t noise, int mantissa) {
    /* The FP8 byte in fixed point with `shift` fractional bits: see `_rounded_at_random` in fp8.py. */
    uint32_t least = SMALLEST_NORMAL_BITS(mantissa), below = bits < least ? bits : least;
    uint32_t subnormal = (uint32_t)(int32_t)(float_of(below) * (0x1p23f / SMALLEST_NORMAL(mantissa)));
    uint32_t fixed = bits < least ? subnormal : bits - (least - (1u << 23));
    return (fixed + (noise & ((1u << SHIFT(mantissa)) - 1))) >> SHIFT(mantissa);
}

/* The largest magnitude, or the largest finite one. */
INLINE uint32_t largest_bits(const float *values, ptrdiff_t D, int finite) {
    uint32_t amax = 0;
    for (ptrdiff_t c = 0; c < D; c++) {
        uint32_t magnitude = bits_of(values[c]) & 0x7FFFFFFFu;
        if (finite) magnitude &= -(magnitude < INFINITY_BITS); /* a mask: gcc 12 makes no vector of a choice here */
        amax = amax > magnitude ? amax : magnitude;
    }
    return amax;
}

/* How to encode a group. An ordinary one needs no lift and holds nothing beyond its scale, NaN and infinity among that:
 * nearly all are, and the loops without these cases take little more than half the time. */
typedef struct {
    uint32_t scale_bits;
    int ordinary;
    float lift, inverse;
} Plan;

INLINE Plan plan_for(const float *values, ptrdiff_t D, int mantissa) {
    uint32_t amax = largest_bits(values, D, 0);
    int within = amax <= LARGEST_BF16_BITS << 16;
    if (amax >= INFINITY_BITS) amax = largest_bits(values, D, 1);
    Plan plan;
    plan.scale_bits = (amax + 0xFFFFu) >> 16;
    if (plan.scale_bits > LARGEST_BF16_BITS) plan.scale_bits = LARGEST_BF16_BITS;
    float scale = float_of(plan.scale_bits << 16);
    plan.lift = scale < TINY ? LIFT : 1.0f;
    plan.inverse = plan.scale_bits ? LARGEST(mantissa) / (scale * plan.lift) : 0.0f;
    plan.ordinary = within && !(scale < TINY);
    return plan;
}

INLINE void encode_block(const float *restrict values, uint8_t *restrict payload, Plan plan, const Keys *keys,
                         uint32_t place, int ordinary, int mantissa, int block) {
    uint32_t largest = bits_of(LARGEST(mantissa)), wide[2 * BLOCK];
    for (int c = 0; c < block; c++) {
        uint32_t x = bits_of(values[c]), magnitude = x & 0x7FFFFFFFu;
        uint32_t y = bits_of(float_of(magnitude) * (ordinary ? 1.0f : plan.lift) * plan.inverse);
        /* In an ordinary group y exceeds the largest by roundings at most, which nearest() takes off again. */
        if (keys || !ordinary) y = y < largest ? y : largest;
        uint32_t byte = keys ? at_random(y, mix(mix((place + (uint32_t)c) ^ keys->first) ^ keys->second), mantissa)
                             : nearest(y, mantissa);
        byte |= x >> 24 & 0x80u;
        wide[c] = ordinary || magnitude < INFINITY_BITS ? byte : NAN_BYTE;
    }
    for (int c = 0; c < block; c++) payload[c] = (uint8_t)wide[c];
}

INLINE void encode_blocks(const float *values, ptrdiff_t D, uint8_t *payload, Plan plan, const Keys *keys,
                          uint32_t place, int ordinary, int mantissa) {
    ptrdiff_t c = 0;
#define ENCODE_BLOCK(from, to, block) encode_block(from, to, plan, keys, place + (uint32_t)c, ordinary, mantissa, block)
    for (; c + 2 * BLOCK <= D; c += 2 * BLOCK) ENCODE_BLOCK(values + c, payload + c, 2 * BLOCK);
    for (; c + BLOCK <= D; c += BLOCK) ENCODE_BLOCK(values + c, payload + c, BLOCK);
    if (c < D) { /* the rest in a block of its own: one by one it would take longer than all before it */
        float rest[BLOCK] = {0};
        uint8_t bytes[BLOCK];
        memcpy(rest, values + c, (size_t)(D - c) * sizeof *rest);
        ENCODE_BLOCK(rest, bytes, BLOCK);
        memcpy(payload + c, bytes, (size_t)(D - c));
    }
#undef ENCODE_BLOCK
}

INLINE void quantize_rows(const float *values, ptrdiff_t stride, ptrdiff_t rows, const int64_t *widths, int groups,
                          const Keys *keys, uint8_t *wire, int mantissa) {
    if (rows == 0 || groups == 0) return;
    uint32_t place = 0;
    Plan upcoming = plan_for(values, (ptrdiff_t)widths[0], mantissa);
    for (ptrdiff_t r = 0; r < rows; r++) {
        const float *from = values + r * stride;
        for (int g = 0; g < groups; g++) {
            ptrdiff_t D = (ptrdiff_t)widths[g];
            Plan plan = upcoming; /* made one group ahead, or its division would be waited for */
            int last = g + 1 == groups;
            if (!last || r + 1 < rows)
                upcoming = plan_for(last ? values + (r + 1) * stride : from + D, (ptrdiff_t)widths[last ? 0 : g + 1],
                                    mantissa);
            if (plan.ordinary)
                encode_blocks(from, D, wire, plan, keys, place, 1, mantissa);
            else
                encode_blocks(from, D, wire, plan, keys, place, 0, mantissa);
            wire[D] = (uint8_t)plan.scale_bits;
            wire[D + 1] = (uint8_t)(plan.scale_bits >> 8);
            wire += D + SCALE_BYTES, from += D, place += (uint32_t)D;
        }
    }
}

/* `stride`: elements from row to row. `mantissa`: 3 for E4M3, 2 for E5M2. */
EXPORT FOR_EACH_CPU void fp8_quantize(const float *values, int64_t stride, int64_t rows, const int64_t *widths,
                                               int groups, int mantissa, int random, uint64_t seed, uint8_t *wire) {
    const Keys keys = keys_of(seed);
#define CASE(m, key) quantize_rows(values, stride, rows, widths, groups, key, wire, m)
    if (mantissa == 3 && random) CASE(3, &keys);
    else if (mantissa == 3) CASE(3, NULL);
    else if (random) CASE(2, &keys);
    else CASE(2, NULL);
#undef CASE
}

/* Decoding */

INLINE void decode_block(const uint8_t *restrict payload, float scale, float unlift, float *restrict values,
                         int mantissa, int block) {
    uint32_t wide[2 * BLOCK];
    for (int c = 0; c < block; c++) wide[c] = payload[c];
    for (int c = 0; c < block; c++) {
        uint32_t byte = wide[c], magnitude = byte & 0x7Fu;
        float subnormal = (float)(int32_t)magnitude * (SMALLEST_NORMAL(mantissa) / (float)(1 << (mantissa)));
        uint32_t normal = (magnitude << SHIFT(mantissa)) + (SMALLEST_NORMAL_BITS(mantissa) - (1u << 23));
        uint32_t q = magnitude < (1u << (mantissa)) ? bits_of(subnormal) : normal;
        float x = float_of(q | (byte & 0x80u) << 24) * scale * unlift;
        values[c] = magnitude > LARGEST_BYTE(mantissa) ? float_of(0x7FC00000u) : x;
    }
}

INLINE void decode(const uint8_t *payload, ptrdiff_t D, float scale, float unlift, float *values, int mantissa) {
    ptrdiff_t c = 0;
    for (; c + 2 * BLOCK <= D; c += 2 * BLOCK)
        decode_block(payload + c, scale, unlift, values + c, mantissa, 2 * BLOCK);
    for (; c + BLOCK <= D; c += BLOCK) decode_block(payload + c, scale, unlift, values + c, mantissa, BLOCK);
    if (c < D) {
        uint8_t bytes[BLOCK] = {0};
        float rest[BLOCK];
        memcpy(bytes, payload + c, (size_t)(D - c));
        decode_block(bytes, scale, unlift, rest, mantissa, BLOCK);
        memcpy(values + c, rest, (size_t)(D - c) * sizeof(float));
    }
}

INLINE void dequantize_rows(const uint8_t *wire, ptrdiff_t wire_stride, ptrdiff_t rows, const int64_t *widths,
                            int groups, float *values, ptrdiff_t stride, int mantissa) {
    for (ptrdiff_t r = 0; r < rows; r++) {
        const uint8_t *payload = wire + r * wire_stride;
        float *row = values + r * stride;
        for (int g = 0; g < groups; g++) {
            ptrdiff_t D = (ptrdiff_t)widths[g];
            float scale = float_of(((uint32_t)payload[D] | (uint32_t)payload[D + 1] << 8) << 16);
            if (scale < TINY)
                decode(payload, D, scale * LIFT / LARGEST(mantissa), 1.0f / LIFT, row, mantissa);
            else
                decode(payload, D, scale / LARGEST(mantissa), 1.0f, row, mantissa);
            payload += D + SCALE_BYTES, row += D;
        }
    }
}

EXPORT FOR_EACH_CPU void fp8_dequantize(const uint8_t *wire, int64_t wire_stride, int64_t rows,
                                                 const int64_t *widths, int groups, int mantissa, float *values,
                                                 int64_t stride) {
    if (mantissa == 3)
        dequantize_rows(wire, wire_stride, rows, widths, groups, values, stride, 3);
    else
        dequantize_rows(wire, wire_stride, rows, widths, groups, values, stride, 2);
}
