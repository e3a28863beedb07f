/* HSTU's pointwise attention over packed sequences, and its gradients; called by hstu_attention.py.

   Axes: T positions of all sequences, packed, G heads, d their width, L the model's most positions, K time buckets.

   A position i of a sequence takes sum over j <= i of silu(<q_i, k_j> + position[i - j] + time[bucket(i, j)]) / L v_j.
   Rows of i are taken a block at a time, with all j before them, so that nothing of size positions x positions is kept
   between forward and backward: backward computes the products again.
   tiles.h includes this file once for each instruction set: FN(name) is a function of one of them. */

#ifndef VARIANT

#include <stdint.h>

/* Mirrored in hstu_attention.py. packed: value, query and key of a position, one after the other. Without times there is
   no time bias. d_packed is written, d_position and d_time are added to. */
typedef struct {
    int64_t T, G, d, L;
    float scale;
    const float *packed_T3Gd, *position_L, *time_K;
    const int64_t *bound_B, *asked_T, *time_T;
    float *out_TGd;
    const float *d_out_TGd;
    float *d_packed_T3Gd;
} Problem;

enum { ROWS_AT_ONCE = 32, BUCKETS = 129 };

#define ONLY_FP32
#define SOURCE "encoders/hstu.c"
#include "../tiles.h"

/* What this machine can do: 0 any, 1 AVX2, 2 AVX-512. */
int hstu_level(void) { return MIN(level_of_machine(), 2); }

/* Sequences first..last forward, or with d_position [L] their gradients: those of the biases are added to d_position and
   d_time [K]. By what a level of those that the machine has can do. 0, or -1 for want of memory. */
int hstu_attend(const Problem *problem, int64_t first, int64_t last, float *d_position_L, float *d_time_K, int level) {
    switch (level) {
#ifdef X86
    case 2: return attend_avx512(problem, first, last, d_position_L, d_time_K);
    case 1: return attend_avx2(problem, first, last, d_position_L, d_time_K);
#endif
    default: return attend_any(problem, first, last, d_position_L, d_time_K);
    }
}

#else /* one variant */

/* Buffers for sequences of up to n positions, padded with zeros to whole vectors (suffix p). Each part of the packed
   rows of one head: rows [n, dp] and columns [d, np]. */
typedef struct {
    int64_t n, np, dp;
    float *query, *key, *value, *d_out;             /* [n, dp] */
    float *key_columns, *value_columns;             /* [d, np] */
    float *d_query, *d_key, *d_value;               /* backward, each head's: [n, dp] */
    float *bias, *d_bias, *score, *weight, *slope;  /* a block: [ROWS_AT_ONCE, np] */
    float *position, *d_position, *d_time;          /* the n nearest positions, farthest first; [BUCKETS, 8] */
    int32_t *bucket;
    void *memory;
} FN(Buffers);

static int FN(allocate)(FN(Buffers) *b, int64_t n, int64_t d) {
    b->n = n, b->np = UP(n, WIDTH), b->dp = UP(d, WIDTH);
    /* Products read whole blocks of rows, also those behind the last. */
    int64_t rows = UP(UP(n, ROWS_AT_ONCE), WIDTH) * b->dp, columns = d * b->np, block = ROWS_AT_ONCE * b->np;
    int64_t total = 7 * rows + 2 * columns + 6 * block + 2 * b->np + 8 * BUCKETS + 64 / (int64_t)sizeof(float);
    if (!(b->memory = calloc((size_t)total, sizeof(float)))) return -1;
    float *next = (float *)UP((uintptr_t)b->memory, 64);
#define TAKE(name, count) b->name = next, next += (count)
    TAKE(query, rows), TAKE(key, rows), TAKE(value, rows), TAKE(d_out, rows);
    TAKE(d_query, rows), TAKE(d_key, rows), TAKE(d_value, rows);
    TAKE(bias, block), TAKE(d_bias, block), TAKE(score, block), TAKE(weight, block), TAKE(slope, block);
    TAKE(key_columns, columns), TAKE(value_columns, columns);
    TAKE(position, b->np), TAKE(d_position, b->np), TAKE(d_time, 8 * BUCKETS);
#undef TAKE
    b->bucket = (int32_t *)next;
    return 0;
}

/* n rows of width d, `stride` apart, as rows of width dp; and as columns if there is room for them. */
static void FN(take)(const float *from, int64_t stride, int64_t n, int64_t d, float *rows, int64_t dp, float *columns,
                     int64_t np) {
    for (int64_t i = 0; i < n; i++) memcpy(rows + i * dp, from + i * stride, (size_t)d * sizeof(float));
    if (!columns) return;
    for (int64_t k = 0; k < d; k++)
        for (int64_t i = 0; i < n; i++) columns[k * np + i] = rows[i * dp + k];
}

static void FN(give)(const float *rows, int64_t dp, int64_t n, int64_t d, float *to, int64_t stride) {
    for (int64_t i = 0; i < n; i++) memcpy(to + i * stride, rows + i * dp, (size_t)d * sizeof(float));
}

/* Twice the logarithm to base 2 of a gap, rounded down to a bit of FP32's mantissa, plus 1; 0 for a gap below 1. */
INLINE int32_t FN(bucket)(int64_t gap) {
    union { float f; int32_t i; } bits = {.f = (float)gap};
    return gap < 1 ? 0 : (bits.i >> 22) - 253;
}

/* The biases of rows i0..i1 with the columns before i1, and their time buckets. */
static void FN(biases)(const Problem *q, FN(Buffers) *b, int64_t start, int64_t i0, int64_t i1) {
    for (int64_t i = i0; i < i1; i++) {
        float *bias = b->bias + (i - i0) * b->np;
        int32_t *bucket = b->bucket + (i - i0) * b->np;
        memcpy(bias, b->position + b->n - 1 - i, (size_t)(i + 1) * sizeof(float));
        if (!q->time_T) continue;
        int64_t asked = q->asked_T[start + i];
        const int64_t *time = q->time_T + start;
        for (int64_t j = 0; j <= i; j++) bucket[j] = FN(bucket)((int64_t)((uint64_t)asked - (uint64_t)time[j]));
        for (int64_t j = 0; j <= i; j++) bias[j] += q->time_K[bucket[j]];
    }
}

/* Attention weights of a block's scores, and with `slope` their derivatives; 0 where j > i. */
static void FN(weights)(FN(Buffers) *b, int64_t i0, int64_t i1, int64_t width, float scale, int with_slope) {
    for (int64_t i = i0; i < i1; i++) {
        int64_t row = (i - i0) * b->np;
        for (int64_t j = 0; j < width; j += WIDTH) {
            VF slope, weight = FN(silu)(FN(get)(b->score + row + j), &slope) * scale;
            FN(put)(b->weight + row + j, weight);
            if (with_slope) FN(put)(b->slope + row + j, slope * scale);
        }
        for (int64_t j = i + 1; j < width; j++) b->weight[row + j] = 0;
        if (with_slope)
            for (int64_t j = i + 1; j < width; j++) b->slope[row + j] = 0;
    }
}

/* Neighbors are often in one time bucket, and a sum that waits for the one before is slow: each of 8 columns has its
   own. */
static void FN(add_bias_gradients)(const Problem *q, FN(Buffers) *b, int64_t i0, int64_t i1) {
    for (int64_t i = i0; i < i1; i++) {
        const float *restrict d_bias = b->d_bias + (i - i0) * b->np;
        const int32_t *restrict bucket = b->bucket + (i - i0) * b->np;
        float *restrict d_position = b->d_position + b->n - 1 - i, *restrict d_time = b->d_time;
        for (int64_t j = 0; j <= i; j++) d_position[j] += d_bias[j];
        if (q->time_T)
            for (int64_t j = 0; j <= i; j++) d_time[bucket[j] * 8 + j % 8] += d_bias[j];
    }
}

/* One head's block of rows: the scores and what depends on them. */
static void FN(score)(FN(Buffers) *b, int64_t d, int64_t i0, int64_t rows, int64_t width) {
    FN(product)(rows, width / WIDTH, d, b->query + i0 * b->dp, b->dp, 1, b->key_columns, b->np, b->bias, b->np, b->score,
                b->np);
}

static void FN(backward_block)(const Problem *q, FN(Buffers) *b, int64_t i0, int64_t i1, int64_t width) {
    int64_t rows = i1 - i0, vectors = b->dp / WIDTH;
    const float *query = b->query + i0 * b->dp, *d_out = b->d_out + i0 * b->dp;
    FN(weights)(b, i0, i1, width, q->scale, 1);
    /* The scores' place takes the weights' gradients, then the scores' own. */
    FN(product)(rows, width / WIDTH, q->d, d_out, b->dp, 1, b->value_columns, b->np, NULL, 0, b->score, b->np);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t j = 0; j < width; j += WIDTH) {
            float *score = b->score + row * b->np + j, *d_bias = b->d_bias + row * b->np + j;
            VF d_score = FN(get)(score) * FN(get)(b->slope + row * b->np + j);
            FN(put)(score, d_score);
            FN(put)(d_bias, FN(get)(d_bias) + d_score);
        }
    FN(product)(rows, vectors, i1, b->score, b->np, 1, b->key, b->dp, NULL, 0, b->d_query + i0 * b->dp, b->dp);
    FN(product)(i1, vectors, rows, b->score, 1, b->np, query, b->dp, b->d_key, b->dp, b->d_key, b->dp);
    FN(product)(i1, vectors, rows, b->weight, 1, b->np, d_out, b->dp, b->d_value, b->dp, b->d_value, b->dp);
}

/* One sequence: forward, or backward its gradients. Each head computes the biases again, because those of a whole
   sequence would be as large as its attention weights. */
static void FN(sequence)(const Problem *q, FN(Buffers) *b, int64_t start, int64_t n, int backward) {
    int64_t wide = q->G * q->d, stride = 3 * wide, size = n * b->dp * (int64_t)sizeof(float);
    for (int64_t g = 0; g < q->G; g++) {
        const float *packed = q->packed_T3Gd + start * stride + g * q->d;
        FN(take)(packed, stride, n, q->d, b->value, b->dp, backward ? b->value_columns : NULL, b->np);
        FN(take)(packed + wide, stride, n, q->d, b->query, b->dp, NULL, b->np);
        FN(take)(packed + 2 * wide, stride, n, q->d, b->key, b->dp, b->key_columns, b->np);
        if (backward) {
            FN(take)(q->d_out_TGd + start * wide + g * q->d, wide, n, q->d, b->d_out, b->dp, NULL, b->np);
            memset(b->d_key, 0, (size_t)size), memset(b->d_value, 0, (size_t)size);
        }
        for (int64_t i0 = 0; i0 < n; i0 += ROWS_AT_ONCE) {
            int64_t i1 = MIN(i0 + ROWS_AT_ONCE, n), rows = i1 - i0, width = UP(i1, WIDTH);
            FN(biases)(q, b, start, i0, i1);
            FN(score)(b, q->d, i0, rows, width);
            if (backward) {
                memset(b->d_bias, 0, (size_t)(rows * b->np) * sizeof(float));
                FN(backward_block)(q, b, i0, i1, width);
                FN(add_bias_gradients)(q, b, i0, i1);
                continue;
            }
            FN(weights)(b, i0, i1, width, q->scale, 0);
            FN(product)(rows, b->dp / WIDTH, i1, b->weight, b->np, 1, b->value, b->dp, NULL, 0, b->d_query, b->dp);
            FN(give)(b->d_query, b->dp, rows, q->d, q->out_TGd + (start + i0) * wide + g * q->d, wide);
        }
        if (!backward) continue;
        float *d_packed = q->d_packed_T3Gd + start * stride + g * q->d;
        FN(give)(b->d_value, b->dp, n, q->d, d_packed, stride);
        FN(give)(b->d_query, b->dp, n, q->d, d_packed + wide, stride);
        FN(give)(b->d_key, b->dp, n, q->d, d_packed + 2 * wide, stride);
    }
}

static int FN(attend)(const Problem *q, int64_t first, int64_t last, float *d_position, float *d_time) {
    int64_t longest = 1;
    for (int64_t s = first; s < last; s++) longest = MAX(longest, q->bound_B[s + 1] - q->bound_B[s]);
    FN(Buffers) buffers;
    if (FN(allocate)(&buffers, longest, q->d)) return -1;
    for (int64_t back = 0; back < MIN(longest, q->L); back++) buffers.position[longest - 1 - back] = q->position_L[back];
    for (int64_t s = first; s < last; s++)
        FN(sequence)(q, &buffers, q->bound_B[s], q->bound_B[s + 1] - q->bound_B[s], d_position != NULL);
    if (d_position)
        for (int64_t back = 0; back < longest; back++) d_position[back] += buffers.d_position[longest - 1 - back];
    if (d_position && q->time_T)
        for (int64_t at = 0; at < 8 * BUCKETS; at++) d_time[at / 8] += buffers.d_time[at];
    free(buffers.memory);
    return 0;
}

#endif
