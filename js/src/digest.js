import { bytesOf } from './data.js'
import { bitsOf } from './dtypes.js'
import { expect } from './errors.js'
import { typeOf } from './header.js'
import { eachBlock } from './kernels.js'
import { sha256 } from './sha256.js'
import { compact } from './sift.js'
import { compareText } from './written.js'

/** @import { Tensor } from './data.js' */
/** @import { Kernels } from './kernels.js' */

/** @typedef {ReturnType<typeof startLine>} Line */

/**
 * Compare the digest of a level (elsa-1.0.md §7) with the one that is stated.
 * @param {number} level
 * @param {Map<string, Line>} lines one for each of its tensors, by name
 * @param {string | undefined} stated
 */
export function checkDigest(level, lines, stated) {
  const hash = sha256()
  for (const name of [...lines.keys()].sort(compareText)) hash.update(new TextEncoder().encode(lines.get(name)?.end()))
  expect('DigestMismatch', `digest of level ${level}`, `sha256:${hash.hex()}`, stated)
}

/**
 * The line of a tensor, whose bytes come in pieces; of a nested tensor those of the bitmask and of the values.
 * @param {string} name
 * @param {{dtype: string, shape: (number | bigint)[]}} tensor
 */
export function startLine(name, tensor) {
  const hashes = [sha256(), sha256()]
  let used = 1
  let line = ''
  return {
    /** @param {Uint8Array[]} pieces */
    update(...pieces) {
      used = pieces.length
      for (const [i, piece] of pieces.entries()) hashes[i].update(piece)
    },
    /** The same again if it is asked for again: levels share tensors. */
    end: () => line ||= `${new TextEncoder().encode(name).length}:${name} ${typeOf(tensor)} ${hashes.slice(0, used).map(hash => hash.hex()).join(' ')}\n`,
  }
}

/**
 * The line of a tensor in memory.
 * @param {Kernels} kernels
 * @param {string} name
 * @param {Tensor} tensor
 * @param {boolean} nested
 * @returns {Line}
 */
export function lineOf(kernels, name, tensor, nested) {
  const line = startLine(name, tensor)
  const bytes = bytesOf(tensor.data)
  if (nested) eachBlock(kernels, bytes, ({ length }) => line.update(...compact(kernels, bitsOf(tensor.dtype) / 8, length)))
  else line.update(bytes)
  return line
}
