import { matrixOf } from './layouts.js'

/** @import { Write } from './extract.js' */
/** @import { Entry } from './header.js' */

const MOST = 1 << 15

/**
 * Writes indptr and indices of a tensor (elsa-1.0.md §9.3) while its bitmask comes along.
 * @param {Entry} entry
 * @param {number} most words that are kept
 * @param {boolean} wide whether the numbers have 64 bits
 * @param {number[]} at where indptr and indices begin
 * @param {Write} write
 * @returns {(bits: Uint8Array, first: number) => Promise<void>} takes the bits of the elements from `first` on
 */
export function csrWriter({ shape, elements }, most, wide, at, write) {
  const [rows, columns] = matrixOf(shape).map(Number)
  let kept = 0
  /** The element with which the next row begins. */
  let next = 0

  /** @param {number} list 0 for indptr, 1 for indices @param {number[]} values */
  const append = async (list, values) => {
    const numbers = wide ? BigInt64Array.from(values, BigInt) : new Int32Array(values)
    await write(new Uint8Array(numbers.buffer), at[list])
    at[list] += numbers.byteLength
  }

  return async (bits, first) => {
    const count = Math.min(8 * bits.length, elements - first)
    const pointers = []
    const indices = []
    for (let i = 0; i < count; i++) {
      // Eight elements at once where none is kept and no row begins.
      if (!(i & 7) && !bits[i >> 3] && next - first > i + 7) {
        i += 7
        continue
      }
      if (first + i === next) {
        pointers.push(kept)
        next += columns
      }
      if (bits[i >> 3] >> (i & 7) & 1 && kept++ < most) indices.push(first + i + columns - next)
    }
    await append(1, indices)
    // The end of the last row; rows without columns all end here.
    if (first + count === elements) {
      for (let row = columns ? rows : 0; row <= rows; row++) {
        if (pointers.push(kept) > MOST) await append(0, pointers.splice(0))
      }
    }
    await append(0, pointers)
  }
}
