/* Similarities by a mixture of logits (MoL) of queries with candidates of their own; called by mol_scores.py.

   Axes: B queries, P pairs (query, candidate), sorted by query, X items, U query components, I item components, C their
   width, M = U * I mixture components, H hidden width of the cross gate, N candidates of a block.

   A query's candidates are taken a block at a time, which stays in the first-level cache. Their rows are read from
   where the items are stored: there is no copy of them, and rows of the next block are requested ahead.
   tiles.h includes this file once for each instruction set and precision: FN(name) is a function of one of them. That
   with products of INT8 numbers is in mol_scores_int8.h. */

#ifndef VARIANT

#include <stdint.h>

/* How the items' numbers are stored: mirrored in mol_scores.py. */
enum { FP32, BFLOAT16, FP16, INT8 };
static const int SIZES[] = {4, 2, 2, 1};

/* Mirrored in mol_scores.py. */
typedef struct {
    int64_t U, I, C, H;
    const float *query_BUC, *query_BM;
    const void *item_XIC, *item_XM;
    int64_t components, weights; /* how these two are stored */
    const float *up_HM, *up_H, *down_MH, *down_M;
    const int64_t *item_P, *bound_B; /* the candidates of query b are pairs bound_B[b] to bound_B[b + 1] */
    float *score_P;
} Scores;

enum { BLOCK = 24, TURN = 256 };

/* Calls score(work, b, from, stop) for all pairs first..last, those of several queries in turns: TURN of the first one,
   then of each other those whose items come no later. So where candidates ascend, rows that are candidates of several
   queries, and the addresses of memory's pages, are still in the caches for the next one. The scores do not depend on
   the order. -1 for want of memory. */
static int in_turns(
    const Scores *q, int64_t first, int64_t last, void *work, void (*score)(void *, int64_t, int64_t, int64_t)
);

#define SOURCE "similarity/mol_scores.c"
#define WITH_INT8
#include "../tiles.h"

static int in_turns(
    const Scores *q, int64_t first, int64_t last, void *work, void (*score)(void *, int64_t, int64_t, int64_t)
) {
    if (first >= last) return 0;
    int64_t b = 0, end = 1;
    while (q->bound_B[b + 1] <= first) b++;
    while (q->bound_B[end] < last) end++;
    int64_t *next_B = malloc((size_t)end * sizeof(int64_t));
    if (!next_B) return -1;
    for (int64_t of = b; of < end; of++) next_B[of] = MAX(first, q->bound_B[of]);
    for (; b < end; b++)
        while (next_B[b] < MIN(last, q->bound_B[b + 1])) {
            int64_t furthest = 0;
            for (int64_t of = b; of < end; of++) {
                int64_t from = next_B[of], stop = from, most = MIN(last, q->bound_B[of + 1]);
                if (of == b) stop = MIN(from + TURN, most), furthest = q->item_P[stop - 1];
                while (of > b && stop < most && q->item_P[stop] <= furthest) stop++;
                if (stop > from) score(work, of, from, stop);
                next_B[of] = stop;
            }
        }
    free(next_B);
    return 0;
}

/* Whether the machine has a level: those of level_of_machine, and 5, products of INT8 numbers. */
int mol_scores_has(int level) {
#ifdef X86
    if (level == 5) return level_of_machine() >= 2 && __builtin_cpu_supports("avx512vnni");
#endif
    return level <= level_of_machine();
}

/* Scores of pairs first..last, by what a level that the machine has can do: at 3 and 4 products are of BF16 numbers,
   at 5 of INT8 (see mol_scores_int8.h for its limits), else of FP32. 0, or -1 for want of memory. */
int mol_scores(const Scores *scores, int64_t first, int64_t last, int level) {
    unsigned before = flush_subnormals();
    int failed;
    switch (level) {
#ifdef X86
    case 5: failed = run_int8(scores, first, last); break;
#ifdef WITH_AMX
    case 4: failed = run_amx(scores, first, last); break;
#endif
    case 3: failed = run_bf16(scores, first, last); break;
    case 2: failed = run_avx512(scores, first, last); break;
    case 1: failed = run_avx2(scores, first, last); break;
#endif
    default: failed = run_any(scores, first, last);
    }
    restore_subnormals(before);
    return failed;
}

#else /* one variant */

/* e^x, zero and infinite beyond the range. 4e-6 in BF16, for which FN(exp) takes about twice as long. */
INLINE VF FN(power)(VF x) {
#if defined(BF16) || defined(INT8_PRODUCTS)
    x *= 1.44269504f;
    __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    VF r = x - (VF)whole;
    /* 2^r for r in [-0.5, 0.5]. */
    VF p = ((0.05550410866f * r + 0.24022650696f) * r + 0.69314718056f) * r + 1.0f;
    return (VF)_mm512_scalef_ps((__m512)p, whole);
#else
    return FN(exp)(x);
#endif
}

/* x / (1 + e^-x). */
INLINE VF FN(gated)(VF x) { return x * FN(inverse)(1.0f + FN(power)(-x)); }

#ifdef INT8_PRODUCTS
#include "mol_scores_int8.h"
#else

/* Row lengths are in elements and padded with zeros to whole vectors (suffix p). */
typedef struct {
    const Scores *q;
    int64_t M, Mp, Hp, Cp, NIp;
    uint32_t *up, *down; /* the cross gate: words [M/2, H] and [H/2, M] */
    float *up_bias, *down_bias;
    int32_t *valid; /* which of a row's gates are real */
    ELEMENT *query;
    float *query_gate;
    /* A block. */
    ELEMENT *row, *item_gate, *side_E, *logit, *hidden;
    uint32_t *item; /* words [C/2, N I] */
    float *side_F, *hidden_F, *gate_F;
    float *row_s;
    const char **ahead; /* lines of memory that the next block reads */
} FN(Work);
#define WORK FN(Work)

/* Lays the buffers out from `base`, a multiple of 64, and gives their end. */
static uintptr_t FN(layout)(WORK *w, uintptr_t base) {
    const Scores *q = w->q;
    int64_t per_vector = WIDTH, E = sizeof(ELEMENT), F = sizeof(float);
    w->M = q->U * q->I;
    w->Mp = UP(w->M, per_vector);
    w->Hp = UP(q->H, per_vector);
    w->Cp = UP(q->C, per_vector);
    w->NIp = UP(BLOCK * q->I, per_vector);
    uintptr_t next = base;
#define TAKE(name, count, size) w->name = (void *)next, next += (uintptr_t)UP((count) * (size), 64)
    TAKE(up, (w->M + 1) * w->Hp, F);
    TAKE(down, (q->H + 1) * w->Mp, F);
    TAKE(up_bias, w->Hp, F);
    TAKE(down_bias, w->Mp, F);
    TAKE(valid, w->Mp, F);
    TAKE(query, q->U * w->Cp, E);
    TAKE(query_gate, w->Mp, F);
    TAKE(row, BLOCK * UP(q->I * q->C, per_vector), E);
    TAKE(item_gate, BLOCK * w->Mp, E);
    TAKE(side_E, q->U * w->NIp, E);
    TAKE(logit, BLOCK * w->Mp, E);
    TAKE(hidden, BLOCK * w->Hp, E);
    TAKE(item, UP(q->C, PER_WORD) / PER_WORD * w->NIp, F);
    TAKE(side_F, q->U * w->NIp, F);
    TAKE(hidden_F, BLOCK * w->Hp, F);
    TAKE(gate_F, BLOCK * w->Mp, F);
    TAKE(row_s, w->Mp, F);
    int64_t lines = q->I * q->C * SIZES[q->components] / 64 + w->M * SIZES[q->weights] / 64 + 2;
    TAKE(ahead, BLOCK * lines, sizeof(char *));
#undef TAKE
    return next;
}

static void FN(load_cross_gate)(WORK *w) {
    const Scores *q = w->q;
    for (int64_t h = 0; h < q->H; h++)
        for (int64_t m = 0; m < w->M; m++) {
            *FN(at)(w->up, w->Hp, m, h) = ROUND(q->up_HM[h * w->M + m]);
            *FN(at)(w->down, w->Mp, h, m) = ROUND(q->down_MH[m * q->H + h]);
        }
    memcpy(w->up_bias, q->up_H, q->H * sizeof(float));
    memcpy(w->down_bias, q->down_M, w->M * sizeof(float));
    for (int64_t m = 0; m < w->M; m++) w->valid[m] = -1;
}

static void FN(load_query)(WORK *w, int64_t b) {
    const Scores *q = w->q;
    for (int64_t u = 0; u < q->U; u++)
        for (int64_t c = 0; c < q->C; c++)
            w->query[u * w->Cp + c] = ROUND(q->query_BUC[(b * q->U + u) * q->C + c]);
    memcpy(w->query_gate, q->query_BM + b * w->M, w->M * sizeof(float));
}

/* --- items ---------------------------------------------------------------------------------------------------- */

INLINE VI FN(widen)(const void *p) {
#if defined(AVX512)
    return (VI)_mm512_cvtepi8_epi32(_mm_loadu_si128(p));
#elif defined(AVX2)
    return (VI)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p));
#else
    return __builtin_convertvector(*(const VBM *)p, VI);
#endif
}

/* A vector of stored numbers, which are finite. */
INLINE VF FN(stored)(int64_t type, const void *p) {
    if (type == FP32) return *(const VFM *)p;
    if (type == INT8) return __builtin_convertvector(FN(widen)(p), VF);
    VU bits = __builtin_convertvector(*(const VHM *)p, VU);
    if (type == BFLOAT16) return (VF)(bits << 16);
    /* FP16: the exponent's bias differs by 112. */
    VF size = (VF)((bits & 0x7fff) << 13) * 0x1p112f;
    return (VF)((VU)size | (bits & 0x8000) << 16);
}

INLINE void FN(convert_all)(int64_t type, const char *from, ELEMENT *to, int64_t count) {
    int64_t j = 0;
    for (; j + WIDTH <= count; j += WIDTH) FN(store)(to + j, FN(stored)(type, from + j * SIZES[type]));
    if (j < count) {
        char last[4 * WIDTH] = {0};
        memcpy(last, from + j * SIZES[type], (size_t)((count - j) * SIZES[type]));
        VF x = FN(stored)(type, last);
        for (; j < count; j++) to[j] = ROUND(x[j % WIDTH]);
    }
}

/* Stored numbers as elements. */
static void FN(convert)(int64_t type, const char *from, ELEMENT *to, int64_t count) {
    switch (type) {
    case FP32: FN(convert_all)(FP32, from, to, count); break;
    case BFLOAT16: FN(convert_all)(BFLOAT16, from, to, count); break;
    case FP16: FN(convert_all)(FP16, from, to, count); break;
    default: FN(convert_all)(INT8, from, to, count);
    }
}

/* Components of the block's items as words for a product from the right. */
static void FN(load_words)(WORK *w, const ELEMENT *const *item_N, int64_t N) {
    int64_t I = w->q->I, C = w->q->C, n = 0;
#ifdef AVX512
    if (C * (int64_t)sizeof(ELEMENT) % 64 == 0 && 16 % I == 0)
        for (int64_t items = 16 / I; n + items <= N; n += items) {
            const uint32_t *row[16], **next = row;
            for (int64_t of = 0; of < items; of++)
                for (int64_t i = 0; i < I; i++) *next++ = (const uint32_t *)(item_N[n + of] + i * C);
            for (int64_t k = 0; k < C / PER_WORD; k += 16) FN(transpose)(row, k, w->item + k * w->NIp + n * I, w->NIp);
        }
#endif
    for (; n < N; n++)
        for (int64_t i = 0; i < I; i++)
            for (int64_t c = 0; c < C; c++) *FN(at)(w->item, w->NIp, c, n * I + i) = item_N[n][i * C + c];
}

/* The lines of memory that hold some bytes. */
INLINE const char **FN(lines)(const char *from, int64_t bytes, const char **line) {
    for (int64_t at = 0; at < bytes; at += 64) *line++ = from + at;
    return line;
}

/* Those of some items' rows, whose number is returned. */
static int64_t FN(lines_of_items)(const Scores *q, const int64_t *item_N, int64_t N, const char **line) {
    int64_t components = q->I * q->C * SIZES[q->components], weights = q->U * q->I * SIZES[q->weights];
    const char **next = line;
    for (int64_t n = 0; n < N; n++) {
        next = FN(lines)((const char *)q->item_XIC + item_N[n] * components, components, next);
        next = FN(lines)((const char *)q->item_XM + item_N[n] * weights, weights, next);
    }
    return next - line;
}

/* The block's items: components as words, and weights of the gate. */
static void FN(load_items)(WORK *w, const int64_t *item_N, int64_t N) {
    const Scores *q = w->q;
    int64_t components = q->I * q->C, bytes = components * SIZES[q->components], weights = w->M * SIZES[q->weights];
    const char *of_components = q->item_XIC, *of_weights = q->item_XM;
    int stored = q->components == (PER_WORD == 2 ? BFLOAT16 : FP32);
    const ELEMENT *row_N[BLOCK];
    for (int64_t n = 0; n < N; n++) {
        const char *from = of_components + item_N[n] * bytes;
        ELEMENT *to = w->row + n * UP(components, WIDTH);
        if (!stored) FN(convert)(q->components, from, to, components);
        row_N[n] = stored ? (const ELEMENT *)from : to;
        FN(convert)(q->weights, of_weights + item_N[n] * weights, w->item_gate + n * w->Mp, w->M);
    }
    FN(load_words)(w, row_N, N);
}

/* --- scores --------------------------------------------------------------------------------------------------- */

/* phi of one pair from the cross gate's output z. */
INLINE float FN(mixture)(const WORK *w, const int64_t Mp, const float *z, const ELEMENT *item, const ELEMENT *logit) {
    VF most = FN(all)(0), total = most, mixed = most;
    for (int64_t j = 0; j < Mp; j += WIDTH) {
        VF s = FN(gated)(FN(get)(w->query_gate + j) * FN(load)(item + j) + FN(get)(z + j));
        FN(put)(w->row_s + j, s);
        most = FN(larger)(most, s);
    }
    VF top = FN(all)(FN(largest)(most));
    for (int64_t j = 0; j < Mp; j += WIDTH) {
        VF e = FN(power)(FN(get)(w->row_s + j) - top);
        e = (VF)((VI)e & *(const VIM *)(w->valid + j));
        total += e;
        mixed += e * FN(load)(logit + j);
    }
    return FN(sum)(mixed) / FN(sum)(total);
}

/* `ahead` items follow in the next block. */
static void FN(block)(WORK *w, const int64_t *item_N, int64_t N, int64_t ahead, float *score_N) {
    const Scores *q = w->q;
    int64_t U = q->U, I = q->I, Mp = w->Mp, Hp = w->Hp, wide = UP(N * I, WIDTH);
    int64_t C_words = UP(q->C, PER_WORD) / PER_WORD, M_words = UP(w->M, PER_WORD) / PER_WORD;
    int64_t H_words = UP(q->H, PER_WORD) / PER_WORD;
    FN(load_items)(w, item_N, N);
    FN(product)(U, wide / WIDTH, C_words, w->query, w->Cp / PER_WORD, 1, w->item, w->NIp, NULL, 0, w->side_F, w->NIp);
    for (int64_t u = 0; u < U; u++)
        for (int64_t j = 0; j < wide; j += WIDTH)
            FN(store)(w->side_E + u * w->NIp + j, FN(get)(w->side_F + u * w->NIp + j));
    for (int64_t n = 0; n < N; n++)
        for (int64_t u = 0; u < U; u++)
            copy_few(w->logit + n * Mp + u * I, w->side_E + u * w->NIp + n * I, I * sizeof(ELEMENT));
    FN(product_ahead)(N, Hp / WIDTH, M_words, w->logit, Mp / PER_WORD, 1, w->up, Hp, w->up_bias, 0, w->hidden_F, Hp,
                      w->ahead, FN(lines_of_items)(q, item_N + N, ahead, w->ahead));
    for (int64_t j = 0; j < N * Hp; j += WIDTH) FN(store)(w->hidden + j, FN(gated)(FN(get)(w->hidden_F + j)));
    FN(product)(N, Mp / WIDTH, H_words, w->hidden, Hp / PER_WORD, 1, w->down, Mp, w->down_bias, 0, w->gate_F, Mp);
    for (int64_t n = 0; n < N; n++) {
        const float *z = w->gate_F + n * Mp;
        const ELEMENT *item = w->item_gate + n * Mp, *logit = w->logit + n * Mp;
        /* The usual number of components, as a constant. */
        score_N[n] = Mp == 64 ? FN(mixture)(w, 64, z, item, logit) : FN(mixture)(w, Mp, z, item, logit);
    }
}

/* Pairs first..last, all of query b. */
static void FN(pairs)(void *work, int64_t b, int64_t first, int64_t last) {
    WORK *w = work;
    const Scores *q = w->q;
    FN(load_query)(w, b);
    for (int64_t N; first < last; first += N) {
        N = MIN(BLOCK, last - first);
        FN(block)(w, q->item_P + first, N, MIN(N, last - first - N), q->score_P + first);
    }
}

static int FN(run)(const Scores *q, int64_t first, int64_t last) {
    WORK w = {.q = q};
    void *memory = calloc(1, FN(layout)(&w, 0) + 64);
    if (!memory) return -1;
    FN(layout)(&w, UP((uintptr_t)memory, 64));
    FN(load_cross_gate)(&w);
    int failed = in_turns(q, first, last, &w, FN(pairs));
    free(memory);
    return failed;
}

#undef WORK

#endif

#endif
