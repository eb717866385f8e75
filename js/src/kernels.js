import { WASM } from './wasm.js'

/**
 * The loops that touch every byte. They work on one block of 64 KiB at a fixed place: data of any alignment is copied
 * there, hashed, masked and compacted in place, and copied to where it belongs. Words have 2, 4 or 8 bytes.
 * @typedef {object} Kernels
 * @property {'wasm' | 'plain'} kind
 * @property {Uint8Array} block what is worked on
 * @property {Uint8Array} bytes all of the memory, the block at BLOCK
 * @property {Uint8Array} values of `compact`
 * @property {Uint8Array} bits of `compact`
 * @property {BigUint64Array} accumulators of XXH3
 * @property {DataView} secret of XXH3, 192 bytes
 * @property {(count: number) => void} stripes XXH3 over the first so many stripes of 64 bytes of the block
 * @property {(width: number, bytes: number, low: number, level: number) => void} mask words to a level, in place; `low`
 *   has the counter's bits set
 * @property {(width: number, bytes: number, low: number, levels: number, exponent: number) => number} check words: 1 if
 *   one is Inf or NaN, so that its highest 16 bits have all of `exponent`, 2 if one has a counter above `levels`, 3 if both
 * @property {(width: number, bytes: number) => number} compact the words that are not zero to `values`, and a bit for each
 *   word to `bits`; gives the bytes of the values
 */

export const BLOCK = 65536
const ACCUMULATORS = 2048
const SECRET = 2112
const BITS = 8192
const VALUES = 131072
const MEMORY = 262144
/** For each of 8 bytes, where the byte of the counter's 16 bits is that says whether it stays. @type {Record<number, bigint>} */
const SPREAD = { 2: 0x0706050403020100n, 4: 0x0504050401000100n, 8: 0x0100010001000100n }

/**
 * Kernels with memory of their own, in WebAssembly where that is allowed.
 * @returns {Kernels}
 */
export function makeKernels() {
  if (!new Uint8Array(Uint16Array.of(1).buffer)[0]) throw Error('elsa-format needs a little-endian machine')
  const wasm = instantiate()
  /** @type {ArrayBuffer} */
  const buffer = wasm ? wasm.memory.buffer : new ArrayBuffer(MEMORY)
  const halves = new Uint16Array(buffer, BLOCK, BLOCK / 2)
  return {
    kind: wasm ? 'wasm' : 'plain',
    bytes: new Uint8Array(buffer),
    block: new Uint8Array(buffer, BLOCK, BLOCK),
    values: new Uint8Array(buffer, VALUES, BLOCK),
    bits: new Uint8Array(buffer, BITS, BLOCK / 16),
    accumulators: new BigUint64Array(buffer, ACCUMULATORS, 8),
    secret: new DataView(buffer, SECRET, 192),
    check(width, bytes, low, levels, exponent) {
      const step = width / 2
      let found = 0
      for (let i = 0; i < bytes / 2; i += step) {
        if ((halves[i + step - 1] & exponent) === exponent) found |= 1
        if ((halves[i] & low) > levels) found |= 2
      }
      return found
    },
    ...wasm ? {
      stripes: wasm.stripes,
      mask: (width, bytes, low, level) => wasm.mask(bytes, low, level, SPREAD[width]),
      compact: (width, bytes) => wasm.compact(bytes, width),
    } : plain(buffer, halves),
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

/** @param {string} text */
export function fromBase64(text) {
  return Uint8Array.from(atob(text), c => c.charCodeAt(0))
}

/**
 * The same in plain JavaScript.
 * @param {ArrayBuffer} buffer
 * @param {Uint16Array} halves of the block
 * @returns {Pick<Kernels, 'stripes' | 'mask' | 'compact'>}
 */
function plain(buffer, halves) {
  const data = new Uint32Array(buffer, BLOCK, BLOCK / 4)
  const signed = new Int32Array(buffer, BLOCK, BLOCK / 4)
  const bits = new Uint8Array(buffer, BITS, BLOCK / 16)
  const acc = new Uint32Array(buffer, ACCUMULATORS, 16)
  const secret = new Uint32Array(buffer, SECRET, 48)

  /** @param {number} i @param {number} low @param {number} high */
  function add(i, low, high) {
    const sum = acc[i] + low
    acc[i + 1] += high + (sum > 0xffffffff ? 1 : 0)
    acc[i] = sum
  }

  /** Add the product of two words of 32 bits, from halves of 16. @param {number} i @param {number} x @param {number} y */
  function multiplyAdd(i, x, y) {
    const a = x & 0xffff
    const b = x >>> 16
    const c = y & 0xffff
    const d = y >>> 16
    const middle = Math.imul(b, c) >>> 0
    const other = (Math.imul(a, d) >>> 0) + (Math.imul(a, c) >>> 16) + (middle & 0xffff)
    add(i, Math.imul(x, y) >>> 0, Math.imul(b, d) + (middle >>> 16) + Math.floor(other / 65536) >>> 0)
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
      const end = bytes / 4
      if (width === 4) for (let i = 0; i < end; i++) signed[i] &= keep(signed[i] & low, level)
      else if (width === 2) {
        // Two at a time; what the last one may reach beyond the content is of no matter.
        for (let i = 0; i < end; i++) {
          const word = signed[i]
          signed[i] = word & (keep(word & low, level) & 0xffff | keep(word >>> 16 & low, level) << 16)
        }
      } else {
        for (let i = 0; i < end; i += 2) {
          const all = keep(signed[i] & low, level)
          signed[i] &= all
          signed[i + 1] &= all
        }
      }
    },

    compact(width, bytes) {
      const [words, values] = width === 2 ? [halves, new Uint16Array(buffer, VALUES)] : [data, new Uint32Array(buffer, VALUES)]
      const step = width === 8 ? 2 : 1
      let kept = 0
      bits.fill(0)
      for (let i = 0, at = 0; at * width < bytes * step; i++, at += step) {
        if (words[at] || step === 2 && words[at + 1]) {
          bits[i >> 3] |= 1 << (i & 7)
          values[kept++] = words[at]
          if (step === 2) values[kept++] = words[at + 1]
        }
      }
      return kept * width / step
    },
  }
}
