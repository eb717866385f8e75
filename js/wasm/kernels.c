// The loops that touch every byte, for WebAssembly with 128-bit vectors. Built by build.sh into src/wasm.js.
// No data, no heap: the caller and these functions agree on the places below, and src/kernels.js has the same
// functions in plain JavaScript.
#include <stdint.h>
#include <wasm_simd128.h>

#define ACCUMULATORS 2048                   // 8 × 64 bits
#define SECRET 2112                         // 192 bytes
#define BLOCK 65536                         // 64 KiB
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

// Level `level` of the words of the block, in place: a word goes if its counter is 0 or above. Counters are in the lowest
// 16 bits of a word, so that lanes of 16 bits do for words of 2, 4 and 8 bytes: each of 16 bytes takes its verdict from one
// of the lowest two of its word. The block is a multiple of 16 bytes, so the last vector may reach beyond the content.
void EXPORT(mask)(uint32_t width, uint32_t bytes, uint32_t low, uint32_t level) {
  const v128_t place = wasm_i8x16_const(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const v128_t from = wasm_v128_and(place, wasm_i8x16_splat(1 - width));
  uint32_t at = BLOCK;
  do {
    v128_t word = wasm_v128_load((void *)at);
    v128_t counter = wasm_v128_and(word, wasm_i16x8_splat(low));
    v128_t drop = wasm_v128_or(wasm_i16x8_eq(counter, wasm_i16x8_const_splat(0)),
                               wasm_i16x8_gt(counter, wasm_i16x8_splat(level)));
    wasm_v128_store((void *)at, wasm_v128_andnot(word, wasm_i8x16_swizzle(drop, from)));
  } while ((at += 16) < BLOCK + bytes);
}
