import { BLOCK } from './kernels.js'

/** @import { Kernels } from './kernels.js' */

/** Zeros behind the content of the block, so that vectors may reach beyond it. @param {Kernels} kernels @param {number} bytes */
const end = ({ block }, bytes) => (block.fill(0, bytes, bytes + 64), bytes)

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
export function check(kernels, width, bytes, low, levels, exponent) {
  const { block: { buffer }, wasm } = kernels
  if (wasm) return wasm.check(width, end(kernels, bytes), low, levels, exponent)
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
export function compact(kernels, width, bytes) {
  const { bits, values, wasm } = kernels
  return [bits.subarray(0, Math.ceil(bytes / width / 8)), values.subarray(0, wasm ? wasm.compact(width, end(kernels, bytes)) : plain(kernels, width, bytes))]
}

/**
 * How many of the first words of the block are not zero.
 * @param {Kernels} kernels
 * @param {number} width
 * @param {number} bytes
 * @returns {number}
 */
export function countWords({ block: { buffer } }, width, bytes) {
  const words = new (width === 2 ? Uint16Array : Int32Array)(/** @type {ArrayBuffer} */ (buffer), BLOCK, bytes / Math.min(width, 4))
  let count = 0
  // Without a branch, which would be mispredicted too often.
  if (width < 8) for (let i = 0; i < words.length; i++) count += (words[i] | -words[i]) >>> 31
  else for (let i = 0; i < words.length; i += 2) count += (words[i] | words[i + 1] | -words[i] | -words[i + 1]) >>> 31
  return count
}

/** @param {Kernels} kernels @param {number} width @param {number} bytes @returns {number} the bytes of the values */
function plain({ bits, values: { buffer, byteOffset } }, width, bytes) {
  const Words = width === 2 ? Uint16Array : Uint32Array
  const step = width === 8 ? 2 : 1
  const words = new Words(/** @type {ArrayBuffer} */ (buffer), BLOCK, bytes / width * step)
  const kept = new Words(/** @type {ArrayBuffer} */ (buffer), byteOffset)
  let count = 0
  bits.fill(0)
  for (let i = 0, at = 0; at < words.length; i++, at += step) {
    if (words[at] || step === 2 && words[at + 1]) {
      bits[i >> 3] |= 1 << (i & 7)
      kept[count++] = words[at]
      if (step === 2) kept[count++] = words[at + 1]
    }
  }
  return count * width / step
}
