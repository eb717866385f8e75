import { fail } from './errors.js'
import { Payload } from './streams.js'

/**
 * Words of one dtype: bits of each, bits of the mantissa if the dtype can carry counters, else 0.
 * @typedef {{bits: number, mantissa: number}} WordType
 * @typedef {Uint8Array | Uint16Array | Uint32Array} Words those of 64 bits as two halves
 */

const CODE = 'InvalidDelivery'

/** Decodes the payloads of blocks (delivery-1.0.md §5 to §7), in memory of its own that it uses again and again. */
export class Decoder {
  /** @param {number} most words of a block */
  constructor(most) {
    /** Where the words are that no part has described; before part 1 that is everywhere. */
    this.left = new Uint32Array(most)
    this.everywhere = new Uint32Array(most)
    for (let i = 0; i < most; i++) this.everywhere[i] = i
    this.places = new Uint32Array(most)
    this.stream = new Uint8Array(most)
    this.distances = new Uint8Array(most)
    this.low = new Uint32Array(most)
    this.high = new Uint32Array(0)
  }

  /**
   * All words of a block, without counters (ELSA-D-019).
   * @param {Payload} payload
   * @param {Words} words
   * @param {WordType} type
   */
  plain(payload, words, type) {
    const count = words.length / (type.bits === 64 ? 2 : 1)
    this.values(payload, words, type, count, this.everywhere, 0, 0)
    payload.end()
  }

  /**
   * The words of a nested block that have one counter; those that were described before are not zero (ELSA-D-020).
   * @param {Payload} payload
   * @param {Words} words
   * @param {WordType} type
   * @param {number} tau
   * @param {number} part 1…T, or 0 for the dense part
   * @param {number} levels T
   * @returns {Uint32Array | undefined} the places of the words; nothing if the block is stored, so that all of them are there
   */
  nested(payload, words, type, tau, part, levels) {
    if (!payload.size && part) return this.left.subarray(0, 0)
    const left = part === 1 ? this.everywhere : this.left
    const count = part === 1 ? words.length / (type.bits === 64 ? 2 : 1) : this.findLeft(words, type)
    if (!payload.size) {
      if (count) fail(CODE, `${count} words that no part describes`)
      return left.subarray(0, 0)
    }
    const kept = payload.varint()
    const mode = payload.byte()
    if (mode === 4 && part === 1) {
      this.stored(payload, words, type, tau, kept, levels)
      return undefined
    }
    if (kept < 1 || kept > count || part === 0 && kept < count) fail(CODE, `${kept} words of ${count} that are left`)
    const places = this.positions(payload, mode, kept, left, count)
    this.values(payload, words, type, kept, places, tau, part)
    payload.end()
    return places.subarray(0, kept)
  }

  /** @param {Words} words @param {WordType} type @returns {number} how many words are not described yet */
  findLeft(words, { bits }) {
    const { left } = this
    let count = 0
    const { length } = words
    const step = bits === 64 ? 2 : 1
    for (let i = 0; i < length; i += step) {
      if (!words[i] && (step === 1 || !words[i + 1])) left[count++] = i / step
    }
    return count
  }

  /**
   * Which of the words that are left are meant (§6).
   * @param {Payload} payload
   * @param {number} mode
   * @param {number} kept
   * @param {Uint32Array} left
   * @param {number} count of words that are left
   * @returns {Uint32Array}
   */
  positions(payload, mode, kept, left, count) {
    const { places, stream } = this
    if (mode === 0 && kept === count) return left
    let found = 0
    if (mode === 3) {
      const start = payload.skip(count + 7 >> 3)
      for (let i = 0; i < count; i++) {
        places[found] = left[i]
        found += payload.bytes[start + (i >> 3)] >> (i & 7) & 1
      }
      payload.checkUnused(count)
      if (found !== kept) fail(CODE, `${found} bits are set, expected ${kept}`)
      return places
    }
    if (mode !== 1 && mode !== 2 || kept === count) fail(CODE, `positions of mode ${mode} for ${kept} words of ${count}`)
    const gaps = payload.varint()
    if (gaps > count) fail(CODE, `${gaps} gaps in ${count} words`)
    payload.stream(stream, gaps)
    let at = 0
    let marks = 0
    for (let i = 0; i < gaps; i++) {
      const gap = stream[i]
      if (at + gap + (gap < 255 ? 1 : 0) > count) fail(CODE, 'a gap leads beyond the words that are left')
      if (mode === 2) for (let j = 0; j < gap; j++) places[found++] = left[at + j]
      at += gap
      if (gap < 255) {
        if (mode === 1) places[found++] = left[at]
        at++
        marks++
      }
    }
    if (mode === 2) while (at < count) places[found++] = left[at++]
    if (marks !== (mode === 1 ? kept : count - kept) || gaps && stream[gaps - 1] === 255) {
      fail(CODE, `gaps mark ${marks} words of ${count}, ${kept} being taken`)
    }
    return places
  }

  /**
   * Words as §7 has them, to the places given.
   * @param {Payload} payload
   * @param {Words} words
   * @param {WordType} type
   * @param {number} count
   * @param {Uint32Array} places
   * @param {number} tau
   * @param {number} counter
   */
  values(payload, words, { bits, mantissa }, count, places, tau, counter) {
    const h = payload.byte()
    if (h !== 255 && (h > 5 || h > mantissa - tau)) fail(CODE, `values with h = ${h}`)
    const shift = mantissa - h
    const width = h === 255 ? bits - tau : shift - tau + 1
    let top = 0
    let escapes = 0
    if (h !== 255) {
      top = payload.varint()
      if (top >= 2 ** (bits - 1 - shift)) fail(CODE, `top = ${top} has more than ${bits - 1 - shift} bits`)
      payload.stream(this.distances, count)
      for (let i = 0; i < count; i++) {
        if (this.distances[i] === 255) escapes++
        else if (this.distances[i] > top) fail(CODE, `the distance ${this.distances[i]} exceeds top = ${top}`)
      }
    }
    const escaped = payload.skip(escapes * bits / 8)
    this.rests(payload, count, width)
    if (h === 255) this.putRests(words, bits, count, places, tau, counter)
    else this.putValues(words, bits, count, places, tau, counter, top, shift)
    if (escapes) this.putEscapes(payload.bytes, escaped, words, bits / 8, count, places, 2 ** tau - 1, counter)
  }

  /**
   * The bits of each word that are stored as they are (ELSA-D-030).
   * @param {Payload} payload
   * @param {number} count
   * @param {number} width 1…64
   */
  rests(payload, count, width) {
    const { low, stream } = this
    if (width > 32 && this.high.length < low.length) this.high = new Uint32Array(low.length)
    const { high } = this
    low.fill(0, 0, count)
    if (width > 32) high.fill(0, 0, count)
    for (let bit = 0; bit + 8 <= width; bit += 8) {
      const [half, shift] = bit < 32 ? [low, bit] : [high, bit - 32]
      payload.stream(stream, count)
      for (let i = 0; i < count; i++) half[i] |= stream[i] << shift
    }
    if (width % 8 === 0) return
    const [half, shift] = width < 32 ? [low, width & ~7] : [high, (width & ~7) - 32]
    payload.fields(count, width % 8, (i, bits) => {
      half[i] |= bits << shift
    })
  }

  /**
   * @param {Words} words
   * @param {number} bits
   * @param {number} count
   * @param {Uint32Array} places
   * @param {number} tau
   * @param {number} counter
   */
  putRests(words, bits, count, places, tau, counter) {
    const { low, high } = this
    for (let i = 0; i < count; i++) {
      const at = places[i]
      if (bits < 64) words[at] = low[i] << tau | counter
      else {
        words[2 * at] = low[i] << tau | counter
        words[2 * at + 1] = high[i] << tau | (tau ? low[i] >>> 32 - tau : 0)
      }
    }
  }

  /**
   * @param {Words} words
   * @param {number} bits
   * @param {number} count
   * @param {Uint32Array} places
   * @param {number} tau
   * @param {number} counter
   * @param {number} top
   * @param {number} shift
   */
  putValues(words, bits, count, places, tau, counter, top, shift) {
    const { low, high, distances } = this
    if (bits < 64) {
      const mask = 2 ** (shift - tau) - 1
      const sign = shift - tau
      for (let i = 0; i < count; i++) {
        const rest = low[i]
        words[places[i]] = rest >>> sign << bits - 1 | top - distances[i] << shift | (rest & mask) << tau | counter
      }
      return
    }
    const mask = 2 ** (shift - tau - 32) - 1
    const sign = shift - tau - 32
    for (let i = 0; i < count; i++) {
      const at = 2 * places[i]
      const rest = (high[i] & mask) << tau | (tau ? low[i] >>> 32 - tau : 0)
      words[at] = low[i] << tau | counter
      words[at + 1] = high[i] >>> sign << 31 | top - distances[i] << shift - 32 | rest
    }
  }

  /**
   * Words that are stored as they are.
   * @param {Uint8Array} bytes
   * @param {number} at
   * @param {Words} words
   * @param {number} size bytes of a word
   * @param {number} count
   * @param {Uint32Array} places
   * @param {number} low
   * @param {number} counter
   */
  putEscapes(bytes, at, words, size, count, places, low, counter) {
    const view = new DataView(bytes.buffer, bytes.byteOffset)
    for (let i = 0; i < count; i++) {
      if (this.distances[i] !== 255) continue
      if ((bytes[at] & low) !== counter) fail(CODE, `an escape with the counter ${bytes[at] & low}, expected ${counter}`)
      if (size === 8) {
        words[2 * places[i]] = view.getUint32(at, true)
        words[2 * places[i] + 1] = view.getUint32(at + 4, true)
      } else words[places[i]] = size === 2 ? view.getUint16(at, true) : view.getUint32(at, true)
      at += size
    }
  }

  /**
   * All words of a block as they are (ELSA-D-022).
   * @param {Payload} payload
   * @param {Words} words
   * @param {WordType} type
   * @param {number} tau
   * @param {number} kept
   * @param {number} levels
   */
  stored(payload, words, { bits }, tau, kept, levels) {
    const at = payload.skip(words.byteLength)
    payload.end()
    const target = new Uint8Array(words.buffer, words.byteOffset, words.byteLength)
    target.set(payload.bytes.subarray(at, at + target.length))
    let first = 0
    for (let i = 0; i < target.length; i += bits / 8) {
      const counter = target[i] & 2 ** tau - 1
      if (counter > levels) fail(CODE, `a stored word has the counter ${counter}, expected at most ${levels}`)
      first += counter === 1 ? 1 : 0
    }
    if (first !== kept) fail(CODE, `a stored block has ${first} words of level 1, expected ${kept}`)
  }
}
