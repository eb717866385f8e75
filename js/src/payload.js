import { byte, bytes, check, checkUnused, end, fields, open, skip, stream, varint } from './streams.js'

/** @import { Payload } from './streams.js' */

/**
 * Words of one dtype: bits of each, bits of the mantissa if the dtype can carry counters, else −1.
 * @typedef {{bits: number, mantissa: number}} WordType
 * @typedef {any} Words an array of unsigned words: the type of its elements is that of the bits
 */

/**
 * Decodes the payloads of blocks (delivery-1.0.md §5 to §7), in memory of its own that it uses again and again.
 * @param {number} most words of a block
 * @param {number} tau
 * @param {number} levels
 */
export function makeDecoder(most, tau, levels) {
  const everywhere = new Uint32Array(most)
  for (let i = 0; i < most; i++) everywhere[i] = i
  /** Where the words are that no part has described. */
  const left = new Uint32Array(most)
  const places = new Uint32Array(most)
  const symbols = new Uint8Array(most)
  const distances = new Uint8Array(most)
  const low = new Uint32Array(most)
  const high = new Uint32Array(most)

  /**
   * All words of a block, without counters (ELSA-D-019).
   * @param {Payload} payload
   * @param {Words} words
   * @param {WordType} type
   */
  function plain(payload, words, type) {
    open(payload)
    values(words, type, words.length, everywhere, 0, 0)
    end()
  }

  /**
   * The words of a nested block that have one counter; those that were described before are not zero (ELSA-D-020).
   * @param {Payload} payload
   * @param {Words} words
   * @param {WordType} type
   * @param {number} part 1…T, or 0 for the dense part
   * @returns {Uint32Array | undefined} the places of the words; nothing if the block is stored, so that all of them are there
   */
  function nested(payload, words, type, part) {
    const [, size] = payload
    const none = left.subarray(0, 0)
    if (!size && part) return none
    let count = 0
    // Before part 1 none is described.
    if (part === 1) count = words.length
    else for (let i = 0; i < words.length; i++) if (!words[i]) left[count++] = i
    open(payload)
    if (!size) {
      check('number of words left', count, 0)
      return none
    }
    const kept = varint()
    const mode = byte()
    if (mode === 4 && part === 1) {
      stored(words, kept)
      return undefined
    }
    check('k', kept, part ? 1 : count || 1, count)
    const places = positions(mode, kept, part === 1 ? everywhere : left, count)
    values(words, type, kept, places, tau, part)
    end()
    return places.subarray(0, kept)
  }

  /**
   * Which of the words that are left are meant (§6).
   * @param {number} mode
   * @param {number} kept
   * @param {Uint32Array} left
   * @param {number} count of words that are left
   * @returns {Uint32Array}
   */
  function positions(mode, kept, left, count) {
    if (mode === 0 && kept === count) return left
    let found = 0
    if (mode === 3) {
      const from = bytes
      const start = skip(count + 7 >> 3)
      for (let i = 0; i < count; i++) {
        places[found] = left[i]
        found += from[start + (i >> 3)] >> (i & 7) & 1
      }
      checkUnused(count)
      check('number of words taken', found, kept)
      return places
    }
    check('mode', mode, 1, 3)
    check('k of this mode', kept, 1, count - 1)
    const gaps = varint()
    check('number of gaps', gaps, 0, count)
    stream(symbols, gaps)
    let at = 0
    for (let i = 0; i < gaps; i++) {
      const gap = symbols[i]
      const next = at + gap + (gap < 255 ? 1 : 0)
      if (next > count) check('end of a gap', next, 0, count)
      if (mode === 2) for (let j = 0; j < gap; j++) places[found++] = left[at + j]
      at += gap
      if (gap < 255) {
        if (mode === 1) places[found++] = left[at]
        at++
      }
    }
    if (mode === 2) while (at < count) places[found++] = left[at++]
    check('number of words taken', found, kept)
    if (gaps) check('last gap', symbols[gaps - 1], 0, 254)
    return places
  }

  /**
   * Words as §7 has them, to the places given.
   * @param {Words} words
   * @param {WordType} type
   * @param {number} count
   * @param {Uint32Array} places
   * @param {number} tau
   * @param {number} counter
   */
  function values(words, { bits, mantissa }, count, places, tau, counter) {
    const h = byte()
    const raw = h === 255
    const shift = mantissa - h
    let top = 0
    let escapes = 0
    if (!raw) {
      check('h, if not 255,', h, 0, Math.min(5, mantissa - tau))
      top = varint()
      check('top', top, 0, 2 ** (bits - 1 - shift) - 1)
      stream(distances, count)
      for (let i = 0; i < count; i++) {
        if (distances[i] === 255) escapes++
        else if (distances[i] > top) check('distance', distances[i], 0, top)
      }
    }
    const size = bits / 8
    let escaped = skip(escapes * size)
    // The bits that are stored as they are, from the lowest on: all of a raw word, else the sign above those of the mantissa.
    const sign = shift - tau
    rests(count, raw ? bits - tau : sign + 1)
    if (bits < 64) {
      const mask = 2 ** sign - 1
      if (raw) for (let i = 0; i < count; i++) words[places[i]] = low[i] << tau | counter
      else {
        for (let i = 0; i < count; i++) {
          const rest = low[i]
          words[places[i]] = rest >>> sign << bits - 1 | top - distances[i] << shift | (rest & mask) << tau | counter
        }
      }
    } else {
      for (let i = 0; i < count; i++) {
        const rest = BigInt(high[i]) << 32n | BigInt(low[i])
        const word = raw ? rest << BigInt(tau)
          : rest >> BigInt(sign) << 63n | BigInt(top - distances[i]) << BigInt(shift) | BigInt.asUintN(sign, rest) << BigInt(tau)
        words[places[i]] = word | BigInt(counter)
      }
    }
    if (!escapes) return
    const target = new Uint8Array(words.buffer, words.byteOffset)
    for (let i = 0; i < count; i++) {
      if (distances[i] !== 255) continue
      check('counter of an escape', bytes[escaped] & 2 ** tau - 1, counter)
      target.set(bytes.subarray(escaped, escaped += size), places[i] * size)
    }
  }

  /**
   * The bits of each word that are stored as they are (ELSA-D-030), to `low` and `high`.
   * @param {number} count
   * @param {number} width 1…64
   */
  function rests(count, width) {
    low.fill(0, 0, count)
    if (width > 32) high.fill(0, 0, count)
    for (let bit = 0; bit < width; bit += 8) {
      const half = bit < 32 ? low : high
      if (bit + 8 > width) fields(half, count, width - bit, bit & 31)
      else {
        stream(symbols, count)
        for (let i = 0; i < count; i++) half[i] |= symbols[i] << bit
      }
    }
  }

  /**
   * All words of a block as they are (ELSA-D-022).
   * @param {Words} words
   * @param {number} kept
   */
  function stored({ buffer, byteOffset, byteLength, BYTES_PER_ELEMENT: width }, kept) {
    const at = skip(byteLength)
    end()
    new Uint8Array(buffer, byteOffset).set(bytes.subarray(at, at + byteLength))
    let first = 0
    for (let i = 0; i < byteLength; i += width) {
      const counter = bytes[at + i] & 2 ** tau - 1
      check('counter of a stored word', counter, 0, levels)
      if (counter === 1) first++
    }
    check('k', kept, first)
  }

  return { plain, nested }
}
