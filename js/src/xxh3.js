import { expect } from './errors.js'
import { BLOCK, eachBlock, fromBase64, makeKernels } from './kernels.js'

/** @import { Kernels } from './kernels.js' */

// XXH3-64 as xxHash 0.8 defines it. Inputs of up to 240 bytes, and the end of longer ones, are computed in bigints; what
// takes time is in the kernels.
const MASK = 0xffffffffffffffffn
/** The secret, and behind it what the accumulators begin with. */
const TABLE = fromBase64(
  'uP5sOSOkS758AYEs9yGtHN7UbemDkJfbckCkpLezZx/LeeZOzMDleIJa0H3M/3IhuAhGdPdDJI7gNZDmgTomTDwoUruRwwDLiNBl' +
  'ixtTLqNxZEiXog35TjgZ70ap3qzYqPp2P+OcND/53LvHxwtPHYpR4EvNtFkxyJ9+ydl4c2TqxayDNNPrw8WBoP/6E2PrFw3dUbfw' +
  '2knTFlUmKdRonisWvlh9R6H8j/i40XrQMc5FyzqPlRYEKK/X+8q7S0B+Pa6ywgAAAACHyuuFsXk3nk/r1Cc9rrLC+Xk3nrFnVhZj' +
  'rrLCd8rrhXfK64UAAAAAxWdWFi/r1CexeTeeAAAAAA==').buffer
const SECRET = new DataView(TABLE)
const START = new BigUint64Array(TABLE, 192)
const [, P1, P2, P3] = START

/** @param {DataView} view @param {number} at */
const u64 = (view, at) => view.getBigUint64(at, true)
/** @param {bigint} x @param {bigint} n */
const rotate = (x, n) => (x << n | x >> 64n - n) & MASK

/** The product of two words of 64 bits, its halves joined. @param {bigint} x @param {bigint} y */
function fold(x, y) {
  const product = (x & MASK) * (y & MASK)
  return (product ^ product >> 64n) & MASK
}

/** @param {bigint} x */
function avalanche(x) {
  x &= MASK
  x = (x ^ x >> 37n) * 0x165667919e3779f9n & MASK
  return x ^ x >> 32n
}

/** @param {bigint} x */
function avalanche64(x) {
  x &= MASK
  x = (x ^ x >> 33n) * P2 & MASK
  x = (x ^ x >> 29n) * P3 & MASK
  return x ^ x >> 32n
}

/** Bytes of a word in the other order. @param {bigint} x @param {number} width */
function swap(x, width) {
  let result = 0n
  for (let i = 0; i < width; i++, x >>= 8n) result = result << 8n | x & 255n
  return result
}

/**
 * Up to 240 bytes.
 * @param {Uint8Array} bytes
 * @param {bigint} seed
 * @returns {bigint}
 */
function short(bytes, seed) {
  const data = new DataView(bytes.buffer, bytes.byteOffset, bytes.length)
  const n = bytes.length
  /** @param {number} at */
  const s = at => u64(SECRET, at)
  /** @param {number} at @param {number} key */
  const mix = (at, key) => fold(u64(data, at) ^ s(key) + seed & MASK, u64(data, at + 8) ^ s(key + 8) - seed & MASK)
  if (n === 0) return avalanche64(seed ^ s(56) ^ s(64))
  if (n < 4) {
    const all = BigInt((bytes[0] << 16 | bytes[n >> 1] << 24 | bytes[n - 1] | n << 8) >>> 0)
    return avalanche64(all ^ ((s(0) ^ s(0) >> 32n) & 0xffffffffn) + seed)
  }
  if (n <= 8) {
    const key = (s(8) ^ s(16)) - (seed ^ swap(seed & 0xffffffffn, 4) << 32n) & MASK
    const all = BigInt(data.getUint32(n - 4, true)) + (BigInt(data.getUint32(0, true)) << 32n) ^ key
    let x = (all ^ rotate(all, 49n) ^ rotate(all, 24n)) * 0x9fb21c651e98df25n & MASK
    x = (x ^ (x >> 35n) + BigInt(n)) * 0x9fb21c651e98df25n & MASK
    return x ^ x >> 28n
  }
  if (n <= 16) {
    const low = u64(data, 0) ^ (s(24) ^ s(32)) + seed & MASK
    const high = u64(data, n - 8) ^ (s(40) ^ s(48)) - seed & MASK
    return avalanche(BigInt(n) + swap(low, 8) + high + fold(low, high))
  }
  let x = BigInt(n) * P1
  if (n <= 128) {
    for (let i = n - 1 >> 5; i >= 0; i--) x += mix(16 * i, 32 * i) + mix(n - 16 * (i + 1), 32 * i + 16)
    return avalanche(x)
  }
  for (let i = 0; i < 8; i++) x += mix(16 * i, 16 * i)
  x = avalanche(x)
  for (let i = 8; i < n >> 4; i++) x += mix(16 * i, 16 * i - 125)
  return avalanche(x + mix(n - 16, 119))
}

/**
 * The checksum of bytes that come through the block of the kernels, their number being known.
 * @param {Kernels} kernels
 * @param {number} length
 * @param {bigint} [seed]
 * @returns {(count: number) => bigint} takes in the first so many bytes of the block, which is all of it unless it is the
 *   last; then it gives the checksum
 */
export function startXxh3(kernels, length, seed = 0n) {
  const { accumulators: acc, block, bytes, secret, stripes } = kernels
  let left = length
  acc.set(START)
  for (let i = 0; i < 192; i += 8) secret.setBigUint64(i, u64(SECRET, i) + (i & 8 ? -seed : seed), true)
  return count => {
    left -= count
    if (length <= 240) return short(block.subarray(0, count), seed)
    stripes(left ? BLOCK / 64 : count - 1 >> 6)
    if (left) {
      // The last stripe is the last 64 bytes, which may begin in the block before the last.
      bytes.copyWithin(BLOCK - 64, 2 * BLOCK - 64, 2 * BLOCK)
      return 0n
    }
    const last = new DataView(bytes.buffer, BLOCK + count - 64)
    for (let i = 0; i < 8; i++) {
      const key = u64(last, 8 * i) ^ u64(secret, 121 + 8 * i)
      acc[i ^ 1] += u64(last, 8 * i)
      acc[i] += (key & 0xffffffffn) * (key >> 32n)
    }
    let x = BigInt(length) * P1
    for (let i = 0; i < 8; i += 2) x += fold(acc[i] ^ u64(secret, 11 + 8 * i), acc[i + 1] ^ u64(secret, 19 + 8 * i))
    return avalanche(x)
  }
}

/**
 * @param {Uint8Array} bytes
 * @param {bigint} [seed]
 * @param {Kernels} [kernels] whose block may be overwritten
 * @returns {bigint}
 */
export function xxh3(bytes, seed, kernels = makeKernels()) {
  const update = startXxh3(kernels, bytes.length, seed)
  let value = 0n
  eachBlock(kernels, bytes, ({ length }) => {
    value = update(length)
  })
  return value
}

/**
 * Compare a checksum with one in a document.
 * @param {string} what was hashed
 * @param {bigint} value
 * @param {string} stated
 */
export function checkSum(what, value, stated) {
  expect('ChecksumMismatch', what, writeChecksum(value), stated)
}

/**
 * A checksum as documents write it.
 * @param {bigint} value
 * @returns {string}
 */
export function writeChecksum(value) {
  return `xxh3:${value.toString(16).padStart(16, '0')}`
}
