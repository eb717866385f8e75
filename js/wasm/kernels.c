// The loops that touch every byte, for WebAssembly with 128-bit vectors. Built by build.sh into src/wasm.js.
// No data, no heap: the caller and these functions agree on the places below, and src/kernels.js has the same
// functions in plain JavaScript.
#include <stdint.h>
#include <wasm_simd128.h>

#define ACCUMULATORS ((v128_t *)2048)       // 8 × 64 bits
#define SECRET ((const uint8_t *)2112)      // 192 bytes
#define BLOCK 65536                         // 64 KiB
#define VALUES 131072                       // 64 KiB
#define BITS ((uint8_t *)196608)            // a bit for each word of a block
#define EXPORT(name) __attribute__((export_name(name)))

// XXH3 over the first `count` stripes of 64 bytes of the block. A block starts at stripe 0 of the 16 between two
// scrambles, because 64 KiB are a multiple of 16 stripes.
EXPORT("stripes") void stripes(uint32_t count) {
  v128_t acc[4];
  for (int i = 0; i < 4; i++) acc[i] = ACCUMULATORS[i];
  const uint8_t *data = (const uint8_t *)BLOCK;
  const v128_t prime = wasm_u64x2_const_splat(0x9E3779B1);
  for (uint32_t s = 0; s < count; s++, data += 64) {
    const uint8_t *secret = SECRET + 8 * (s & 15);
    for (int i = 0; i < 4; i++) {
      v128_t word = wasm_v128_load(data + 16 * i);
      v128_t key = wasm_v128_xor(word, wasm_v128_load(secret + 16 * i));
      v128_t low = wasm_v128_and(key, wasm_u64x2_const_splat(0xFFFFFFFF));
      v128_t product = wasm_i64x2_mul(low, wasm_u64x2_shr(key, 32));
      v128_t swapped = wasm_i64x2_shuffle(word, word, 1, 0);
      acc[i] = wasm_i64x2_add(acc[i], wasm_i64x2_add(product, swapped));
    }
    if ((s & 15) == 15) {
      for (int i = 0; i < 4; i++) {
        v128_t x = wasm_v128_xor(acc[i], wasm_u64x2_shr(acc[i], 47));
        acc[i] = wasm_i64x2_mul(wasm_v128_xor(x, wasm_v128_load(SECRET + 128 + 16 * i)), prime);
      }
    }
  }
  for (int i = 0; i < 4; i++) ACCUMULATORS[i] = acc[i];
}

// Level `level` of the words of the block, in place: a word stays if its counter − 1, which wraps for 0, is below
// `level`. The block is a multiple of 16 bytes longer than its content, so the last vector may reach beyond that.
#define MASK(width, lanes, type)                                                                  \
  EXPORT("mask" #width) void mask##width(uint32_t bytes, uint32_t low, uint32_t level) {          \
    for (uint32_t at = BLOCK; at < BLOCK + bytes; at += 16) {                                     \
      v128_t word = wasm_v128_load((void *)at);                                                   \
      v128_t counter = wasm_v128_and(word, wasm_##type##_splat(low));                             \
      v128_t drop = wasm_v128_or(wasm_##lanes##_eq(counter, wasm_##type##_splat(0)),              \
                                 wasm_##lanes##_gt(counter, wasm_##type##_splat(level)));         \
      wasm_v128_store((void *)at, wasm_v128_andnot(word, drop));                                  \
    }                                                                                             \
  }
// Counters have at most 8 bits, so a signed comparison is as good.
MASK(2, i16x8, i16x8)
MASK(4, i32x4, i32x4)
MASK(8, i64x2, i64x2)

// What is wrong with the words of the block: 1 if one is Inf or NaN, 2 if one has a counter above `levels`.
#define CHECK(width, lanes, word_t)                                                               \
  EXPORT("check" #width) uint32_t check##width(uint32_t bytes, uint32_t low, uint32_t levels, word_t infinite) { \
    v128_t bad = wasm_i32x4_const_splat(0), above = bad;                                          \
    for (uint32_t at = BLOCK; at < BLOCK + bytes; at += 16) {                                     \
      v128_t word = wasm_v128_load((void *)at);                                                   \
      if (at + 16 > BLOCK + bytes) word = last_vector(word, BLOCK + bytes - at);                  \
      v128_t all = wasm_##lanes##_splat(infinite);                                                \
      bad = wasm_v128_or(bad, wasm_##lanes##_eq(wasm_v128_and(word, all), all));                  \
      above = wasm_v128_or(above, wasm_##lanes##_gt(wasm_v128_and(word, wasm_##lanes##_splat(low)), \
                                                    wasm_##lanes##_splat(levels)));               \
    }                                                                                             \
    return wasm_v128_any_true(bad) | (uint32_t)wasm_v128_any_true(above) << 1;                    \
  }
// Only what belongs to the block of a vector that reaches beyond it.
static v128_t last_vector(v128_t word, uint32_t bytes) {
  const v128_t lanes = wasm_i8x16_const(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return wasm_v128_and(word, wasm_i8x16_gt(wasm_i8x16_splat((int8_t)bytes), lanes));
}
CHECK(2, i16x8, uint32_t)
CHECK(4, i32x4, uint32_t)
CHECK(8, i64x2, uint64_t)

// The words of the block that are not zero, one after the other, and a bit for each word, from the lowest bit on.
// A value is always written, and kept by moving on.
#define COMPACT(width, word_t)                                                                    \
  EXPORT("compact" #width) uint32_t compact##width(uint32_t count) {                              \
    const word_t *words = (const word_t *)BLOCK;                                                  \
    word_t *values = (word_t *)VALUES;                                                            \
    for (uint32_t i = 0; i < count; i += 8) {                                                     \
      uint32_t bits = 0, left = count - i < 8 ? count - i : 8;                                    \
      for (uint32_t j = 0; j < left; j++) {                                                       \
        word_t word = words[i + j];                                                               \
        *values = word;                                                                           \
        values += word != 0;                                                                      \
        bits |= (uint32_t)(word != 0) << j;                                                       \
      }                                                                                           \
      BITS[i / 8] = (uint8_t)bits;                                                                \
    }                                                                                             \
    return (uint32_t)((uintptr_t)values - VALUES);                                                \
  }
COMPACT(2, uint16_t)
COMPACT(4, uint32_t)
COMPACT(8, uint64_t)
