import { fail } from './errors.js'

const CODE = 'InvalidDelivery'
const LIMIT = 12
const table = new Uint16Array(1 << LIMIT)

/** Reads the fields of a payload one after the other (delivery-1.0.md §5). */
export class Payload {
  /**
   * @param {Uint8Array} bytes more than the payload, by 8 at least
   * @param {number} size of the payload
   */
  constructor(bytes, size) {
    this.bytes = bytes
    this.size = size
    this.at = 0
  }

  /** Move on by so many bytes; gives where they begin. @param {number} count */
  skip(count) {
    const { at } = this
    if (count > this.size - at) fail(CODE, `a payload of ${this.size} bytes ends too soon`)
    this.at += count
    return at
  }

  byte() {
    return this.bytes[this.skip(1)]
  }

  /** An integer ≥ 0; those beyond 2^53 are rounded, and above any limit. */
  varint() {
    let value = 0
    for (let i = 0, scale = 1; ; i++, scale *= 128) {
      const byte = this.byte()
      value += (byte & 127) * scale
      if (i && !byte || i > 8) fail(CODE, 'a varint with too many bytes')
      if (byte < 128) return value
    }
  }

  /**
   * A byte stream (§8).
   * @param {Uint8Array} out
   * @param {number} count of its bytes
   */
  stream(out, count) {
    if (!count) return
    const type = this.byte()
    if (type === 0) {
      const at = this.skip(count)
      out.set(this.bytes.subarray(at, at + count))
    } else if (type === 1) out.fill(this.byte(), 0, count)
    else if (type === 2) this.huffman(out, count)
    else fail(CODE, `a byte stream of type ${type}`)
  }

  /** @param {Uint8Array} out @param {number} count */
  huffman(out, count) {
    const { bytes } = this
    const last = this.byte()
    const lengths = this.lengths(last)
    if (!lengths[last]) fail(CODE, 'code lengths that do not end with the last symbol')
    if (!fillTable(lengths)) fail(CODE, 'a Huffman code that is not complete')
    const sizes = [this.varint(), this.varint(), this.varint(), this.varint()]
    const quarter = count + 3 >> 2
    for (let i = 0; i < 4; i++) {
      const start = this.skip(sizes[i])
      const used = decode(bytes, start, out, Math.min(i * quarter, count), Math.min((i + 1) * quarter, count))
      if (used + 7 >> 3 !== sizes[i]) fail(CODE, `a bit stream of ${sizes[i]} bytes, expected ${used} bits`)
      this.checkUnused(used)
    }
  }

  /** The lengths of a code: of each its place in a list, so many ones and a zero (ELSA-D-038). @param {number} last symbol */
  lengths(last) {
    const lengths = new Uint8Array(last + 1)
    const list = [4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 3, 2, 1]
    let bits = 0
    for (let i = 0; i <= last; i++) {
      let place = 0
      while (this.bytes[bits & 7 ? this.at - 1 : this.skip(1)] >> (bits++ & 7) & 1) place++
      if (place >= list.length) fail(CODE, 'a code length that is not in the list')
      list.unshift(lengths[i] = list.splice(place, 1)[0])
    }
    this.checkUnused(bits)
    return lengths
  }

  /**
   * So many fields of a few bits each (ELSA-D-030), put above what is there.
   * @param {Uint32Array} out
   * @param {number} count
   * @param {number} width 1…7
   * @param {number} shift
   */
  fields(out, count, width, shift) {
    const { bytes } = this
    const start = this.skip(Math.ceil(count * width / 8))
    const mask = (1 << width) - 1
    for (let i = 0, bit = 0; i < count; i++, bit += width) {
      const at = start + (bit >>> 3)
      out[i] |= ((bytes[at] | bytes[at + 1] << 8) >> (bit & 7) & mask) << shift
    }
    this.checkUnused(count * width)
  }

  /** The bits behind the last one of a field that just ended must be 0. @param {number} bits of the field */
  checkUnused(bits) {
    if (bits & 7 && this.bytes[this.at - 1] >> (bits & 7)) fail(CODE, 'unused bits that are not 0')
  }

  end() {
    if (this.at !== this.size) fail(CODE, `a payload of ${this.size} bytes, expected ${this.at}`)
  }
}

/**
 * Symbols for each window of bits, each with the length of its codeword above it (§8.2).
 * @param {Uint8Array} lengths
 * @returns {boolean} whether the code fills the code space
 */
function fillTable(lengths) {
  // Codewords of a canonical code, seen as fractions, fill the space from 0 on in the order of their lengths.
  let used = 0
  for (let length = 1; length <= LIMIT; length++) {
    const share = 1 << LIMIT - length
    for (let symbol = 0; symbol < lengths.length; symbol++) {
      if (lengths[symbol] !== length) continue
      if (used >> LIMIT) return false
      let reversed = 0
      for (let i = 0; i < length; i++) reversed |= (used >> LIMIT - 1 - i & 1) << i
      for (let i = reversed; i >> LIMIT === 0; i += 1 << length) table[i] = length << 8 | symbol
      used += share
    }
  }
  return used === 1 << LIMIT && lengths.every(length => length <= LIMIT)
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
