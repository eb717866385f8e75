import { fillTable } from './streams.js'

// Where lengths and distances of RFC 1951 begin, and how many bits follow.
const EXTRA = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0]
const BASE = EXTRA.map((_, i) => i < 28 ? EXTRA.slice(0, i).reduce((sum, bits) => sum + 2 ** bits, 3) : 258)
const FAR_EXTRA = Array.from({ length: 30 }, (_, i) => Math.max(0, (i >> 1) - 1))
const FAR_BASE = FAR_EXTRA.map((_, i) => FAR_EXTRA.slice(0, i).reduce((sum, bits) => sum + 2 ** bits, 1))
const ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15]
const LIMIT = 15

/**
 * A zlib stream (RFC 1950) that is exactly these bytes and gives exactly so many, or nothing. Not DecompressionStream:
 * runtimes differ in what they make of bytes behind the end.
 * @param {Uint8Array} bytes
 * @param {number} size
 * @returns {Uint8Array | undefined}
 */
export function inflate(bytes, size) {
  const out = new Uint8Array(size)
  let [at, filled, window, held] = [2, 0, 0, 0]

  /** @param {number} count up to 16 */
  function bits(count) {
    while (held < count) {
      if (at >= bytes.length) throw RangeError()
      window |= bytes[at++] << held
      held += 8
    }
    const value = window & (1 << count) - 1
    window >>>= count
    held -= count
    return value
  }

  /** @param {Uint16Array} table */
  function symbol(table) {
    while (held < LIMIT && at < bytes.length) {
      window |= bytes[at++] << held
      held += 8
    }
    const entry = table[window & (1 << LIMIT) - 1]
    if (!entry) throw RangeError()
    bits(entry >> 9)
    return entry & 511
  }

  /** @param {Uint8Array} lengths @param {boolean} [code] of lengths */
  function makeTable(lengths, code) {
    const table = new Uint16Array(1 << LIMIT)
    // Like zlib: a code may be incomplete only where no codeword has more than one bit.
    if (!fillTable(table, lengths, LIMIT, 9) && (code || Math.max(...lengths) > 1 || lengths.filter(Boolean).length > 1)) {
      throw RangeError()
    }
    return table
  }

  function readTables() {
    const [literals, far, count] = [bits(5) + 257, bits(5) + 1, bits(4) + 4]
    if (literals > 286 || far > 30) throw RangeError()
    const first = new Uint8Array(19)
    for (let i = 0; i < count; i++) first[ORDER[i]] = bits(3)
    const table = makeTable(first, true)
    const lengths = new Uint8Array(literals + far)
    for (let i = 0; i < lengths.length;) {
      const code = symbol(table)
      if (code < 16) lengths[i++] = code
      else {
        if (code === 16 && !i) throw RangeError()
        const value = code === 16 ? lengths[i - 1] : 0
        const end = i + (code === 18 ? 11 + bits(7) : code === 17 ? 3 + bits(3) : 3 + bits(2))
        if (end > lengths.length) throw RangeError()
        lengths.fill(value, i, end)
        i = end
      }
    }
    if (!lengths[256]) throw RangeError()
    return [makeTable(lengths.subarray(0, literals)), makeTable(lengths.subarray(literals))]
  }

  function readStored() {
    // What is held beyond whole bytes is dropped, whole bytes are given back.
    at -= held >> 3
    window = held = 0
    const length = bits(16)
    if ((bits(16) ^ 0xffff) !== length || length > bytes.length - at || length > size - filled) throw RangeError()
    out.set(bytes.subarray(at, at + length), filled)
    at += length
    filled += length
  }

  /** @param {Uint16Array[]} tables */
  function readBlock([near, far]) {
    for (let code; (code = symbol(near)) !== 256;) {
      if (code < 256) {
        if (filled === size) throw RangeError()
        out[filled++] = code
        continue
      }
      if (code > 285) throw RangeError()
      const length = BASE[code - 257] + bits(EXTRA[code - 257])
      const place = symbol(far)
      if (place > 29) throw RangeError()
      const distance = FAR_BASE[place] + bits(FAR_EXTRA[place])
      if (distance > filled || length > size - filled) throw RangeError()
      for (let i = 0; i < length; i++, filled++) out[filled] = out[filled - distance]
    }
  }

  try {
    if ((bytes[0] << 8 | bytes[1]) % 31 || (bytes[0] & 15) !== 8 || bytes[0] >> 4 > 7 || bytes[1] & 32) return undefined
    for (let last = 0; !last;) {
      last = bits(1)
      const type = bits(2)
      if (type === 3) return undefined
      if (type === 0) readStored()
      else readBlock(type === 2 ? readTables() : fixedTables())
    }
  } catch (error) {
    if (error instanceof RangeError) return undefined
    throw error
  }
  at -= held >> 3
  const view = new DataView(bytes.buffer, bytes.byteOffset)
  return filled === size && at + 4 === bytes.length && view.getUint32(at) === adler32(out) ? out : undefined

  function fixedTables() {
    const lengths = new Uint8Array(288).fill(8).fill(9, 144, 256).fill(7, 256, 280)
    return [makeTable(lengths), makeTable(new Uint8Array(32).fill(5))]
  }
}

/** @param {Uint8Array} bytes */
function adler32(bytes) {
  let [a, b] = [1, 0]
  for (let at = 0; at < bytes.length;) {
    // So many sums stay below 2^32.
    for (const end = Math.min(at + 3800, bytes.length); at < end; at++) b += a += bytes[at]
    a %= 65521
    b %= 65521
  }
  return (b << 16 | a) >>> 0
}
