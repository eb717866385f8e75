/** @import { Entry } from './header.js' */
/** @import { Write } from './extract.js' */

const WIDEST = 2 ** 31 - 1
const PIECE = 8192

/**
 * The rows and columns of a tensor that is seen as a matrix (ELSA-R-093).
 * @param {(number | bigint)[]} shape
 * @returns {[rows: bigint, columns: bigint]}
 */
export function matrixOf(shape) {
  const product = (/** @type {bigint} */ all, /** @type {number | bigint} */ d) => all * BigInt(d)
  const [rows, ...others] = shape.length < 2 ? [1n, ...shape] : shape
  return [BigInt(rows), others.reduce(product, 1n)]
}

/**
 * @param {number | bigint} kept
 * @param {number | bigint} columns
 */
export function indexDtype(kept, columns) {
  return kept > WIDEST || columns > WIDEST ? 'I64' : 'I32'
}

/** Writes indptr and indices of a tensor (elsa-1.0.md §9.3) while its bitmask comes along. */
export class Csr {
  /**
   * @param {Entry} entry
   * @param {number} most words that are kept
   * @param {number[]} at where indptr and indices begin
   * @param {Write} write
   */
  constructor(entry, most, [pointers, indices], write) {
    const [rows, columns] = matrixOf(entry.shape).map(Number)
    this.elements = entry.elements
    this.rows = rows
    this.columns = columns
    this.most = most
    this.wide = indexDtype(most, columns) === 'I64'
    this.write = write
    this.pointers = { at: pointers, values: new Float64Array(PIECE), count: 0 }
    this.indices = { at: indices, values: new Float64Array(PIECE), count: 0 }
    this.kept = 0
    /** The element with which the next row begins. */
    this.next = 0
  }

  /**
   * @param {Uint8Array} bits
   * @param {number} first the number of the first element
   * @param {number} count of elements
   */
  async add(bits, first, count) {
    const { pointers, indices, columns } = this
    for (let i = 0; i < count; i++) {
      // Eight elements at once where none is kept and no row begins.
      if (!(i & 7) && !bits[i >> 3] && this.next - first > i + 7) {
        i += 7
        continue
      }
      const element = first + i
      if (element === this.next) {
        pointers.values[pointers.count++] = this.kept
        this.next += columns
      }
      if (bits[i >> 3] >> (i & 7) & 1 && this.kept++ < this.most) {
        indices.values[indices.count++] = element + columns - this.next
      }
      if (pointers.count === PIECE) await this.flush(pointers)
      if (indices.count === PIECE) await this.flush(indices)
    }
    if (first + count < this.elements) return
    await this.flush(indices)
    // The end of the last row; rows without columns all end here.
    for (let row = columns ? this.rows : 0; row <= this.rows; row++) {
      pointers.values[pointers.count++] = this.kept
      if (pointers.count === PIECE) await this.flush(pointers)
    }
    await this.flush(pointers)
  }

  /** @param {{at: number, values: Float64Array, count: number}} list */
  async flush(list) {
    const filled = list.values.subarray(0, list.count)
    const numbers = this.wide ? BigInt64Array.from(filled, BigInt) : new Int32Array(filled)
    list.count = 0
    await this.write(new Uint8Array(numbers.buffer), list.at)
    list.at += numbers.byteLength
  }
}
