/* The counter hash of noise.py, which has its definition: 32 random bits of a key, a row and a pair of columns. */

#ifndef LOGITMIX_NOISE_H
#define LOGITMIX_NOISE_H

#include <stdint.h>

static const uint32_t GOLDEN = 0x9E3779B9u, FIRST = 0x21F0AAADu, SECOND = 0x735A2D97u;

static inline __attribute__((always_inline)) uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * FIRST;
    x = (x ^ x >> 15) * SECOND;
    return x ^ x >> 15;
}

static inline __attribute__((always_inline)) uint32_t row_hash(uint64_t key, int64_t row) {
    uint32_t x = mix((uint32_t)row ^ (uint32_t)key);
    return mix(x ^ (uint32_t)(row >> 32) ^ (uint32_t)(key >> 32));
}

/* Two columns share their bits; the first has the low half. */
static inline __attribute__((always_inline)) uint32_t column_hash(int64_t column) {
    return mix((uint32_t)(column / 2) ^ GOLDEN);
}

#endif
