import { MANTISSA, bitsOf } from './dtypes.js'
import { ElsaError, say } from './errors.js'
import { check, compact } from './sift.js'

/** @import { Visitor } from './data.js' */
/** @import { Entry } from './header.js' */
/** @import { Kernels } from './kernels.js' */
/** @import { Profile } from './profile.js' */

/**
 * What is wrong with the data, by the line of §11.2; of all that is, the first counts, wherever in the file it is
 * (ELSA-R-079).
 * @typedef {ElsaError[]} Findings
 */

/** @param {Findings} findings */
export function report(findings) {
  const first = findings.find(Boolean)
  if (first) throw first
}

/**
 * Check the words in the block for what no nested tensor may hold (elsa-1.0.md §4.4).
 * @param {Kernels} kernels
 * @param {Entry} entry
 * @param {Profile} profile
 * @param {number} bytes
 * @param {Findings} findings
 */
export function checkWords(kernels, { name, dtype }, { bits, levels: { length } }, bytes, findings) {
  const width = bitsOf(dtype) / 8
  // The highest 16 bits of +Inf.
  const exponent = 0x8000 - 2 ** (MANTISSA[dtype] + 16 - 8 * width)
  const found = check(kernels, width, bytes, 2 ** bits - 1, length, exponent)
  if (found & 1) findings[16] ??= new ElsaError('NonFinite', say`${name} has Inf or NaN, expected none`)
  if (found & 2) findings[16] ??= new ElsaError('CounterOutOfRange', say`a counter of ${name} is too large, expected at most ${length}`)
}

/**
 * Compare how many words a tensor keeps at a level with what the profile says.
 * @param {Entry} entry
 * @param {Profile} profile
 * @param {number} level
 * @param {number} kept
 * @param {Findings} findings
 */
export function checkCount({ name }, { nested }, level, kept, findings) {
  const stated = nested.get(name)?.[level - 1]
  if (kept !== stated) {
    findings[17] ??= new ElsaError('CountMismatch', say`level ${level} keeps ${kept} weights of ${name}, expected ${stated}`)
  }
}

/**
 * A visitor of a nested tensor that hands out what levels keep of it, counted.
 * @param {Kernels} kernels
 * @param {Profile} profile
 * @param {Entry} entry
 * @param {number[]} levels falling: each is what the one before leaves over, in place
 * @param {Findings} findings
 * @param {(level: number, bits: Uint8Array, values: Uint8Array, at: number, done: number) => unknown} take gets the bitmask
 *   and the values of each piece, and how many bytes of the tensor and of its values were before
 * @returns {Visitor}
 */
export function sifter(kernels, profile, entry, levels, findings, take) {
  const width = bitsOf(entry.dtype) / 8
  const kept = levels.map(() => 0)
  return async ({ length }, at) => {
    for (const [i, level] of levels.entries()) {
      kernels.mask(width, length, 2 ** profile.bits - 1, level)
      const [bits, values] = compact(kernels, width, length)
      await take(level, bits, values, at, kept[i])
      kept[i] += values.length
      if (at + length === entry.size) checkCount(entry, profile, level, kept[i] / width, findings)
    }
  }
}
