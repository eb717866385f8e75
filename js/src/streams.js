import { within } from './errors.js'

const LIMIT = 12
const table = new Uint16Array(1 << LIMIT)

// The payload that is being decoded (delivery-1.0.md §5): its fields are read one after the other. There is one at a time,
// from `open` to `end`, since nothing waits in between.
let where = ''
export let bytes = /** @type {Uint8Array} */ (new Uint8Array(0))
let size = 0
let at = 0

/**
 * A payload, in memory with 8 bytes more at least, and what to call it.
 * @typedef {[from: Uint8Array, length: number, name: string]} Payload
 */

/** @param {Payload} payload */
export function open([from, length, name]) {
  where = name
  bytes = from
  size = length
  at = 0
}

/**
 * Refuse a number of the payload that is too small or too large. In loops over words it is called only for those: the call
 * takes time.
 * @param {string} what
 * @param {number} found
 * @param {number} least
 * @param {number} [most]
 */
export function check(what, found, least, most = least) {
  if (!(found >= least && found <= most)) within('InvalidDelivery', `${where}: ${what}`, found, least, most)
}

/** Move on by so many bytes; gives where they begin. @param {number} count */
export function skip(count) {
  check('end of a field', at + count, 0, size)
  at += count
  return at - count
}

export const byte = () => bytes[skip(1)]

/** An integer ≥ 0; those beyond 2^53 are rounded, and above any limit. */
export function varint() {
  let value = 0
  for (let i = 0, scale = 1; ; i++, scale *= 128) {
    const next = byte()
    value += (next & 127) * scale
    if (i && !next || i > 8) check('size of a number', i + 1, 1, Math.min(i, 9))
    if (next < 128) return value
  }
}

/**
 * A byte stream (§8).
 * @param {Uint8Array} out
 * @param {number} count of its bytes
 */
export function stream(out, count) {
  if (!count) return
  const type = byte()
  if (type === 0) out.set(bytes.subarray(skip(count), at))
  else if (type === 1) out.fill(byte(), 0, count)
  else if (type === 2) huffman(out, count)
  else check('type of a byte stream', type, 0, 2)
}

/** @param {Uint8Array} out @param {number} count */
function huffman(out, count) {
  fillTable(lengths(byte()))
  const sizes = [varint(), varint(), varint(), varint()]
  const quarter = count + 3 >> 2
  for (let i = 0; i < 4; i++) {
    const used = decode(bytes, skip(sizes[i]), out, Math.min(i * quarter, count), Math.min((i + 1) * quarter, count))
    check('size of a bit stream', sizes[i], used + 7 >> 3)
    checkUnused(used)
  }
}

/** The lengths of a code: of each its place in a list, so many ones and a zero (ELSA-D-038). @param {number} last symbol */
function lengths(last) {
  const found = new Uint8Array(last + 1)
  const list = [4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 3, 2, 1]
  let bits = 0
  for (let i = 0; i <= last; i++) {
    let place = 0
    while (bytes[bits & 7 ? at - 1 : skip(1)] >> (bits++ & 7) & 1) place++
    check('place of a code length', place, 0, 12)
    list.unshift(found[i] = list.splice(place, 1)[0])
  }
  checkUnused(bits)
  check('last code length', found[last], 1, LIMIT)
  return found
}

/**
 * So many fields of a few bits each (ELSA-D-030), put above what is there.
 * @param {Uint32Array} out
 * @param {number} count
 * @param {number} width 1…7
 * @param {number} shift
 */
export function fields(out, count, width, shift) {
  const from = bytes
  const start = skip(Math.ceil(count * width / 8))
  const mask = (1 << width) - 1
  for (let i = 0, bit = 0; i < count; i++, bit += width) {
    const place = start + (bit >>> 3)
    out[i] |= ((from[place] | from[place + 1] << 8) >> (bit & 7) & mask) << shift
  }
  checkUnused(count * width)
}

/** The bits behind the last one of a field that just ended must be 0. @param {number} bits of the field */
export function checkUnused(bits) {
  if (bits & 7) check('value of unused bits', bytes[at - 1] >> (bits & 7), 0)
}

export function end() {
  check('end of the last field', at, size)
}

/**
 * Symbols for each window of bits, each with the length of its codeword above it (§8.2).
 * @param {Uint8Array} lengths
 */
function fillTable(lengths) {
  // Codewords of a canonical code, seen as fractions, fill the space from 0 on in the order of their lengths.
  let used = 0
  for (let length = 1; length <= LIMIT; length++) {
    for (let symbol = 0; symbol < lengths.length; symbol++) {
      if (lengths[symbol] !== length) continue
      let reversed = 0
      for (let i = 0; i < length; i++) reversed |= (used >> LIMIT - 1 - i & 1) << i
      for (let i = reversed; i >> LIMIT === 0; i += 1 << length) table[i] = length << 8 | symbol
      used += 1 << LIMIT - length
    }
  }
  check('sum of the code', used, 1 << LIMIT)
}

/**
 * Decode symbols `from`…`to` of `out` from the bytes at `at`; gives the bits that were read.
 * @param {Uint8Array} bytes
 * @param {number} at
 * @param {Uint8Array} out
 * @param {number} from
 * @param {number} to
 */
function decode(bytes, at, out, from, to) {
  const start = at
  let window = 0
  let bits = 0
  for (let i = from; i < to; i++) {
    if (bits < LIMIT) {
      window |= (bytes[at] | bytes[at + 1] << 8) << bits
      at += 2
      bits += 16
    }
    const entry = table[window & 4095]
    out[i] = entry
    window >>>= entry >> 8
    bits -= entry >> 8
  }
  return 8 * (at - start) - bits
}
