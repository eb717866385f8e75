import { bytesOf } from './data.js'
import { bitsOf } from './dtypes.js'
import { fail } from './errors.js'
import { BLOCK } from './kernels.js'
import { sha256 } from './sha256.js'
import { compact } from './sift.js'
import { compareText } from './written.js'

/** @import { Tensor } from './data.js' */
/** @import { Kernels } from './kernels.js' */

/**
 * Compare the digest of a level (elsa-1.0.md §7) with the one that is stated.
 * @param {number} level
 * @param {Map<string, string>} lines one for each of its tensors, by name
 * @param {string | undefined} stated
 * @returns {number} 1: so many were compared
 */
export function checkDigest(level, lines, stated) {
  const hash = sha256()
  for (const name of [...lines.keys()].sort(compareText)) hash.update(new TextEncoder().encode(lines.get(name)))
  const found = `sha256:${hash.hex()}`
  if (found !== stated) fail('DigestMismatch', `level ${level} has the digest ${found}, expected ${stated}`)
  return 1
}

/**
 * The line of a tensor, whose bytes come through the block of the kernels; of a nested tensor masked.
 * @param {Kernels} kernels
 * @param {string} name
 * @param {{dtype: string, shape: (number | bigint)[]}} tensor
 * @param {boolean} nested
 */
export function startLine(kernels, name, { dtype, shape }, nested) {
  const hash = sha256()
  const values = nested ? sha256() : undefined
  return {
    /** Take in a piece; gives the bytes of a nested tensor that are kept. @param {Uint8Array} piece */
    update(piece) {
      if (!values) return hash.update(piece), 0
      const width = bitsOf(dtype) / 8
      const size = compact(kernels, width, piece.length)
      hash.update(kernels.bits.subarray(0, Math.ceil(piece.length / width / 8)))
      values.update(kernels.values.subarray(0, size))
      return size
    },
    end() {
      const hashes = hash.hex() + (values ? ` ${values.hex()}` : '')
      return `${new TextEncoder().encode(name).length}:${name} ${dtype} [${shape}] ${hashes}\n`
    },
  }
}

/**
 * The line of a tensor in memory.
 * @param {Kernels} kernels
 * @param {string} name
 * @param {Tensor} tensor
 * @param {boolean} nested
 * @returns {string}
 */
export function lineOf(kernels, name, tensor, nested) {
  const line = startLine(kernels, name, tensor, nested)
  const bytes = bytesOf(tensor.data)
  for (let at = 0; at < bytes.length; at += BLOCK) {
    const piece = bytes.subarray(at, at + BLOCK)
    kernels.block.set(piece)
    line.update(piece)
  }
  return line.end()
}
