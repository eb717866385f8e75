import { arrayOf } from './dtypes.js'
import { about, expect, fail, say } from './errors.js'
import { BLOCK } from './kernels.js'
import { checkSum, startXxh3 } from './xxh3.js'

/** @import { TypedArray } from './dtypes.js' */
/** @import { Entry, Header } from './header.js' */
/** @import { Kernels } from './kernels.js' */
/** @import { Bytes } from './source.js' */

/**
 * A tensor of a level. A dimension above 2^53 − 1, which only an empty tensor can have, is a bigint.
 * @typedef {{dtype: string, shape: number[], data: TypedArray}} Tensor
 */

/**
 * What becomes of a tensor's bytes: called for each piece of at most 64 KiB, which may be changed in place and is good
 * until the call, or the promise that it gives, is done.
 * @typedef {(piece: Uint8Array, at: number) => unknown} Visitor
 */

/**
 * Go through the data section of a file once, front to back (elsa-1.0.md §3.4, §8.1).
 * @param {{name: string, bytes: Bytes, header: Header}} file at the beginning of the data section
 * @param {Kernels} kernels whose block the pieces are
 * @param {Map<string, string> | false} checksums to compare
 * @param {(entry: Entry) => Visitor | undefined} visit
 */
export function readData({ name, bytes, header }, kernels, checksums, visit) {
  return about(name, async () => {
    for (const entry of header.order) {
      const { name, begin, size } = entry
      const visitor = visit(entry)
      const stated = checksums && checksums.get(name)
      const update = stated && startXxh3(kernels, size)
      let value = 0n
      // Once also for a tensor without bytes.
      for (let at = 0; !at || at < size; at += BLOCK) {
        const piece = kernels.block.subarray(0, Math.min(BLOCK, size - at))
        const filled = await bytes.fill(piece)
        if (filled < piece.length) checkSize(header, begin + at + filled)
        if (update) value = update(piece.length)
        const done = visitor?.(piece, at)
        if (done) await done
      }
      if (stated) checkSum(say`checksum of ${name}`, value, stated)
    }
    if (await bytes.more()) checkSize(header, header.size + bytes.rest.length)
  })
}

/**
 * @param {Header} header
 * @param {number} size of the data section, as far as it is known
 */
export function checkSize(header, size) {
  expect(size < header.size ? 'Truncated' : 'TrailingData', 'size of the data', size, header.size)
}

/**
 * @param {number} size
 * @returns {Uint8Array<ArrayBuffer>}
 */
export function allocate(size) {
  try {
    return new Uint8Array(size)
  } catch {
    fail('TooLarge', `no memory for ${size} bytes`)
  }
}

/**
 * @param {{dtype: string, shape: (number | bigint)[]}} entry
 * @param {Uint8Array} bytes
 * @returns {Tensor}
 */
export function makeTensor({ dtype, shape }, bytes) {
  return { dtype, shape: /** @type {number[]} */ (shape), data: arrayOf(dtype, bytes) }
}

/**
 * Makes a tensor of what comes.
 * @param {Entry} entry
 * @param {(tensor: Tensor) => void} keep
 * @returns {Visitor}
 */
export function collect(entry, keep) {
  const target = allocate(entry.size)
  keep(makeTensor(entry, target))
  return (piece, at) => target.set(piece, at)
}

/**
 * @param {ArrayBufferView} view
 * @returns {Uint8Array}
 */
export function bytesOf({ buffer, byteOffset, byteLength }) {
  return new Uint8Array(buffer, byteOffset, byteLength)
}
