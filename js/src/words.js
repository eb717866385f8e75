import { FLOATS } from './dtypes.js'
import { ElsaError, fail, show } from './errors.js'

/** @import { Entry } from './header.js' */
/** @import { ErrorCode } from './errors.js' */
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

/** The words of one nested tensor against §4.4: counters, finite values, counts. */
export class Words {
  /**
   * @param {Entry} entry
   * @param {Profile} profile
   * @param {Findings} findings
   */
  constructor(entry, profile, findings) {
    this.entry = entry
    this.findings = findings
    this.levels = profile.levels.length
    this.low = 2 ** profile.bits - 1
    this.counts = profile.nested.get(entry.name) ?? fail('ProfileMismatch', `${show(entry.name)} is not nested`)
    /** How many words have each counter. */
    this.histogram = new Float64Array(256)
    const { width, mantissa } = FLOATS[entry.dtype]
    this.width = width
    // All exponent bits, of the upper half for F64.
    this.infinite = width === 2 ? 0x8000 - 2 ** mantissa : width === 4 ? 0x7f800000 : 0x7ff00000
  }

  /** @param {Uint8Array} piece aligned */
  check(piece) {
    const { width, low, infinite } = this
    const words = width === 2 ? new Uint16Array(piece.buffer, piece.byteOffset, piece.length / 2)
      : new Int32Array(piece.buffer, piece.byteOffset, piece.length / 4)
    const step = width === 8 ? 2 : 1
    const histogram = new Uint32Array(256)
    let bad = 0
    for (let i = 0; i < words.length; i += step) {
      histogram[words[i] & low]++
      bad |= (words[i + step - 1] & infinite) === infinite ? 1 : 0
    }
    if (bad) this.findings.note(16, 'NonFinite', `tensor ${show(this.entry.name)} holds Inf or NaN`)
    for (let c = 0; c <= low; c++) this.histogram[c] += histogram[c]
  }

  /** Compare what was counted with what the profile says. @param {number} [last] the last level that is there */
  finish(last = this.levels) {
    const { entry: { name }, findings, histogram, levels } = this
    const above = histogram.findIndex((count, counter) => counter > levels && count > 0)
    if (above > 0) findings.note(16, 'CounterOutOfRange', `tensor ${show(name)} has the counter ${above}, expected at most ${levels}`)
    let kept = 0
    for (let t = 1; t <= last; t++) {
      kept += histogram[t]
      if (kept !== this.counts[t - 1]) {
        findings.note(17, 'CountMismatch', `tensor ${show(name)} keeps ${kept} weights at level ${t}, expected ${this.counts[t - 1]}`)
      }
    }
  }
}
