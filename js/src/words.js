import { FLOATS } from './dtypes.js'
import { ElsaError, show } from './errors.js'

/** @import { Entry } from './header.js' */
/** @import { ErrorCode } from './errors.js' */
/** @import { Kernels } from './kernels.js' */
/** @import { Profile } from './profile.js' */

/** What is wrong with the data; of all that is, the first of ELSA-R-079 counts, wherever in the file it is. */
export class Findings {
  constructor() {
    /** @type {Map<number, ElsaError>} */
    this.first = new Map()
  }

  /** @param {number} line of §11.2 @param {ErrorCode} code @param {string} message */
  note(line, code, message) {
    if (!this.first.has(line)) this.first.set(line, new ElsaError(code, message))
  }

  report() {
    const [line] = [...this.first.keys()].sort((a, b) => a - b)
    if (line) throw this.first.get(line)
  }
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
  const { width, infinite } = FLOATS[dtype]
  const found = kernels.check(width, bytes, 2 ** bits - 1, length, infinite)
  if (found & 1) findings.note(16, 'NonFinite', `tensor ${show(name)} holds Inf or NaN`)
  if (found & 2) findings.note(16, 'CounterOutOfRange', `tensor ${show(name)} has a counter above ${length}`)
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
  if (kept !== stated) findings.note(17, 'CountMismatch', `tensor ${show(name)} keeps ${kept} weights at level ${level}, expected ${stated}`)
}
