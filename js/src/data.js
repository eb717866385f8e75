import { DTYPES, FLOATS } from './dtypes.js'
import { fail, show } from './errors.js'
import { BLOCK } from './kernels.js'
import { Xxh3, writeChecksum } from './xxh3.js'

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
 * @param {Bytes} bytes at the beginning of the data section
 * @param {Header} header
 * @param {Kernels} kernels whose block the pieces are
 * @param {Map<string, string>} checksums to compare
 * @param {(entry: Entry) => Visitor | undefined} visit
 */
export async function readData(bytes, header, kernels, checksums, visit) {
  for (const entry of header.order) {
    const visitor = visit(entry)
    const stated = checksums.get(entry.name)
    const hash = stated && new Xxh3(kernels, entry.size)
    // Once also for a tensor without bytes.
    for (let at = 0; at < Math.max(entry.size, 1); at += BLOCK) {
      const piece = kernels.block.subarray(0, Math.min(BLOCK, entry.size - at))
      const filled = await bytes.fill(piece)
      if (filled < piece.length) checkSize(header, entry.begin + at + filled)
      if (hash) hash.update(piece.length)
      const done = visitor?.(piece, at)
      if (done) await done
    }
    if (hash && writeChecksum(hash.value) !== stated) {
      fail('ChecksumMismatch', `tensor ${show(entry.name)}: checksum ${writeChecksum(hash.value)}, expected ${stated}`)
    }
  }
  if (await bytes.more()) checkSize(header, header.size + bytes.rest.length)
}

/**
 * @param {Header} header
 * @param {number} [size] of the data section, as far as it is known
 */
export function checkSize(header, size = header.size) {
  if (size < header.size) fail('Truncated', `${size} bytes of data, expected ${header.size}`)
  if (size > header.size) fail('TrailingData', `${size} bytes of data, expected ${header.size}`)
}

/**
 * Level of a nested tensor's piece, in place (§4.2).
 * @param {Kernels} kernels
 * @param {Profile} profile
 * @param {Entry} entry
 * @param {number | 'dense'} level
 * @returns {((piece: Uint8Array) => void) | undefined} nothing where there is nothing to do
 */
export function masker(kernels, profile, entry, level) {
  if (level === 'dense' || !profile.nested.has(entry.name)) return undefined
  const low = 2 ** profile.bits - 1
  return piece => kernels.mask(FLOATS[entry.dtype].width, piece.length, low, level)
}

/**
 * @param {number} size
 * @returns {ArrayBuffer}
 */
export function allocate(size) {
  try {
    return new ArrayBuffer(size)
  } catch {
    fail('TooLarge', `no memory for ${size} bytes`)
  }
}

/**
 * @param {Entry} entry
 * @param {ArrayBuffer} [buffer]
 * @returns {Tensor}
 */
export function makeTensor({ dtype, shape, size }, buffer = allocate(size)) {
  return { dtype, shape: /** @type {number[]} */ (shape), data: new DTYPES[dtype][1](buffer) }
}

/**
 * @param {Tensor} tensor
 * @returns {Uint8Array}
 */
export function bytesOf({ data }) {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
}
