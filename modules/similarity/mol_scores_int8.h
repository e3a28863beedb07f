/* The scores of mol_scores.c for items with INT8 components, in products of INT8 numbers (AVX-512 VNNI); included by
   it. Axes as there; N candidates of a block.

   Items' components are multiplied as they are stored. The query's become 0..255, positive and negative parts apart,
   with a scale for each component. The cross gate's weights become -127..127, with a scale for each output. What enters
   its layers becomes 0..255, with a scale for each pair: logits in steps of max |logit| / 127 from -128 on, the hidden
   layer in steps of (maximum - LEAST) / 255 from LEAST on, below which SiLU never is. Sums of products are exact. All
   else is FP32, also the logits that are mixed.

   For up to 8 x 8 components whose width is a multiple of 4, and gating weights in BF16. Logit (u, i) is in lane
   8 i + u of 64; other lanes are empty. */

enum { AT_ONCE = 12, SIDE = 8, LANES_M = SIDE * SIDE, LOGIT_WORDS = LANES_M / 4, TO_U8 = 128 };
#define LEAST -0.27846455f /* the minimum of SiLU */

typedef struct {
    const Scores *q;
    int64_t M, Hp, C_words;
    int8_t *up, *down;    /* the cross gate: words [LANES_M / 4, H] and [H / 4, LANES_M] */
    int32_t *up_start;    /* minus what TO_U8 adds to the sums of `up` */
    float *up_scale, *up_bias, *down_scale, *down_bias;
    uint8_t *query;       /* words [C / 4, 2 SIDE]: positive parts of the components, then negative ones */
    float *query_scale;   /* [2 SIDE]: of the components, twice */
    float *query_gate;
    int32_t *valid;       /* which lanes are real */
    uint16_t *place;      /* of lanes m and m + 16, beside each other, among an item's gating weights */
    /* A block. */
    float *logit, *logit_scale, *hidden_scale;
    uint8_t *logit_u8, *hidden_u8;
    float *sum_H, *sum_M; /* INT32, then sum_H is the hidden layer */
} Int8Work;

static uintptr_t layout_int8(Int8Work *w, uintptr_t base) {
    const Scores *q = w->q;
    w->M = q->U * q->I;
    w->Hp = UP(q->H, 64);
    w->C_words = q->C / 4;
    uintptr_t next = base;
#define TAKE(name, count) w->name = (void *)next, next += (uintptr_t)UP((count) * (int64_t)sizeof(*w->name), 64)
    TAKE(up, LANES_M * w->Hp);
    TAKE(down, w->Hp * LANES_M);
    TAKE(up_start, w->Hp);
    TAKE(up_scale, w->Hp);
    TAKE(up_bias, w->Hp);
    TAKE(down_scale, LANES_M);
    TAKE(down_bias, LANES_M);
    TAKE(query, q->C * 2 * SIDE);
    TAKE(query_scale, 2 * SIDE);
    TAKE(query_gate, LANES_M);
    TAKE(valid, LANES_M);
    TAKE(place, LANES_M);
    TAKE(logit, AT_ONCE * LANES_M);
    TAKE(logit_scale, BLOCK);
    TAKE(hidden_scale, BLOCK);
    TAKE(logit_u8, AT_ONCE * LANES_M);
    TAKE(hidden_u8, AT_ONCE * w->Hp);
    TAKE(sum_H, AT_ONCE * w->Hp);
    TAKE(sum_M, AT_ONCE * LANES_M);
#undef TAKE
    return next;
}

/* The scale of some numbers whose largest magnitude becomes `steps`; not a number if one of them is not. */
static float scale_int8(const float *x, int64_t count, float steps) {
    float most = 1e-30f;
    for (int64_t j = 0; j < count; j++)
        if (fabsf(x[j]) > most || isnan(x[j])) most = fabsf(x[j]);
    return most / steps;
}

/* Whole steps of a number, 0 if it is not one. */
INLINE int whole_int8(float x) { return isnan(x) ? 0 : (int)lrintf(x); }

static void load_cross_gate_int8(Int8Work *w) {
    const Scores *q = w->q;
    int64_t M = w->M, H = q->H;
    float broken = 0; /* not a number if one of the first layer is not, which its bytes would hide */
    for (int64_t h = 0; h < H; h++) {
        const float *from = q->up_HM + h * M;
        float scale = scale_int8(from, M, 127), steps = 1 / scale;
        w->up_scale[h] = scale, w->up_bias[h] = q->up_H[h];
        broken += 0 * (scale + q->up_H[h]);
        for (int64_t u = 0; u < q->U; u++)
            for (int64_t i = 0; i < q->I; i++) {
                int weight = whole_int8(from[u * q->I + i] * steps);
                *at_int8(w->up, w->Hp, i * SIDE + u, h) = (int8_t)weight;
                w->up_start[h] -= TO_U8 * weight;
            }
    }
    for (int64_t m = 0; m < M; m++) {
        const float *from = q->down_MH + m * H;
        int64_t lane = m % q->I * SIDE + m / q->I, sum = 0;
        float scale = scale_int8(from, H, 127), steps = 1 / scale;
        for (int64_t h = 0; h < H; h++) {
            int weight = whole_int8(from[h] * steps);
            *at_int8(w->down, LANES_M, h, lane) = (int8_t)weight;
            sum += weight;
        }
        w->down_scale[lane] = scale;
        w->down_bias[lane] = q->down_M[m] + LEAST * scale * (float)sum + broken;
        w->valid[lane] = -1;
        w->place[lane / 32 * 32 + lane % 16 * 2 + lane / 16 % 2] = (uint16_t)m;
    }
}

static void load_query_int8(Int8Work *w, int64_t b) {
    const Scores *q = w->q;
    for (int64_t u = 0; u < q->U; u++) {
        const float *from = q->query_BUC + (b * q->U + u) * q->C;
        float scale = scale_int8(from, q->C, 255), steps = 1 / scale;
        w->query_scale[u] = w->query_scale[u + SIDE] = scale;
        for (int64_t c = 0; c < q->C; c++) {
            int whole = whole_int8(from[c] * steps);
            uint8_t *word = w->query + c / 4 * 8 * SIDE + c % 4;
            word[u * 4] = (uint8_t)MAX(whole, 0), word[(u + SIDE) * 4] = (uint8_t)MAX(-whole, 0);
        }
        for (int64_t i = 0; i < q->I; i++) w->query_gate[i * SIDE + u] = q->query_BM[b * w->M + u * q->I + i];
    }
}

/* 64 numbers as bytes x * steps + offset. */
INLINE void store_bytes_int8(uint8_t *to, const float *from, VF steps, VF offset) {
    __m512i x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) x[j] = _mm512_cvtps_epi32((__m512)(get_int8(from + 16 * j) * steps + offset));
    __m512i bytes = _mm512_packus_epi16(_mm512_packus_epi32(x[0], x[1]), _mm512_packus_epi32(x[2], x[3]));
    __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_store_si512(to, _mm512_permutexvar_epi32(order, bytes));
}

INLINE VF to_float_int8(const void *p) { return (VF)_mm512_cvtepi32_ps(_mm512_load_si512(p)); }
INLINE VF magnitude_int8(VF x) { return (VF)((VI)x & 0x7fffffff); }

/* Logits of one item, whose components lie at `row`, and the same as bytes. */
INLINE void logits_int8(const Int8Work *w, const int64_t I, const int64_t C_words, const int8_t *row, int64_t n) {
    __m512i sum[SIDE];
#pragma GCC unroll 8
    for (int i = 0; i < SIDE; i++) sum[i] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int64_t k = 0; k < C_words; k++) {
        __m512i query = _mm512_load_si512(w->query + k * 64);
#pragma GCC unroll 8
        for (int i = 0; i < SIDE; i++) {
            /* Lanes without a component repeat the last one: that leaves the largest logit as it is. */
            int32_t word;
            memcpy(&word, row + (MIN(i, I - 1) * C_words + k) * 4, 4);
            sum[i] = _mm512_dpbusd_epi32(sum[i], query, _mm512_set1_epi32(word));
        }
    }
    VF scale = get_int8(w->query_scale);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i more = _mm512_shuffle_i64x2(sum[2 * j], sum[2 * j + 1], 0x44);
        __m512i less = _mm512_shuffle_i64x2(sum[2 * j], sum[2 * j + 1], 0xee);
        put_int8(w->logit + n * LANES_M + 16 * j, (VF)_mm512_cvtepi32_ps(_mm512_sub_epi32(more, less)) * scale);
    }
}

/* Logits of pair n as bytes. */
INLINE void logit_bytes_int8(const Int8Work *w, int64_t n) {
    const float *logit = w->logit + n * LANES_M;
    VF most = {0};
    for (int64_t j = 0; j < LANES_M; j += 16) most = larger_int8(most, magnitude_int8(get_int8(logit + j)));
    float step = MAX(largest_int8(most), 1e-30f) / 127;
    w->logit_scale[n] = step;
    store_bytes_int8(w->logit_u8 + n * LANES_M, logit, all_int8(1 / step), all_int8(TO_U8));
}

/* The hidden layer of pair n, in place of its sums. */
INLINE void hidden_int8(const Int8Work *w, const int64_t Hp, int64_t n) {
    float *sum = w->sum_H + n * Hp;
    VF scale = all_int8(w->logit_scale[n]);
    for (int64_t j = 0; j < Hp; j += 16) {
        VF x = to_float_int8(sum + j) * scale;
        put_int8(sum + j, gated_int8(x * get_int8(w->up_scale + j) + get_int8(w->up_bias + j)));
    }
}

/* The same as bytes. */
INLINE void hidden_bytes_int8(const Int8Work *w, const int64_t Hp, int64_t n) {
    const float *hidden = w->sum_H + n * Hp;
    VF most = {0};
    for (int64_t j = 0; j < Hp; j += 16) most = larger_int8(most, get_int8(hidden + j));
    float step = (largest_int8(most) - LEAST) / 255;
    w->hidden_scale[n] = step;
    VF steps = all_int8(1 / step);
    for (int64_t j = 0; j < Hp; j += 64) store_bytes_int8(w->hidden_u8 + n * Hp + j, hidden + j, steps, steps * -LEAST);
}

/* phi of pair n, whose item has its gating weights at `weights`. */
INLINE float mixture_int8(const Int8Work *w, int64_t n, const uint16_t *weights) {
    const float *sum = w->sum_M + n * LANES_M, *logit = w->logit + n * LANES_M;
    uint64_t real = w->M < 64 ? (1ull << w->M) - 1 : -1ull;
    __m512i first = _mm512_maskz_loadu_epi16((__mmask32)real, weights);
    __m512i second = _mm512_maskz_loadu_epi16((__mmask32)(real >> 32), weights + 32);
    VF scale = all_int8(w->hidden_scale[n]), s[4], most = {0}, total = {0}, mixed = {0};
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        VU pair = (VU)_mm512_permutex2var_epi16(first, _mm512_load_si512(w->place + j / 2 * 32), second);
        VF item = j % 2 ? (VF)(pair & 0xffff0000) : (VF)(pair << 16);
        VF z = get_int8(w->query_gate + 16 * j) * item + get_int8(w->down_bias + 16 * j);
        s[j] = gated_int8(to_float_int8(sum + 16 * j) * scale * get_int8(w->down_scale + 16 * j) + z);
        most = larger_int8(most, s[j]);
    }
    /* Softmax is the same without its usual shift, which only keeps e^s finite. */
    if (__builtin_expect(_mm512_cmp_ps_mask((__m512)most, _mm512_set1_ps(60), _CMP_GT_OQ), 0)) {
        VF top = all_int8(largest_int8(most));
        for (int j = 0; j < 4; j++) s[j] -= top;
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        VF e = (VF)((VI)power_int8(s[j]) & *(const VIM *)(w->valid + 16 * j));
        total += e;
        mixed += e * get_int8(logit + 16 * j);
    }
    /* Both sums, side by side. */
    VF both = (VF)_mm512_shuffle_f32x4((__m512)mixed, (__m512)total, 0x44);
    both += (VF)_mm512_shuffle_f32x4((__m512)mixed, (__m512)total, 0xee);
    both += (VF)_mm512_shuffle_f32x4((__m512)both, (__m512)both, 0xb1);
    both += (VF)_mm512_permute_ps((__m512)both, 0x4e);
    both += (VF)_mm512_permute_ps((__m512)both, 0xb1);
    return both[0] / both[8];
}

INLINE void request_int8(const void *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)from + at);
}

/* Rows of the next block's items, next_N, are requested in parts: a core has few requests in flight. */
static void block_int8(Int8Work *w, const int64_t *item_N, const int64_t *next_N, int64_t N, float *score_N) {
    const Scores *q = w->q;
    int64_t I = q->I, words = w->C_words, Hp = w->Hp, bytes = I * q->C, half = UP(bytes / 2, 64);
    const int8_t *components = q->item_XIC;
    const uint16_t *weights = q->item_XM;
    for (int64_t n = 0; n < N; n++) {
        const int8_t *row = components + item_N[n] * bytes;
        request_int8(weights + next_N[n] * w->M, w->M * 2);
        /* The usual numbers, as constants. */
        if (I == 8 && words == 8) logits_int8(w, 8, 8, row, n);
        else logits_int8(w, I, words, row, n);
    }
    for (int64_t n = 0; n < N; n++) logit_bytes_int8(w, n);
    const float *start = (const float *)w->up_start;
    product_int8(N, Hp / 16, LOGIT_WORDS, w->logit_u8, LOGIT_WORDS, 1, w->up, Hp, start, 0, w->sum_H, Hp);
    for (int64_t n = 0; n < N; n++) {
        request_int8(components + next_N[n] * bytes, half);
        if (Hp == 128) hidden_int8(w, 128, n);
        else hidden_int8(w, Hp, n);
    }
    for (int64_t n = 0; n < N; n++) {
        if (Hp == 128) hidden_bytes_int8(w, 128, n);
        else hidden_bytes_int8(w, Hp, n);
    }
    product_int8(N, LANES_M / 16, Hp / 4, w->hidden_u8, Hp / 4, 1, w->down, LANES_M, NULL, 0, w->sum_M, LANES_M);
    for (int64_t n = 0; n < N; n++) {
        request_int8(components + next_N[n] * bytes + half, bytes - half);
        score_N[n] = mixture_int8(w, n, weights + item_N[n] * w->M);
    }
}

/* Pairs first..last, all of query b. */
static void pairs_int8(void *work, int64_t b, int64_t first, int64_t last) {
    Int8Work *w = work;
    const Scores *q = w->q;
    load_query_int8(w, b);
    for (int64_t N; first < last; first += N) {
        N = MIN(AT_ONCE, last - first);
        const int64_t *item_N = q->item_P + first;
        block_int8(w, item_N, last - first >= 2 * N ? item_N + N : item_N, N, q->score_P + first);
    }
}

static int run_int8(const Scores *q, int64_t first, int64_t last) {
    Int8Work w = {.q = q};
    void *memory = calloc(1, layout_int8(&w, 0) + 64);
    if (!memory) return -1;
    layout_int8(&w, UP((uintptr_t)memory, 64));
    load_cross_gate_int8(&w);
    int failed = in_turns(q, first, last, &w, pairs_int8);
    free(memory);
    return failed;
}
