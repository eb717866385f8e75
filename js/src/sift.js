import { wordsOf } from './dtypes.js'
import { BLOCK } from './kernels.js'

/** @import { Kernels } from './kernels.js' */

/**
 * Check the first words of the block.
 * @param {Kernels} kernels
 * @param {number} width
 * @param {number} bytes
 * @param {number} low has the counter's bits set
 * @param {number} levels
 * @param {number} exponent the highest 16 bits of +Inf
 * @returns {number} 1 if one is Inf or NaN, 2 if one has a counter above `levels`, 3 if both
 */
export function check({ block: { buffer } }, width, bytes, low, levels, exponent) {
  const halves = new Uint16Array(buffer, BLOCK, bytes / 2)
  const step = width / 2
  let found = 0
  for (let i = 0; i < halves.length; i += step) {
    if ((halves[i + step - 1] & exponent) === exponent) found |= 1
    if ((halves[i] & low) > levels) found |= 2
  }
  return found
}

/**
 * The words of the block that are not zero, one after the other, and a bit for each word.
 * @param {Kernels} kernels
 * @param {number} width
 * @param {number} bytes
 * @returns {[bits: Uint8Array, values: Uint8Array]}
 */
export function compact({ bits, values }, width, bytes) {
  const { buffer, byteOffset } = values
  const words = wordsOf(8 * width, buffer, BLOCK, bytes / width)
  const kept = wordsOf(8 * width, buffer, byteOffset)
  let count = 0
  bits.fill(0)
  for (let i = 0; i < words.length; i++) {
    if (words[i]) {
      bits[i >> 3] |= 1 << (i & 7)
      kept[count++] = words[i]
    }
  }
  return [bits.subarray(0, Math.ceil(words.length / 8)), values.subarray(0, count * width)]
}
