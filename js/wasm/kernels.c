// The loops that touch every byte, for WebAssembly with 128-bit vectors. Built by build.sh into src/wasm.js.
// No data, no heap: the caller and these functions agree on the places below, and src/kernels.js has the same
// functions in plain JavaScript.
#include <stdint.h>
#include <wasm_simd128.h>

#define ACCUMULATORS 2048                   // 8 × 64 bits
#define SECRET 2112                         // 192 bytes
#define BITS ((uint8_t *)8192)              // a bit for each word of a block
#define BLOCK 65536                         // 64 KiB
#define VALUES 131072                       // 64 KiB, and what the last word may reach beyond
#define EXPORT(name) __attribute__((export_name(#name))) name

// XXH3 over the first `count` stripes of 64 bytes of the block. A block starts at stripe 0 of the 16 between two
// scrambles, because 64 KiB are a multiple of 16 stripes.
void EXPORT(stripes)(uint32_t count) {
  for (uint32_t at = 0; at < 64 * count; at += 16) {
    uint32_t i = at & 63, s = at >> 6 & 15;
    v128_t *acc = (v128_t *)(ACCUMULATORS + i);
    v128_t word = wasm_v128_load((void *)(BLOCK + at));
    v128_t key = wasm_v128_xor(word, wasm_v128_load((void *)(SECRET + 8 * s + i)));
    v128_t product = wasm_i64x2_mul(wasm_v128_and(key, wasm_u64x2_const_splat(0xFFFFFFFF)), wasm_u64x2_shr(key, 32));
    v128_t x = wasm_i64x2_add(*acc, wasm_i64x2_add(product, wasm_i64x2_shuffle(word, word, 1, 0)));
    if (s == 15) {
      x = wasm_v128_xor(wasm_v128_xor(x, wasm_u64x2_shr(x, 47)), wasm_v128_load((void *)(SECRET + 128 + i)));
      x = wasm_i64x2_mul(x, wasm_u64x2_const_splat(0x9E3779B1));
    }
    *acc = x;
  }
}

// For each of 16 bytes, the place of one of the lowest two of its word: counters are in the lowest 16 bits of a word, so
// that lanes of 16 bits do for words of 2, 4 and 8 bytes.
static v128_t lowest(uint32_t width) {
  const v128_t place = wasm_i8x16_const(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return wasm_v128_and(place, wasm_i8x16_splat(1 - width));
}

// Level `level` of the words of the block, in place: a word goes if its counter is 0 or above. The block is a multiple of 16 bytes longer than
// its content, so the last vector may reach beyond that; there and below one is worked on also where there is no content.
void EXPORT(mask)(uint32_t width, uint32_t bytes, uint32_t low, uint32_t level) {
  const v128_t from = lowest(width);
  uint32_t at = BLOCK;
  do {
    v128_t word = wasm_v128_load((void *)at);
    v128_t counter = wasm_v128_and(word, wasm_i16x8_splat(low));
    v128_t drop = wasm_v128_or(wasm_i16x8_eq(counter, wasm_i16x8_const_splat(0)),
                               wasm_i16x8_gt(counter, wasm_i16x8_splat(level)));
    wasm_v128_store((void *)at, wasm_v128_andnot(word, wasm_i8x16_swizzle(drop, from)));
  } while ((at += 16) < BLOCK + bytes);
}

// What is wrong with the words of the block: 1 if one is Inf or NaN, so that all bits of `exponent` are set in its highest
// two bytes, 2 if one has a counter above `levels`. Behind the last word there must be zeros, here and below.
uint32_t EXPORT(check)(uint32_t width, uint32_t bytes, uint32_t low, uint32_t levels, uint32_t exponent) {
  const v128_t from = lowest(width), all = wasm_i16x8_splat(exponent);
  v128_t bad = wasm_i32x4_const_splat(0), above = bad;
  uint32_t at = BLOCK;
  do {
    v128_t word = wasm_v128_load((void *)at);
    v128_t counter = wasm_v128_and(wasm_i8x16_swizzle(word, from), wasm_i16x8_splat(low));
    v128_t high = wasm_i8x16_swizzle(word, wasm_i8x16_add(from, wasm_i8x16_splat(width - 2)));
    above = wasm_v128_or(above, wasm_i16x8_gt(counter, wasm_i16x8_splat(levels)));
    bad = wasm_v128_or(bad, wasm_i16x8_eq(wasm_v128_and(high, all), all));
  } while ((at += 16) < BLOCK + bytes);
  return wasm_v128_any_true(bad) | (uint32_t)wasm_v128_any_true(above) << 1;
}

// The words of the block that are not zero, one after the other, and a bit for each word, from the lowest bit on.
// A value is always written, with what follows it, and kept by moving on.
uint32_t EXPORT(compact)(uint32_t width, uint32_t bytes) {
  uint32_t to = VALUES, at = BLOCK;
  uint8_t *out = BITS;
  do {
    uint32_t bits = 0;
    for (uint32_t j = 0; j < 8; j++, at += width) {
      uint64_t word;
      __builtin_memcpy(&word, (void *)at, 8);
      __builtin_memcpy((void *)to, &word, 8);
      uint32_t kept = word << (64 - 8 * width) != 0;
      to += -kept & width;
      bits |= kept << j;
    }
    *out++ = (uint8_t)bits;
  } while (at < BLOCK + bytes);
  return to - VALUES;
}
