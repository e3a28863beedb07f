/* The K items with the largest INT8 dot products, exactly, in one pass over the corpus; called by stage1.py.

   Axes: X items in the corpus, G groups of 4 dimensions, B queries, K items to be found, R places of a buffer.

   The corpus lies in blocks of 16 items, [X / 16, G, 16, 4], so that one vector instruction multiplies and adds 4
   dimensions of 16 items. Its values are stored as unsigned, 128 above the signed ones, as that instruction wants one of
   its factors: a query's scores are then all larger by the same number, which leaves their order as it is.

   An item whose score is at least the threshold goes into the query's buffer. Where that is full, it is trimmed to its K
   best, and the threshold rises to what the next one must have. So the threshold to begin with costs or saves time and
   changes no result, unless it was too high: then fewer than K items are found, which the caller sees. Of equal scores
   the item with the lower index is kept. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

enum { LANES = 16, QUERIES = 8, CHUNK_BYTES = 16384, AHEAD = 2048, DIGIT = 11, DIGITS = 1 << DIGIT };
enum { PORTABLE, AVX2, VNNI };

/* Mirrored in stage1.py. */
typedef struct {
    const uint8_t *corpus;
    int64_t X, G, B, K, R; /* R at least K + LANES */
    const int8_t *query_BH;
    const uint8_t *allowed; /* bit x % 8 of byte x / 8 says whether item x may be found; null allows all */
    int64_t allowed_stride; /* bytes from one query's to the next one's; 0 where they share one */
    int32_t *least_B;       /* the threshold; raised where a buffer is trimmed */
    int64_t *count_B;       /* places of the buffer that are taken */
    int32_t *score_BR, *item_BR;
} Scan;

EXPORT int stage1_level(void) {
#ifdef X86
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw")) return VNNI;
    if (__builtin_cpu_supports("avx2")) return AVX2;
#endif
    return PORTABLE;
}

INLINE uint32_t rising(int32_t score) { return (uint32_t)score ^ 0x80000000u; }

/* The K-th largest of some scores, K from 1 to their number; and how many of the K are equal to it. */
static int32_t select_score(const int32_t *score, int64_t count, int64_t K, int64_t *equal) {
    static const int shifts[] = {32 - DIGIT, 32 - 2 * DIGIT, 0};
    uint32_t found = 0, known = 0;
    for (int level = 0; level < 3; level++) {
        const int shift = shifts[level];
        const uint32_t digits = level < 2 ? DIGITS - 1 : (1u << (32 - 2 * DIGIT)) - 1;
        int64_t sum_D[DIGITS] = {0};
        for (int64_t i = 0; i < count; i++) {
            const uint32_t key = rising(score[i]);
            if (((key ^ found) & known) == 0) sum_D[key >> shift & digits]++;
        }
        int64_t digit = digits;
        while (sum_D[digit] < K) K -= sum_D[digit--];
        found |= (uint32_t)digit << shift;
        known |= digits << shift;
    }
    *equal = K;
    return (int32_t)(found ^ 0x80000000u);
}

/* Leaves a query's K best items, in their order; of equal ones the first. */
static void trim(const Scan *scan, int64_t b) {
    int32_t *score = scan->score_BR + b * scan->R, *item = scan->item_BR + b * scan->R;
    const int64_t count = scan->count_B[b];
    if (count <= scan->K) return;
    int64_t equal, kept = 0;
    const int32_t last = select_score(score, count, scan->K, &equal);
    for (int64_t i = 0; i < count; i++) {
        const int taken = score[i] > last || (score[i] == last && equal-- > 0);
        score[kept] = score[i], item[kept] = item[i];
        kept += taken;
    }
    scan->count_B[b] = kept;
    /* What comes later has a higher index. */
    scan->least_B[b] = last == INT32_MAX ? last : last + 1;
}

/* Which of a block's items may be found for a query. */
INLINE uint32_t allowed_in(const Scan *scan, int64_t block, int64_t b) {
    const int64_t left = scan->X - block * LANES;
    uint32_t lanes = left < LANES ? (1u << left) - 1 : 0xFFFFu;
    if (scan->allowed) {
        const uint8_t *bytes = scan->allowed + b * scan->allowed_stride + block * 2;
        lanes &= bytes[0] | (left > 8 ? (uint32_t)bytes[1] << 8 : 0);
    }
    return lanes;
}

INLINE int32_t query_group(const Scan *scan, int64_t b, int64_t g) {
    int32_t bytes;
    memcpy(&bytes, scan->query_BH + (b * scan->G + g) * 4, 4);
    return bytes;
}

INLINE void append(const Scan *scan, int64_t b, int64_t block, uint32_t lanes, const int32_t *score_L) {
    int64_t at = b * scan->R + scan->count_B[b];
    scan->count_B[b] += __builtin_popcount(lanes);
    for (; lanes; lanes &= lanes - 1, at++) {
        const int lane = __builtin_ctz(lanes);
        scan->score_BR[at] = score_L[lane];
        scan->item_BR[at] = (int32_t)(block * LANES + lane);
    }
}

INLINE void make_room(const Scan *scan, int64_t b) {
    if (scan->count_B[b] + LANES > scan->R) trim(scan, b);
}

static void score_portable(const Scan *scan, int64_t block, int64_t b, int32_t *score_L) {
    const uint8_t *x = scan->corpus + block * scan->G * 64;
    const int8_t *query = scan->query_BH + b * scan->G * 4;
    memset(score_L, 0, LANES * sizeof *score_L);
    for (int64_t g = 0; g < scan->G; g++)
        for (int lane = 0; lane < LANES; lane++)
            for (int d = 0; d < 4; d++) score_L[lane] += x[g * 64 + lane * 4 + d] * query[g * 4 + d];
}

static void scan_portable(const Scan *scan, int64_t first, int64_t last, int64_t b, int64_t count) {
    for (int64_t block = first; block < last; block++)
        for (int64_t q = b; q < b + count; q++) {
            int32_t score_L[LANES];
            uint32_t lanes = 0;
            score_portable(scan, block, q, score_L);
            for (int lane = 0; lane < LANES; lane++) lanes |= (uint32_t)(score_L[lane] >= scan->least_B[q]) << lane;
            lanes &= allowed_in(scan, block, q);
            make_room(scan, q);
            append(scan, q, block, lanes, score_L);
        }
}

#ifdef X86
#define TARGET_AVX2 __attribute__((target("avx2")))
#define TARGET_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

/* Bytes 0 and 2 of each group, and 1 and 3, as words: products of bytes would not fit into the sums of maddubs. */
TARGET_AVX2 static void score_avx2(const Scan *scan, int64_t block, int64_t b, int32_t *score_L) {
    const uint8_t *x = scan->corpus + block * scan->G * 64;
    const __m256i even = _mm256_set1_epi32(0x00FF00FF);
    __m256i sum_0 = _mm256_setzero_si256(), sum_1 = sum_0;
    for (int64_t g = 0; g < scan->G; g++) {
        const __m256i query = _mm256_set1_epi32(query_group(scan, b, g));
        const __m256i of_even = _mm256_srai_epi16(_mm256_slli_epi16(query, 8), 8), of_odd = _mm256_srai_epi16(query, 8);
        const __m256i x_0 = _mm256_loadu_si256((const __m256i *)(x + g * 64));
        const __m256i x_1 = _mm256_loadu_si256((const __m256i *)(x + g * 64 + 32));
        sum_0 = _mm256_add_epi32(sum_0, _mm256_madd_epi16(_mm256_and_si256(x_0, even), of_even));
        sum_1 = _mm256_add_epi32(sum_1, _mm256_madd_epi16(_mm256_and_si256(x_1, even), of_even));
        sum_0 = _mm256_add_epi32(sum_0, _mm256_madd_epi16(_mm256_srli_epi16(x_0, 8), of_odd));
        sum_1 = _mm256_add_epi32(sum_1, _mm256_madd_epi16(_mm256_srli_epi16(x_1, 8), of_odd));
    }
    _mm256_storeu_si256((__m256i *)score_L, sum_0);
    _mm256_storeu_si256((__m256i *)(score_L + 8), sum_1);
}

TARGET_AVX2 static void scan_avx2(const Scan *scan, int64_t first, int64_t last, int64_t b, int64_t count) {
    for (int64_t block = first; block < last; block++)
        for (int64_t q = b; q < b + count; q++) {
            int32_t score_L[LANES];
            score_avx2(scan, block, q, score_L);
            const __m256i least = _mm256_set1_epi32(scan->least_B[q]);
            const __m256i low_0 = _mm256_cmpgt_epi32(least, _mm256_loadu_si256((const __m256i *)score_L));
            const __m256i low_1 = _mm256_cmpgt_epi32(least, _mm256_loadu_si256((const __m256i *)(score_L + 8)));
            const uint32_t low = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(low_0)) |
                                 (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(low_1)) << 8;
            if (low == 0xFFFFu) continue;
            make_room(scan, q);
            append(scan, q, block, ~low & allowed_in(scan, block, q), score_L);
        }
}

/* count is a constant where this is inlined, so that the sums of all queries stay in registers. */
TARGET_VNNI INLINE void scan_queries_vnni(const Scan *scan, int64_t first, int64_t last, int64_t b, const int count) {
    const int64_t G = scan->G;
    const int32_t *query = (const int32_t *)(scan->query_BH + b * G * 4);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t block = first; block < last; block++) {
        const uint8_t *x = scan->corpus + block * G * 64;
        __m512i sum_Q[QUERIES];
        for (int q = 0; q < count; q++) sum_Q[q] = _mm512_setzero_si512();
        for (int64_t g = 0; g < G; g++) {
            const __m512i values = _mm512_loadu_si512(x + g * 64);
            _mm_prefetch((const char *)(x + g * 64 + AHEAD), _MM_HINT_T0);
#pragma GCC unroll 8
            for (int q = 0; q < count; q++)
                sum_Q[q] = _mm512_dpbusd_epi32(sum_Q[q], values, _mm512_set1_epi32(query[q * G + g]));
        }
#pragma GCC unroll 8
        for (int q = 0; q < count; q++) {
            uint32_t lanes = _mm512_cmpge_epi32_mask(sum_Q[q], _mm512_set1_epi32(scan->least_B[b + q]));
            if (lanes == 0) continue;
            make_room(scan, b + q);
            lanes &= allowed_in(scan, block, b + q);
            const int64_t at = (b + q) * scan->R + scan->count_B[b + q];
            const __m512i item = _mm512_add_epi32(lane, _mm512_set1_epi32((int32_t)(block * LANES)));
            /* Compressed in the register: into memory, some processors take a hundred cycles. */
            _mm512_storeu_si512(scan->score_BR + at, _mm512_maskz_compress_epi32((__mmask16)lanes, sum_Q[q]));
            _mm512_storeu_si512(scan->item_BR + at, _mm512_maskz_compress_epi32((__mmask16)lanes, item));
            scan->count_B[b + q] += __builtin_popcount(lanes);
        }
    }
}

TARGET_VNNI static void scan_vnni(const Scan *scan, int64_t first, int64_t last, int64_t b, int64_t count) {
    switch (count) {
#define CASE(n)                                                                                                        \
    case n: scan_queries_vnni(scan, first, last, b, n); break
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
    }
}
#endif

typedef void (*ScanPart)(const Scan *, int64_t first, int64_t last, int64_t b, int64_t count);

static ScanPart best_at(int level) {
#ifdef X86
    if (level == VNNI) return scan_vnni;
    if (level == AVX2) return scan_avx2;
#endif
    (void)level;
    return scan_portable;
}

/* Adds what blocks [first, last) have to the buffers. A chunk of blocks is read from memory once for all queries. */
EXPORT void stage1_scan(const Scan *scan, int64_t first, int64_t last, int level) {
    const ScanPart part = best_at(level);
    const int64_t chunk = scan->B <= QUERIES ? last - first : CHUNK_BYTES / (scan->G * 64) + 1;
    for (int64_t start = first; start < last; start += chunk)
        for (int64_t b = 0; b < scan->B; b += QUERIES)
            part(scan, start, MIN(start + chunk, last), b, MIN(QUERIES, scan->B - b));
}

/* Sets each query's threshold to the wanted-th largest score of S blocks that are spread over the corpus; to the lowest
   of all where fewer of their items are allowed. 1 where there is no memory. */
EXPORT int stage1_threshold(const Scan *scan, const int64_t *block_S, int64_t S, int64_t wanted, int level) {
    const ScanPart part = best_at(level);
    const int64_t room = (S + 1) * LANES;
    int32_t *taken = malloc((size_t)(QUERIES * 2 * room) * sizeof *taken);
    if (!taken) return 1;
    for (int64_t b = 0; b < scan->B; b += QUERIES) {
        const int64_t count = MIN(QUERIES, scan->B - b);
        int32_t least_Q[QUERIES];
        int64_t count_Q[QUERIES] = {0};
        for (int q = 0; q < QUERIES; q++) least_Q[q] = INT32_MIN;
        Scan sample = *scan;
        sample.query_BH += b * scan->G * 4, sample.allowed += scan->allowed ? b * scan->allowed_stride : 0;
        sample.R = room, sample.least_B = least_Q, sample.count_B = count_Q;
        sample.score_BR = taken, sample.item_BR = taken + QUERIES * room;
        for (int64_t s = 0; s < S; s++) part(&sample, block_S[s], block_S[s] + 1, 0, count);
        for (int64_t q = 0; q < count; q++) {
            int64_t equal;
            scan->least_B[b + q] =
                count_Q[q] > wanted ? select_score(taken + q * room, count_Q[q], wanted, &equal) : INT32_MIN;
        }
    }
    free(taken);
    return 0;
}

/* The buffers, trimmed, as rows of K items and of scores times a scale, with -1 and minus infinity where they have
   fewer. */
EXPORT void stage1_result(const Scan *scan, const float *scale_B, int64_t *item_BK, float *score_BK) {
    for (int64_t b = 0; b < scan->B; b++) {
        trim(scan, b);
        int32_t above = 0;
        for (int64_t h = 0; h < 4 * scan->G; h++) above += 128 * scan->query_BH[b * 4 * scan->G + h];
        for (int64_t k = 0; k < scan->K; k++) {
            const int there = k < scan->count_B[b];
            item_BK[b * scan->K + k] = there ? scan->item_BR[b * scan->R + k] : -1;
            score_BK[b * scan->K + k] = there ? (float)(scan->score_BR[b * scan->R + k] - above) * scale_B[b] : -INFINITY;
        }
    }
}
