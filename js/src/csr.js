import { matrixOf } from './layouts.js'

/** @import { Write } from './extract.js' */
/** @import { Entry } from './header.js' */

const PIECE = 8192

/**
 * Writes indptr and indices of a tensor (elsa-1.0.md §9.3) while its bitmask comes along.
 * @param {Entry} entry
 * @param {number} most words that are kept
 * @param {boolean} wide whether the numbers have 64 bits
 * @param {number[]} at where indptr and indices begin
 * @param {Write} write
 * @returns {(bits: Uint8Array, first: number, count: number) => Promise<void>} takes the bits of `count` elements from
 *   `first` on
 */
export function csrWriter({ shape, elements }, most, wide, at, write) {
  const [rows, columns] = matrixOf(shape).map(Number)
  let kept = 0
  /** The element with which the next row begins. */
  let next = 0

  /** Numbers that are written some thousand at a time. */
  const [pointers, indices] = at.map(at => {
    const values = new Float64Array(PIECE)
    let count = 0
    const flush = async () => {
      const filled = values.subarray(0, count)
      const numbers = wide ? BigInt64Array.from(filled, BigInt) : new Int32Array(filled)
      count = 0
      await write(new Uint8Array(numbers.buffer), at)
      at += numbers.byteLength
    }
    /** Gives a promise only where there is something to wait for. @param {number} value */
    const push = value => {
      values[count++] = value
      return count === PIECE ? flush() : undefined
    }
    return { push, flush }
  })

  return async (bits, first, count) => {
    for (let i = 0; i < count; i++) {
      // Eight elements at once where none is kept and no row begins.
      if (!(i & 7) && !bits[i >> 3] && next - first > i + 7) {
        i += 7
        continue
      }
      let full
      if (first + i === next) {
        full = pointers.push(kept)
        next += columns
        if (full) await full
      }
      if (bits[i >> 3] >> (i & 7) & 1 && kept++ < most && (full = indices.push(first + i + columns - next))) await full
    }
    if (first + count < elements) return
    await indices.flush()
    // The end of the last row; rows without columns all end here.
    for (let row = columns ? rows : 0; row <= rows; row++) await pointers.push(kept)
    await pointers.flush()
  }
}
