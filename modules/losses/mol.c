/* Sampled softmax over a mixture of logits (MoL), loss and gradients of some positions at once; called by mol_loss.py.

   Axes: T positions, N negatives of a group, V unique items, U query components, I item components, C their width,
   M = U * I mixture components, H hidden width of the cross gate, P pairs (position, candidate) of a chunk.
   Candidate 0 of a position is its target, candidates 1..N are its group's negatives.

   Positions are taken a chunk at a time, so that all that a chunk's backward needs stays in the second-level cache; one
   with more candidates than a chunk's pairs is a chunk by itself.
   More negatives than two tiles are taken tile after tile, once for the softmax's sums and again for the gradients.
   tiles.h includes this file once for each instruction set and precision: FN(name) is a function of one of them. */

#ifndef VARIANT

#include <stdint.h>

#include "../noise.h"

/* Mirrored in mol_loss.py. Without gradients (d_query null) only the loss is made. Gradients of the query side are
   written; all others are added to. d_* and the cross gate are FP32, the two sides are in the precision's type. */
typedef struct {
    int64_t T, N, G, U, I, C, H;
    const void *query_TUC, *query_TM, *item_VIC, *item_VM;
    const float *up_HM, *up_H, *down_MH, *down_M;
    const int64_t *target_T, *negative_GN, *bound_G;
    const int64_t *row_T;
    const float *log_q_V; /* subtracted from phi of targets and negatives; null subtracts nothing */
    const float *weight_T; /* of each position's loss; null: 1 */
    uint64_t key;
    int64_t threshold; /* dropout: 16 random bits below it drop a gate; 0 drops none */
    int64_t tile; /* most negatives at once, at least 1, where they are more than two tiles */
    float *d_query_TUC, *d_query_TM, *d_item_VIC, *d_item_VM;
    float *d_up_HM, *d_up_H, *d_down_MH, *d_down_M;
    double loss;
} Problem;

/* Of one position, over the candidates so far: the largest phi, and the sum of e^(phi - most) but for the target's. */
typedef struct {
    float most, positive;
    double others;
} Softmax;

enum { CHUNK = 640, BLOCK = 96 }; /* pairs of a chunk, pairs that pass through the gate's MLP at once (a multiple of 32) */

#define SOURCE "losses/mol.c"
#include "../tiles.h"

/* What this machine can do: 0 any, 1 AVX2, 2 AVX-512, 3 its products of BF16 numbers, 4 those of AMX. */
int mol_level(void) { return level_of_machine(); }

/* Loss and gradients of positions first..last, by what a level of those that the machine has can do: at 3 and 4
   the two sides are BF16, else FP32. 0, or -1 for want of memory. */
int mol_sampled_softmax(Problem *problem, int64_t first, int64_t last, int level) {
    unsigned before = flush_subnormals();
    int failed;
    switch (level) {
#ifdef WITH_AMX
    case 4: failed = run_amx(problem, first, last); break;
#endif
#ifdef X86
    case 3: failed = run_bf16(problem, first, last); break;
    case 2: failed = run_avx512(problem, first, last); break;
    case 1: failed = run_avx2(problem, first, last); break;
#endif
    default: failed = run_any(problem, first, last);
    }
    restore_subnormals(before);
    return failed;
}

#else /* one variant */

/* Sums over rows take a multiple of this many words. */
#ifdef AMX
#define DEEP 16
#else
#define DEEP 1
#endif

/* Words that pair rows 2k and 2k + 1 of x: the right side of a product whose inner sum runs over x's rows. Zeros follow,
   up to `deep` words of each column. */
static const void *FN(pair_rows)(
    const ELEMENT *x, int64_t row, int64_t rows, int64_t columns, int64_t deep, uint32_t *words
) {
#ifdef BF16
    memset(words + rows / 2 * row, 0, (deep - rows / 2) * row * sizeof(uint32_t));
    for (int64_t k = 0; k < rows / 2; k++)
        for (int64_t j = 0; j < columns; j += WIDTH) {
            VU low = __builtin_convertvector(*(const VHM *)(x + 2 * k * row + j), VU);
            VU high = __builtin_convertvector(*(const VHM *)(x + (2 * k + 1) * row + j), VU);
            *(VUM *)(words + k * row + j) = low | high << 16;
        }
    return words;
#else
    (void)row, (void)rows, (void)columns, (void)deep, (void)words;
    return x;
#endif
}

/* --- work ----------------------------------------------------------------------------------------------------- */

/* Row lengths are in elements and padded with zeros to whole vectors (suffix p). */
typedef struct {
    Problem *q;
    int64_t offset, N; /* the tile: negatives before it, and its own */
    int64_t M, Mp, Hp, Cp, Ip, NIp, side, Up, positions, pairs;
    /* The cross gate, for each direction: words [M/2, H], [H/2, M], [M/2, H], [H/2, M]. */
    uint32_t *up, *down, *down_back, *up_back;
    float *up_bias, *down_bias;
    /* Sums over all chunks. */
    float *d_up, *d_down, *d_up_bias, *d_down_bias;
    /* Columns of the dropout mask, and which of a row's gates are real. */
    uint32_t *column, *shift;
    int32_t *valid;
    /* A tile: negatives' words [C/2, NI] and [NI/2, C]; weights of the gate, the chunk's targets last. */
    uint32_t *item, *item_back;
    ELEMENT *item_gate;
    float *d_item, *d_item_gate;
    /* A chunk. sides: [U, N I | I], the order of the component products; otherwise rows are pairs. */
    ELEMENT *query, *query_gate, *logit, *hidden, *slope, *jacobian, *gate, *side_E, *d_side;
    uint32_t *query_words, *target, *target_back, *words;
    float *side_F, *phi, *d_query_gate, *d_target;
    /* A block. */
    float *hidden_F, *gate_F;
    ELEMENT *d_hidden, *d_gate;
    /* One row of gates. */
    float *row_s, *row_slope, *row_e, *row_kept;
} FN(Work);
#define WORK FN(Work)

/* Lays the buffers out from `base`, a multiple of 64, and gives their end. Those before `item` stay with any tile. */
static uintptr_t FN(layout)(WORK *w, uintptr_t base) {
    const Problem *q = w->q;
    int64_t per_vector = WIDTH, N1 = w->N + 1;
    w->M = q->U * q->I;
    w->Mp = UP(w->M, per_vector);
    w->Hp = UP(q->H, per_vector);
    w->Cp = UP(q->C, per_vector);
    w->Ip = UP(q->I, per_vector);
    w->NIp = UP(w->N * q->I, per_vector);
    w->side = w->NIp + w->Ip;
    w->Up = UP(q->U, PER_WORD);
    w->pairs = UP(w->positions * N1, 2) + 2;
    int64_t E = sizeof(ELEMENT), F = sizeof(float), sides = w->positions * w->Up;
    int64_t block = BLOCK;
    uintptr_t next = base;
#define TAKE(name, count, size) w->name = (void *)next, next += (uintptr_t)UP((count) * (size), 64)
    TAKE(up, (w->M + 1) * w->Hp, F);
    TAKE(down, (q->H + 1) * w->Mp, F);
    TAKE(down_back, (w->M + 1) * w->Hp, F);
    TAKE(up_back, (q->H + 1) * w->Mp, F);
    TAKE(up_bias, w->Hp, F);
    TAKE(down_bias, w->Mp, F);
    TAKE(d_up, w->M * w->Hp, F);
    TAKE(d_down, w->M * w->Hp, F);
    TAKE(d_up_bias, w->Hp, F);
    TAKE(d_down_bias, w->Mp, F);
    TAKE(column, w->Mp, F);
    TAKE(shift, w->Mp, F);
    TAKE(valid, w->Mp, F);
    TAKE(item, UP(q->C, PER_WORD) / PER_WORD * w->NIp, F);
    TAKE(item_back, UP(w->N * q->I, PER_WORD) / PER_WORD * w->Cp, F);
    TAKE(item_gate, (w->N + w->positions) * w->Mp, E);
    TAKE(d_item, q->C * w->NIp, F);
    TAKE(d_item_gate, (w->N + w->positions) * w->Mp, F);
    TAKE(query, sides * w->Cp, E);
    TAKE(query_gate, w->positions * w->Mp, E);
    TAKE(logit, w->pairs * w->Mp, E);
    TAKE(hidden, w->pairs * w->Hp, E);
    TAKE(slope, w->pairs * w->Hp, E);
    TAKE(jacobian, w->pairs * w->Mp, E);
    TAKE(gate, w->pairs * w->Mp, E);
    TAKE(side_E, w->Up * w->side, E);
    TAKE(d_side, sides * w->side, E);
    TAKE(query_words, UP(sides / PER_WORD, DEEP) * w->Cp, F);
    TAKE(target, UP(q->C, PER_WORD) / PER_WORD * w->Ip, F);
    TAKE(target_back, w->positions * UP(q->I, PER_WORD) / PER_WORD * w->Cp, F);
    TAKE(words, MAX(block / 2 * 2 * (w->Mp + w->Hp), UP(sides / PER_WORD, DEEP) * w->side), F);
    TAKE(side_F, w->Up * w->side, F);
    TAKE(phi, w->positions * UP(N1, WIDTH), F);
    TAKE(d_query_gate, w->Mp, F);
    TAKE(d_target, MAX(q->C * w->Ip, w->Up * w->Cp), F);
    TAKE(hidden_F, block * w->Hp, F);
    TAKE(gate_F, block * w->Mp, F);
    TAKE(d_hidden, block * w->Hp, E);
    TAKE(d_gate, block * w->Mp, E);
    TAKE(row_s, w->Mp, F);
    TAKE(row_slope, w->Mp, F);
    TAKE(row_e, w->Mp, F);
    TAKE(row_kept, w->Mp, F);
#undef TAKE
    return next;
}

static void FN(load_cross_gate)(WORK *w) {
    const Problem *q = w->q;
    for (int64_t h = 0; h < q->H; h++)
        for (int64_t m = 0; m < w->M; m++) {
            ELEMENT up = ROUND(q->up_HM[h * w->M + m]), down = ROUND(q->down_MH[m * q->H + h]);
            *FN(at)(w->up, w->Hp, m, h) = up;
            *FN(at)(w->up_back, w->Mp, h, m) = up;
            *FN(at)(w->down, w->Mp, h, m) = down;
            *FN(at)(w->down_back, w->Hp, m, h) = down;
        }
    memcpy(w->up_bias, q->up_H, q->H * sizeof(float));
    memcpy(w->down_bias, q->down_M, w->M * sizeof(float));
    for (int64_t m = 0; m < w->M; m++) {
        w->column[m] = column_hash(m);
        w->shift[m] = m % 2 ? 0 : 16;
        w->valid[m] = -1;
    }
}

/* One item's components as words for both directions; `to` is their first column there. */
static void FN(load_item)(
    const WORK *w, int64_t item, int64_t to, uint32_t *forward, int64_t forward_row, uint32_t *back
) {
    const Problem *q = w->q;
    const ELEMENT *x = (const ELEMENT *)q->item_VIC + item * q->I * q->C;
    for (int64_t i = 0; i < q->I; i++)
        for (int64_t c = 0; c < q->C; c++) {
            *FN(at)(forward, forward_row, c, to + i) = x[i * q->C + c];
            *FN(at)(back, w->Cp, to + i, c) = x[i * q->C + c];
        }
}

static void FN(load_tile)(WORK *w, const int64_t *negative_N) {
    const Problem *q = w->q;
    for (int64_t n = 0; n < w->N; n++) {
        FN(load_item)(w, negative_N[n], n * q->I, w->item, w->NIp, w->item_back);
        const ELEMENT *gate = (const ELEMENT *)q->item_VM + negative_N[n] * w->M;
        memcpy(w->item_gate + n * w->Mp, gate, w->M * sizeof(ELEMENT));
    }
}

static void FN(unload_tile)(WORK *w, const int64_t *negative_N) {
    const Problem *q = w->q;
    for (int64_t n = 0; n < w->N; n++) {
        float *item = q->d_item_VIC + negative_N[n] * q->I * q->C, *gate = q->d_item_VM + negative_N[n] * w->M;
        for (int64_t c = 0; c < q->C; c++)
            for (int64_t i = 0; i < q->I; i++) item[i * q->C + c] += w->d_item[c * w->NIp + n * q->I + i];
        for (int64_t m = 0; m < w->M; m++) gate[m] += w->d_item_gate[n * w->Mp + m];
    }
    memset(w->d_item, 0, q->C * w->NIp * sizeof(float));
    memset(w->d_item_gate, 0, w->N * w->Mp * sizeof(float));
}

/* --- forward -------------------------------------------------------------------------------------------------- */

/* Logits of a position with the tile's candidates, a row for each pair. */
static void FN(logits)(WORK *w, int64_t t, int64_t local) {
    const Problem *q = w->q;
    int64_t words = UP(q->C, PER_WORD) / PER_WORD, U = q->U, I = q->I, N1 = w->N + 1;
    ELEMENT *query = w->query + local * w->Up * w->Cp;
    for (int64_t u = 0; u < U; u++) {
        const ELEMENT *from = (const ELEMENT *)q->query_TUC + (t * U + u) * q->C;
        memcpy(query + u * w->Cp, from, q->C * sizeof(ELEMENT));
        for (int64_t c = 0; c < q->C; c++) *FN(at)(w->query_words, w->Cp, local * w->Up + u, c) = from[c];
    }
    memcpy(w->query_gate + local * w->Mp, (const ELEMENT *)q->query_TM + t * w->M, w->M * sizeof(ELEMENT));
    int64_t target = q->target_T[t];
    uint32_t *back = w->target_back + local * UP(I, PER_WORD) / PER_WORD * w->Cp;
    FN(load_item)(w, target, 0, w->target, w->Ip, back);
    const ELEMENT *gate = (const ELEMENT *)q->item_VM + target * w->M;
    memcpy(w->item_gate + (w->N + local) * w->Mp, gate, w->M * sizeof(ELEMENT));

    int64_t row = w->Cp / PER_WORD;
    FN(product)(U, w->NIp / WIDTH, words, query, row, 1, w->item, w->NIp, NULL, 0, w->side_F, w->side);
    FN(product)(U, w->Ip / WIDTH, words, query, row, 1, w->target, w->Ip, NULL, 0, w->side_F + w->NIp, w->side);
    for (int64_t j = 0; j < U * w->side; j += WIDTH) FN(store)(w->side_E + j, FN(get)(w->side_F + j));
    ELEMENT *logit = w->logit + local * N1 * w->Mp;
    for (int64_t n = 0; n < N1; n++, logit += w->Mp) {
        const ELEMENT *from = w->side_E + (n ? (n - 1) * I : w->NIp);
        for (int64_t u = 0; u < U; u++) copy_few(logit + u * I, from + u * w->side, I * sizeof(ELEMENT));
    }
}

/* phi of one pair from the cross gate's output z; the gates pi, and d phi / d z. */
INLINE float FN(mixture)(
    const WORK *w, const int64_t Mp, const float *z, const ELEMENT *query, const ELEMENT *item, const ELEMENT *logit,
    uint32_t hash, ELEMENT *gate, ELEMENT *jacobian
) {
    const int64_t threshold = w->q->threshold;
    VF most = FN(all)(0);
    for (int64_t j = 0; j < Mp; j += WIDTH) {
        VF slope, s = FN(silu)(FN(load)(query + j) * FN(load)(item + j) + FN(get)(z + j), &slope);
        FN(put)(w->row_s + j, s);
        FN(put)(w->row_slope + j, slope);
        most = FN(larger)(most, s);
    }
    VF top = FN(all)(FN(largest)(most)), total = FN(all)(0), kept_total = total, mixed = total;
    for (int64_t j = 0; j < Mp; j += WIDTH) {
        VF e = FN(exp)(FN(get)(w->row_s + j) - top);
        VF kept = e = (VF)((VI)e & *(const VIM *)(w->valid + j));
        total += e;
        if (threshold) {
            VU x = *(const VUM *)(w->column + j) ^ hash;
            x = (x ^ x >> 16) * FIRST;
            x = (x ^ x >> 15) * SECOND;
            x = (x ^ x >> 15) << *(const VUM *)(w->shift + j);
            kept = (VF)((VI)e & ((VI)x >= (int32_t)((uint32_t)(threshold - 32768) << 16)));
            kept_total += kept;
        }
        FN(put)(w->row_e + j, e);
        FN(put)(w->row_kept + j, kept);
        mixed += kept * FN(load)(logit + j);
    }
    float sum = FN(sum)(total), part = sum, scale = 1.0f / sum, phi;
    int starved = 0;
    if (threshold) {
        part = FN(sum)(kept_total);
        /* What dropout leaves is scaled, then renormalised by its sum, which counts as at least 1e-6. */
        float rescale = 65536.0f / (65536 - threshold);
        starved = !(rescale * part / sum >= 1e-6f);
        scale = starved ? rescale / sum / 1e-6f : 1.0f / part;
    }
    phi = FN(sum)(mixed) * scale;
    for (int64_t j = 0; j < Mp; j += WIDTH) {
        VF pi = FN(get)(w->row_kept + j) * scale, l = FN(load)(logit + j), d = pi * (l - phi);
        if (starved) d = pi * l - FN(get)(w->row_e + j) * (phi / sum);
        FN(store)(gate + j, pi);
        FN(store)(jacobian + j, d * FN(get)(w->row_slope + j));
    }
    return phi;
}

/* The gate's MLP and phi, for pairs first..last of the chunk that starts at position `start`. */
static void FN(gates)(WORK *w, int64_t start, int64_t first, int64_t last) {
    const Problem *q = w->q;
    int64_t rows = last - first, N1 = w->N + 1, Mp = w->Mp, Hp = w->Hp;
    int64_t M_words = UP(w->M, PER_WORD) / PER_WORD, H_words = UP(q->H, PER_WORD) / PER_WORD;
    FN(product)(rows, Hp / WIDTH, M_words, w->logit + first * Mp, Mp / PER_WORD, 1, w->up, Hp, w->up_bias, 0,
                w->hidden_F, Hp);
    ELEMENT *hidden = w->hidden + first * Hp, *slope = w->slope + first * Hp;
    for (int64_t j = 0; j < rows * Hp; j += WIDTH) {
        VF d;
        FN(store)(hidden + j, FN(silu)(FN(get)(w->hidden_F + j), &d));
        FN(store)(slope + j, d);
    }
    FN(product)(rows, Mp / WIDTH, H_words, hidden, Hp / PER_WORD, 1, w->down, Mp, w->down_bias, 0, w->gate_F, Mp);
    int64_t local = first / N1, n = first % N1;
    for (int64_t r = 0; r < rows; r++) {
        int64_t candidate = n ? w->offset + n : 0;
        uint32_t hash = q->threshold ? row_hash(q->key, q->row_T[start + local] * (q->N + 1) + candidate) : 0;
        const ELEMENT *query = w->query_gate + local * Mp;
        const ELEMENT *item = w->item_gate + (n ? n - 1 : w->N + local) * Mp, *logit = w->logit + (first + r) * Mp;
        const float *z = w->gate_F + r * Mp;
        ELEMENT *gate = w->gate + (first + r) * Mp, *jacobian = w->jacobian + (first + r) * Mp;
        float *phi = w->phi + local * UP(N1, WIDTH) + n;
        /* The usual number of components, as a constant. */
        if (Mp == 64)
            *phi = FN(mixture)(w, 64, z, query, item, logit, hash, gate, jacobian);
        else
            *phi = FN(mixture)(w, Mp, z, query, item, logit, hash, gate, jacobian);
        if (++n == N1) n = 0, local++;
    }
}

/* Corrects a position's phi by log q, and takes out the negatives that are its target. */
static void FN(correct)(const WORK *w, int64_t target, const int64_t *negative_N, float *phi) {
    const float *log_q = w->q->log_q_V;
    if (log_q) {
        phi[0] -= log_q[target];
        for (int64_t n = 1; n <= w->N; n++) phi[n] -= log_q[negative_N[n - 1]];
    }
    for (int64_t n = 1; n <= w->N; n++)
        if (negative_N[n - 1] == target) phi[n] = -INFINITY;
    for (int64_t n = w->N + 1; n < UP(w->N + 1, WIDTH); n++) phi[n] = -INFINITY;
}

INLINE VF FN(exp_or_zero)(VF x, float most) { return (VF)((VI)FN(exp)(x - most) & (x != -INFINITY)); }

/* Adds the tile's candidates. */
static void FN(add)(const WORK *w, const float *phi, Softmax *sum) {
    if (!w->offset) *sum = (Softmax){.most = phi[0], .positive = phi[0]};
    float most = sum->most;
    for (int64_t n = 1; n <= w->N; n++) most = MAX(most, phi[n]);
    sum->others *= exp((double)sum->most - most);
    sum->most = most;
    for (int64_t n = 0; n <= w->N; n += WIDTH) {
        VF e = FN(exp_or_zero)(FN(get)(phi + n), most);
        for (int64_t lane = n ? 0 : 1; lane < WIDTH; lane++) sum->others += e[lane];
    }
}

INLINE double FN(total)(const Softmax *sum) { return sum->others + exp((double)sum->positive - sum->most); }

static double FN(weight)(const Problem *q, int64_t t) { return q->weight_T ? q->weight_T[t] : 1; }

/* phi becomes the gradient of -log softmax of the target. */
static void FN(differentiate)(const WORK *w, const Softmax *sum, double weight, float *phi) {
    double total = FN(total)(sum);
    float inverse = (float)(weight / total);
    for (int64_t n = 0; n <= w->N; n += WIDTH)
        FN(put)(phi + n, FN(exp_or_zero)(FN(get)(phi + n), sum->most) * inverse);
    /* Minus one, as the sum of the others: no cancellation. The target counts with the first tile. */
    phi[0] = w->offset ? 0 : (float)-(weight * sum->others / total);
}

/* --- backward ------------------------------------------------------------------------------------------------- */

/* Gradients of a position: its first tile writes them, the others add to them. */
INLINE void FN(deliver)(const WORK *w, float *to, const float *d, int64_t count) {
    for (int64_t j = 0; j < count; j++) to[j] = w->offset ? to[j] + d[j] : d[j];
}

/* Gradients through the gates' weights, rows of one position: pairs row.. of the block at `first`, candidates n... */
static void FN(weights_back)(WORK *w, int64_t first, int64_t row, int64_t rows, int64_t local, int64_t n) {
    int64_t Mp = w->Mp;
    const float *d_phi = w->phi + local * UP(w->N + 1, WIDTH) + n;
    const ELEMENT *query = w->query_gate + local * Mp, *jacobian = w->jacobian + (first + row) * Mp;
    ELEMENT *d_gate = w->d_gate + row * Mp;
    for (int64_t j = 0; j < Mp; j += WIDTH) {
        VF weight = FN(load)(query + j), d_query = FN(get)(w->d_query_gate + j), bias = FN(get)(w->d_down_bias + j);
        for (int64_t r = 0; r < rows; r++) {
            int64_t item = (n + r ? n + r - 1 : w->N + local) * Mp + j;
            VF d = FN(load)(jacobian + r * Mp + j) * d_phi[r];
            FN(store)(d_gate + r * Mp + j, d);
            bias += d;
            d_query += d * FN(load)(w->item_gate + item);
            FN(put)(w->d_item_gate + item, FN(get)(w->d_item_gate + item) + d * weight);
        }
        FN(put)(w->d_query_gate + j, d_query);
        FN(put)(w->d_down_bias + j, bias);
    }
}

/* Gradients of the gate's MLP and of the logits, which go to d_side, for pairs first..last. */
static void FN(gates_back)(WORK *w, int64_t start, int64_t first, int64_t last) {
    const Problem *q = w->q;
    int64_t rows = last - first, N1 = w->N + 1, Mp = w->Mp, Hp = w->Hp, I = q->I;
    int64_t M_words = UP(w->M, PER_WORD) / PER_WORD, H_words = UP(q->H, PER_WORD) / PER_WORD;
    for (int64_t row = 0; row < rows;) {
        int64_t local = (first + row) / N1, n = (first + row) % N1, count = MIN(rows - row, N1 - n);
        FN(weights_back)(w, first, row, count, local, n);
        row += count;
        if (n + count == N1) {
            FN(deliver)(w, q->d_query_TM + (start + local) * w->M, w->d_query_gate, w->M);
            memset(w->d_query_gate, 0, Mp * sizeof(float));
        }
    }
    FN(product)(rows, Hp / WIDTH, M_words, w->d_gate, Mp / PER_WORD, 1, w->down_back, Hp, NULL, 0, w->hidden_F, Hp);
    const ELEMENT *slope = w->slope + first * Hp;
    for (int64_t j = 0; j < Hp; j += WIDTH) {
        VF bias = FN(get)(w->d_up_bias + j);
        for (int64_t r = 0; r < rows; r++) {
            VF d = FN(get)(w->hidden_F + r * Hp + j) * FN(load)(slope + r * Hp + j);
            FN(store)(w->d_hidden + r * Hp + j, d);
            bias += d;
        }
        FN(put)(w->d_up_bias + j, bias);
    }
    FN(product)(rows, Mp / WIDTH, H_words, w->d_hidden, Hp / PER_WORD, 1, w->up_back, Mp, NULL, 0, w->gate_F, Mp);

    int64_t even = UP(rows, PER_WORD), deep = UP(even / PER_WORD, DEEP);
    if (even > rows) {
        memset(w->d_gate + rows * Mp, 0, Mp * sizeof(ELEMENT));
        memset(w->d_hidden + rows * Hp, 0, Hp * sizeof(ELEMENT));
    }
    /* For d_up [M, H] = logit^T d_hidden and d_down [M, H] = d_gate^T hidden. */
    uint32_t *words = w->words;
    const void *logit = FN(pair_rows)(w->logit + first * Mp, Mp, even, Mp, deep, words);
    const void *d_hidden = FN(pair_rows)(w->d_hidden, Hp, even, Hp, deep, words += BLOCK / 2 * Mp);
    FN(product)(w->M, Hp / WIDTH, deep, logit, 1, Mp, d_hidden, Hp, w->d_up, Hp, w->d_up, Hp);
    const void *d_gate = FN(pair_rows)(w->d_gate, Mp, even, Mp, deep, words += BLOCK / 2 * Hp);
    const void *hidden = FN(pair_rows)(w->hidden + first * Hp, Hp, even, Hp, deep, words += BLOCK / 2 * Mp);
    FN(product)(w->M, Hp / WIDTH, deep, d_gate, 1, Mp, hidden, Hp, w->d_down, Hp, w->d_down, Hp);

    int64_t local = first / N1, n = first % N1;
    for (int64_t r = 0; r < rows; r++) {
        float d_phi = w->phi[local * UP(N1, WIDTH) + n];
        /* Its place in d_gate is free by now. */
        ELEMENT *d_logit = w->d_gate + r * Mp;
        const ELEMENT *gate = w->gate + (first + r) * Mp;
        for (int64_t j = 0; j < Mp; j += WIDTH)
            FN(store)(d_logit + j, FN(get)(w->gate_F + r * Mp + j) + FN(load)(gate + j) * d_phi);
        ELEMENT *to = w->d_side + local * w->Up * w->side + (n ? (n - 1) * I : w->NIp);
        for (int64_t u = 0; u < q->U; u++) copy_few(to + u * w->side, d_logit + u * I, I * sizeof(ELEMENT));
        if (++n == N1) n = 0, local++;
    }
}

/* Gradients of the components, from d_side: positions start..start + count. */
static void FN(components_back)(WORK *w, int64_t start, int64_t count) {
    const Problem *q = w->q;
    int64_t U = q->U, I = q->I, C = q->C, Cp = w->Cp, Ip = w->Ip, row = w->side / PER_WORD;
    int64_t I_words = UP(I, PER_WORD) / PER_WORD, NI_words = UP(w->N * I, PER_WORD) / PER_WORD;
    int64_t U_words = w->Up / PER_WORD, deep = UP(count * U_words, DEEP);
    for (int64_t local = 0; local < count; local++) {
        const ELEMENT *d_side = w->d_side + local * w->Up * w->side;
        float *d = w->d_target;
        FN(product)(U, Cp / WIDTH, I_words, d_side + w->NIp, row, 1, w->target_back + local * I_words * Cp, Cp, NULL,
                    0, d, Cp);
        if (NI_words) FN(product)(U, Cp / WIDTH, NI_words, d_side, row, 1, w->item_back, Cp, d, Cp, d, Cp);
        for (int64_t u = 0; u < U; u++)
            FN(deliver)(w, q->d_query_TUC + ((start + local) * U + u) * C, d + u * Cp, C);
        const void *words = FN(pair_rows)(d_side + w->NIp, w->side, w->Up, Ip, U_words, w->words);
        FN(product)(C, Ip / WIDTH, U_words, w->query_words + local * U_words * Cp, 1, Cp, words, w->side, NULL, 0, d,
                    Ip);
        int64_t target = q->target_T[start + local];
        float *item = q->d_item_VIC + target * I * C, *gate = q->d_item_VM + target * w->M;
        for (int64_t i = 0; i < I; i++)
            for (int64_t c = 0; c < C; c++) item[i * C + c] += d[c * Ip + i];
        float *d_gate = w->d_item_gate + (w->N + local) * w->Mp;
        for (int64_t m = 0; m < w->M; m++) gate[m] += d_gate[m], d_gate[m] = 0;
    }
    const void *words = FN(pair_rows)(w->d_side, w->side, count * w->Up, w->NIp, deep, w->words);
    FN(product)(C, w->NIp / WIDTH, deep, w->query_words, 1, Cp, words, w->side, w->d_item, w->NIp,
                w->d_item, w->NIp);
}

static void FN(unload_cross_gate)(const WORK *w) {
    const Problem *q = w->q;
    for (int64_t m = 0; m < w->M; m++)
        for (int64_t h = 0; h < q->H; h++) {
            q->d_up_HM[h * w->M + m] += w->d_up[m * w->Hp + h];
            q->d_down_MH[m * q->H + h] += w->d_down[m * w->Hp + h];
        }
    for (int64_t h = 0; h < q->H; h++) q->d_up_H[h] += w->d_up_bias[h];
    for (int64_t m = 0; m < w->M; m++) q->d_down_M[m] += w->d_down_bias[m];
}

/* --- chunks --------------------------------------------------------------------------------------------------- */

/* Positions start..start + count with the tile's candidates: adds to the sums, or makes gradients by them, or both. */
static void FN(chunk)(
    WORK *w, int64_t start, int64_t count, const int64_t *negative_N, Softmax *sums, int forward, int backward
) {
    const Problem *q = w->q;
    int64_t N1 = w->N + 1, pairs = count * N1, blocks = (pairs + BLOCK - 1) / BLOCK;
    int64_t size = UP((pairs + blocks - 1) / blocks, 2 * DEEP);
    for (int64_t local = 0; local < count; local++) FN(logits)(w, start + local, local);
    for (int64_t first = 0; first < pairs; first += size) FN(gates)(w, start, first, MIN(first + size, pairs));
    for (int64_t local = 0; local < count; local++) {
        float *phi = w->phi + local * UP(N1, WIDTH);
        FN(correct)(w, q->target_T[start + local], negative_N, phi);
        if (forward) FN(add)(w, phi, sums + local);
        if (backward) FN(differentiate)(w, sums + local, FN(weight)(q, start + local), phi);
    }
    if (backward) {
        for (int64_t first = 0; first < pairs; first += size) FN(gates_back)(w, start, first, MIN(first + size, pairs));
        FN(components_back)(w, start, count);
    }
}

/* Positions start..end, which share negatives, tile by tile. */
static void FN(group)(
    WORK *w, uintptr_t base, int64_t start, int64_t end, const int64_t *negative_N, int64_t size, Softmax *sums,
    int forward, int backward
) {
    for (int64_t offset = 0; !offset || offset < w->q->N; offset += size) {
        int64_t N = MIN(size, w->q->N - offset);
        w->offset = offset;
        if (N != w->N) {
            /* Padding has another place now, and must be zero there. */
            w->N = N;
            uintptr_t last = FN(layout)(w, base);
            memset(w->item, 0, last - (uintptr_t)w->item);
        }
        FN(load_tile)(w, negative_N + offset);
        for (int64_t t = start; t < end; t += w->positions)
            FN(chunk)(w, t, MIN(w->positions, end - t), negative_N + offset, sums + t - start, forward, backward);
        if (backward) FN(unload_tile)(w, negative_N + offset);
    }
}

static int FN(run)(Problem *q, int64_t first, int64_t last) {
    int64_t tiles = q->N > 2 * q->tile ? (q->N + q->tile - 1) / q->tile : 1;
    int64_t size = MAX(1, (q->N + tiles - 1) / tiles);
    WORK w = {.q = q, .N = MIN(size, q->N), .positions = MAX(1, CHUNK / (size + 1))};
    void *memory = calloc(1, FN(layout)(&w, 0) + 64);
    Softmax *sums = calloc(MAX(1, last - first), sizeof(Softmax));
    if (!memory || !sums) {
        free(memory), free(sums);
        return -1;
    }
    uintptr_t base = UP((uintptr_t)memory, 64);
    FN(layout)(&w, base);
    FN(load_cross_gate)(&w);
    double loss = 0;
    for (int64_t g = 0; g < q->G; g++) {
        int64_t start = MAX(first, q->bound_G[g]), end = MIN(last, q->bound_G[g + 1]);
        if (start >= end) continue;
        const int64_t *negative_N = q->negative_GN + g * q->N;
        int backward = q->d_query_TUC != NULL;
        FN(group)(&w, base, start, end, negative_N, size, sums, 1, backward && tiles == 1);
        if (backward && tiles > 1) FN(group)(&w, base, start, end, negative_N, size, sums, 0, 1);
        for (int64_t t = 0; t < end - start; t++)
            loss += FN(weight)(q, start + t) * (sums[t].most - sums[t].positive + log(FN(total)(sums + t)));
    }
    if (q->d_query_TUC) FN(unload_cross_gate)(&w);
    q->loss = loss;
    free(memory), free(sums);
    return 0;
}

#undef WORK
#undef DEEP

#endif
