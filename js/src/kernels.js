import { WASM } from './wasm.js'

/**
 * The loops that touch every byte. They work on one block of 64 KiB at a fixed place: data of any alignment is copied
 * there, hashed, masked and compacted in place, and copied to where it belongs. Words have 2, 4 or 8 bytes.
 * @typedef {object} Kernels
 * @property {any} wasm the functions of WebAssembly, where it is allowed
 * @property {Uint8Array} block what is worked on
 * @property {Uint8Array} bytes all of the memory, the block at BLOCK
 * @property {Uint8Array} values the words of the block that are not zero, once `compact` (sift.js) was called
 * @property {Uint8Array} bits a bit for each word of the block, likewise
 * @property {BigUint64Array} accumulators of XXH3
 * @property {DataView} secret of XXH3, 192 bytes
 * @property {(count: number) => void} stripes XXH3 over the first so many stripes of 64 bytes of the block
 * @property {(width: number, bytes: number, low: number, level: number) => void} mask words to a level, in place; `low`
 *   has the counter's bits set
 */

export const BLOCK = 65536
const ACCUMULATORS = 2048
const SECRET = 2112
const BITS = 8192
const VALUES = 131072
const MEMORY = 262144

/**
 * Kernels with memory of their own, in WebAssembly where that is allowed.
 * @returns {Kernels}
 */
export function makeKernels() {
  const wasm = instantiate()
  /** @type {ArrayBuffer} */
  const buffer = wasm ? wasm.memory.buffer : new ArrayBuffer(MEMORY)
  return {
    wasm,
    bytes: new Uint8Array(buffer),
    block: new Uint8Array(buffer, BLOCK, BLOCK),
    values: new Uint8Array(buffer, VALUES, BLOCK),
    bits: new Uint8Array(buffer, BITS, BLOCK / 16),
    accumulators: new BigUint64Array(buffer, ACCUMULATORS, 8),
    secret: new DataView(buffer, SECRET, 192),
    .../** @type {ReturnType<typeof plain>} */ (wasm ?? plain(buffer)),
  }
}

/** @type {WebAssembly.Module | undefined | null} */
let compiled

/** @returns {any} the exports, or nothing where WebAssembly or its vectors are missing or forbidden */
function instantiate() {
  if (compiled === undefined) {
    try {
      compiled = new WebAssembly.Module(fromBase64(WASM))
    } catch {
      compiled = null
    }
  }
  return compiled && new WebAssembly.Instance(compiled).exports
}

/**
 * Take bytes through the block, piece by piece; once also if there are none.
 * @param {Kernels} kernels
 * @param {Uint8Array} bytes
 * @param {(piece: Uint8Array) => void} visit
 */
export function eachBlock({ block }, bytes, visit) {
  let at = 0
  do {
    const piece = bytes.subarray(at, at += BLOCK)
    block.set(piece)
    visit(piece)
  } while (at < bytes.length)
}

/** @param {string} text */
export function fromBase64(text) {
  return Uint8Array.from(atob(text), c => c.charCodeAt(0))
}

/**
 * The same in plain JavaScript.
 * @param {ArrayBuffer} buffer
 * @returns {Pick<Kernels, 'stripes' | 'mask'>}
 */
function plain(buffer) {
  const data = new Uint32Array(buffer, BLOCK, BLOCK / 4)
  const signed = new Int32Array(buffer, BLOCK, BLOCK / 4)
  const acc = new Uint32Array(buffer, ACCUMULATORS, 16)
  const secret = new Uint32Array(buffer, SECRET, 48)

  /** @param {number} i @param {number} low @param {number} high */
  function add(i, low, high) {
    const sum = acc[i] + low
    acc[i + 1] += high + (sum > 0xffffffff ? 1 : 0)
    acc[i] = sum
  }

  /** Add the product of two words of 32 bits; its upper half is exact in numbers below 2^49. @param {number} i @param {number} x @param {number} y */
  function multiplyAdd(i, x, y) {
    x >>>= 0
    y >>>= 0
    add(i, Math.imul(x, y) >>> 0, Math.floor((Math.floor((x & 0xffff) * y / 65536) + (x >>> 16) * y) / 65536))
  }

  /** All bits of a word that stays, none of one that goes: without a branch, which would be mispredicted too often. */
  const keep = (/** @type {number} */ counter, /** @type {number} */ level) => -counter >> 31 & ~(level - counter >> 31)

  return {
    stripes(count) {
      for (let s = 0; s < count; s++) {
        const from = 16 * s
        const key = 2 * (s & 15)
        for (let i = 0; i < 16; i += 2) {
          const low = data[from + i]
          const high = data[from + i + 1]
          add(i ^ 2, low, high)
          multiplyAdd(i, low ^ secret[key + i], high ^ secret[key + i + 1])
        }
        for (let i = 0; (s & 15) === 15 && i < 16; i += 2) {
          const low = acc[i] ^ (acc[i + 1] >>> 15) ^ secret[32 + i]
          const high = acc[i + 1] ^ secret[33 + i]
          acc[i] = acc[i + 1] = 0
          multiplyAdd(i, low, 0x9e3779b1)
          acc[i + 1] += Math.imul(high, 0x9e3779b1)
        }
      }
    },

    mask(width, bytes, low, level) {
      // Words of 2 bytes two at a time; what the last one may reach beyond the content is of no matter.
      for (let i = 0; i < bytes / 4; i += width > 4 ? 2 : 1) {
        const word = signed[i]
        let all = keep(word & low, level)
        if (width < 4) all = all & 0xffff | keep(word >>> 16 & low, level) << 16
        signed[i] = word & all
        if (width > 4) signed[i + 1] &= all
      }
    },
  }
}
