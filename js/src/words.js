import { MANTISSA, bitsOf } from './dtypes.js'
import { ElsaError, show } from './errors.js'
import { check } from './sift.js'

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
  if (found & 1) findings[16] ??= new ElsaError('NonFinite', `tensor ${show(name)} holds Inf or NaN`)
  if (found & 2) findings[16] ??= new ElsaError('CounterOutOfRange', `tensor ${show(name)} has a counter above ${length}`)
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
    findings[17] ??= new ElsaError('CountMismatch', `tensor ${show(name)} keeps ${kept} weights at level ${level}, expected ${stated}`)
  }
}
