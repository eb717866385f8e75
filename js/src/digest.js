import { FLOATS } from './dtypes.js'
import { sha256 } from './sha256.js'
import { compareText, writeJson } from './written.js'

/** @import { Kernels } from './kernels.js' */

/**
 * The digest of a level (elsa-1.0.md §7), from one line for each of its tensors.
 * @param {Map<string, string>} lines by name
 * @returns {string}
 */
export function levelDigest(lines) {
  const hash = sha256()
  for (const name of [...lines.keys()].sort(compareText)) hash.update(new TextEncoder().encode(lines.get(name)))
  return `sha256:${hash.hex()}`
}

/**
 * @param {string} name
 * @param {{dtype: string, shape: (number | bigint)[]}} tensor
 * @param {string[]} hashes of its bytes; of a nested tensor of its bitmask and its values
 * @returns {string}
 */
export function digestLine(name, { dtype, shape }, hashes) {
  return `${new TextEncoder().encode(name).length}:${name} ${dtype} ${writeJson(shape)} ${hashes.join(' ')}\n`
}

/** Hashes of the bitmask and the values of a nested tensor, whose words come through the block of the kernels. */
export class NestedHash {
  /**
   * @param {Kernels} kernels
   * @param {string} dtype
   */
  constructor(kernels, dtype) {
    this.kernels = kernels
    this.width = FLOATS[dtype].width
    this.bitmask = sha256()
    this.values = sha256()
  }

  /** Take in the first so many bytes of the block, masked. @param {number} count */
  update(count) {
    const size = this.kernels.compact(this.width, count)
    this.bitmask.update(this.kernels.bits.subarray(0, Math.ceil(count / this.width / 8)))
    this.values.update(this.kernels.values.subarray(0, size))
    return size / this.width
  }

  hashes() {
    return [this.bitmask.hex(), this.values.hex()]
  }
}
