import { DTYPES, FLOATS } from './dtypes.js'
import { fail, show } from './errors.js'
import { BLOCK } from './kernels.js'
import { checkSum, startXxh3 } from './xxh3.js'

/** @import { TypedArray } from './dtypes.js' */
/** @import { Entry, Header } from './header.js' */
/** @import { Kernels } from './kernels.js' */
/** @import { Profile } from './profile.js' */
/** @import { Bytes } from './source.js' */

/**
 * A tensor of a level. A dimension above 2^53 − 1, which only an empty tensor can have, is a bigint.
 * @typedef {{dtype: string, shape: number[], data: TypedArray}} Tensor
 */

/**
 * What becomes of a tensor's bytes: called for each piece of at most 64 KiB, which may be changed in place and is good
 * until the call, or the promise that it gives, is done.
 * @typedef {(piece: Uint8Array, at: number) => void | Promise<void>} Visitor
 */

/**
 * Go through the data section once, front to back (elsa-1.0.md §3.4, §8.1).
 * @param {Bytes} bytes at the beginning of the data section; closed in the end
 * @param {Header} header
 * @param {Kernels} kernels whose block the pieces are
 * @param {Map<string, string> | undefined} checksums to compare
 * @param {(entry: Entry) => Visitor | undefined} visit
 */
export async function readData(bytes, header, kernels, checksums, visit) {
  try {
    for (const entry of header.order) {
      const { name, begin, size } = entry
      const visitor = visit(entry)
      const stated = checksums?.get(name)
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
      if (stated) checkSum(`tensor ${show(name)}`, value, stated)
    }
    if (await bytes.more()) checkSize(header, header.size + bytes.rest.length)
  } finally {
    await bytes.close()
  }
}

/**
 * @param {Header} header
 * @param {number} [size] of the data section, as far as it is known
 */
export function checkSize(header, size = header.size) {
  if (size !== header.size) fail(size < header.size ? 'Truncated' : 'TrailingData', `${size} bytes of data, expected ${header.size}`)
}

/**
 * Level of a nested tensor's piece, in place (§4.2).
 * @param {Kernels} kernels
 * @param {Profile} profile
 * @param {Entry} entry
 * @param {number | 'dense'} level
 * @returns {((piece: Uint8Array) => void) | undefined} nothing where there is nothing to do
 */
export function masker(kernels, { bits, nested }, { name, dtype }, level) {
  return level === 'dense' || !nested.has(name) ? undefined
    : ({ length }) => kernels.mask(FLOATS[dtype].width, length, 2 ** bits - 1, level)
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
  const Type = /** @type {any} */ (DTYPES[dtype][1])
  const data = new Type(bytes.buffer, bytes.byteOffset, bytes.length / Type.BYTES_PER_ELEMENT)
  return { dtype, shape: /** @type {number[]} */ (shape), data }
}

/**
 * @param {ArrayBufferView} view
 * @returns {Uint8Array}
 */
export function bytesOf({ buffer, byteOffset, byteLength }) {
  return new Uint8Array(buffer, byteOffset, byteLength)
}
