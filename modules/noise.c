/* Dropout on the CPU in one pass; called by noise.py. Axes: R rows, W numbers of each. */

#include <stddef.h>
#include <string.h>

#include "../common/cpu.h"
#include "noise.h"

enum { BLOCK = 512 }; /* columns at once; even, because two columns share their bits */

/* The factor of a number: scale where 16 random bits, as a signed number, are at least `least`, else 0. */
static inline __attribute__((always_inline)) float factor(
    uint32_t column, uint32_t row, int32_t shift, int32_t least, float scale
) {
    return (int32_t)(mix(column ^ row) << shift) >> 16 >= least ? scale : 0;
}

FOR_EACH_CPU
static void drop_fp32(
    const float *x, float *out, const uint32_t *column, const int32_t *shift, ptrdiff_t count, uint32_t row,
    int32_t least, float scale
) {
    for (ptrdiff_t i = 0; i < count; ++i)
        out[i] = x[i] * factor(column[i], row, shift[i], least, scale);
}

/* The same in BF16, rounded to the nearest. */
FOR_EACH_CPU
static void drop_bf16(
    const uint16_t *x, uint16_t *out, const uint32_t *column, const int32_t *shift, ptrdiff_t count, uint32_t row,
    int32_t least, float scale
) {
    for (ptrdiff_t i = 0; i < count; ++i) {
        uint32_t word = (uint32_t)x[i] << 16;
        float number;
        memcpy(&number, &word, sizeof number);
        number *= factor(column[i], row, shift[i], least, scale);
        memcpy(&word, &number, sizeof word);
        out[i] = (uint16_t)((word + 0x7FFF + (word >> 16 & 1)) >> 16);
    }
}

/* x and out [R, W], in FP32 or BF16; they may be the same. */
void noise_dropout(
    const void *x, void *out, const int64_t *row_R, int64_t R, int64_t W, int bf16, uint64_t key, int32_t least,
    float scale
) {
    uint32_t column[BLOCK];
    int32_t shift[BLOCK];
    for (int64_t first = 0; first < W; first += BLOCK) {
        int64_t count = W - first < BLOCK ? W - first : BLOCK;
        for (int64_t i = 0; i < count; ++i) {
            column[i] = column_hash(first + i);
            shift[i] = i % 2 ? 0 : 16;
        }
        for (int64_t r = 0; r < R; ++r) {
            int64_t at = r * W + first;
            uint32_t row = row_hash(key, row_R[r]);
            if (bf16)
                drop_bf16((const uint16_t *)x + at, (uint16_t *)out + at, column, shift, count, row, least, scale);
            else
                drop_fp32((const float *)x + at, (float *)out + at, column, shift, count, row, least, scale);
        }
    }
}
