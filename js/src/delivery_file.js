import { allocate, bytesOf, makeTensor } from './data.js'
import { DTYPES, FLOATS } from './dtypes.js'
import { fail } from './errors.js'
import { BLOCK, makeKernels } from './kernels.js'
import { wantedNames } from './load.js'
import { Decoder } from './payload.js'
import { isReserved } from './profile.js'
import { Payload } from './streams.js'
import { checkCount, report } from './words.js'
import { xxh3 } from './xxh3.js'

/** @import { Tensor } from './data.js' */
/** @import { DeliveryHead } from './delivery_head.js' */
/** @import { Feed } from './feed.js' */
/** @import { Entry } from './header.js' */
/** @import { Words, WordType } from './payload.js' */
/** @import { Bytes } from './source.js' */
/** @import { Findings } from './words.js' */

/**
 * Words of one dtype, of several tensors one after the other (ELSA-D-016), and where they go.
 * @typedef {object} Sequence
 * @property {WordType} type
 * @property {Entry[]} entries
 * @property {number[]} starts where each tensor begins
 * @property {number} count of words
 * @property {Words} words
 * @property {Set<number>} stored the first words of blocks that were stored, and so are complete
 * @property {number} current the tensor with which the block begins that is being read
 */

const CODE = 'InvalidDelivery'

/** One delivery file, as far as it has arrived. */
export class DeliveryFile {
  /**
   * @param {string} name
   * @param {Feed} feed
   * @param {DeliveryHead} head
   */
  constructor(name, feed, head) {
    const { header, profile } = head
    this.name = name
    this.feed = feed
    this.head = head
    this.header = header
    this.profile = profile
    this.kernels = makeKernels()
    /** Parts that are decoded: 0 … T + 1, the last being the dense one. */
    this.parts = 0
    /** Stored tensors that are there. @type {Map<string, Uint8Array>} */
    this.arrays = new Map()
    this.nested = sequences(header.order.filter(({ name }) => profile.nested.has(name)))
    /** Words of each nested tensor that have a counter. @type {Map<string, number[]>} */
    this.counts = new Map([...profile.nested.keys()].map(name => [name, Array(profile.levels.length + 2).fill(0)]))
    this.buffer = new Uint8Array(0)
    this.decoder = new Decoder(0)
  }

  /** The number of the part that completes a level. @param {number | 'dense'} level */
  partOf(level) {
    return level === 'dense' ? this.profile.levels.length + 1 : level
  }

  /**
   * Decode all parts up to one.
   * @param {number} last
   * @param {AbortSignal} [signal]
   * @param {(loaded: number) => void} [onProgress]
   */
  async decode(last, signal, onProgress) {
    const { feed, head: { ends } } = this
    while (this.parts < last) {
      const part = this.parts + 1
      // Of a file whose size is known nothing is read that would be in vain.
      if (ends[part] > (feed.size ?? Infinity)) this.incomplete(part, feed.size)
      const bytes = await feed.reach(ends[last], signal, onProgress)
      const before = new Map([...this.counts].map(([name, counts]) => [name, [...counts]]))
      try {
        await this.decodePart(part, bytes)
      } catch (error) {
        this.counts = before
        this.undo(part)
        await feed.back(ends[part - 1])
        throw error
      }
      this.parts = part
      if (part === ends.length - 1 && await bytes.more()) fail('TrailingData', `bytes follow the ${ends[part]} of the file`)
    }
  }

  /** @param {number} part @param {number | undefined} size @returns {never} */
  incomplete(part, size) {
    fail('Incomplete', `${size} bytes, ${part > this.profile.levels.length ? 'the dense network' : `level ${part}`} needs ${this.head.ends[part]}`)
  }

  /**
   * @param {number} part
   * @param {Bytes} bytes
   */
  async decodePart(part, bytes) {
    const { ends, block, seed } = this.head
    const plain = sequences(this.plainEntries(part))
    const all = [...plain, ...this.nested]
    const size = ends[part] - ends[part - 1]
    const count = all.reduce((sum, { count }) => sum + Math.ceil(count / block), 0)
    if (3 * count > size) fail(CODE, `part ${part} has ${size} bytes, expected an index of ${count} blocks`)
    const index = await bytes.take(3 * count)
    if (index.length < 3 * count) this.incomplete(part, bytes.at)
    const blocks = all.flatMap(sequence => Array.from({ length: Math.ceil(sequence.count / block) }, (_, i) => ({ sequence, first: i * block })))
    checkIndex(index, blocks, block, size)
    for (const sequence of part === 1 ? all : plain) this.place(sequence)
    const longest = Math.min(block, all.reduce((most, { count }) => Math.max(most, count), 0))
    if (this.decoder.left.length < longest) this.decoder = new Decoder(longest)
    for (const [i, { sequence, first }] of blocks.entries()) {
      const length = sizeAt(index, i)
      // Behind its checksum, and with 8 bytes to spare: decoders read whole words.
      if (this.buffer.length < length + 16) this.buffer = new Uint8Array(length + length / 4 + 1024)
      const whole = length && length + 8
      if (await bytes.fill(this.buffer.subarray(0, whole)) < whole) this.incomplete(part, bytes.at)
      if (length && xxh3(this.buffer.subarray(8, whole), seed, this.kernels) !== new DataView(this.buffer.buffer).getBigUint64(0, true)) {
        fail('ChecksumMismatch', `a payload of part ${part} does not have its checksum`)
      }
      this.decodeBlock(part, sequence, first, new Payload(this.buffer.subarray(8), length), plain.includes(sequence))
    }
  }

  /**
   * @param {number} part
   * @param {Sequence} sequence
   * @param {number} first word of the block
   * @param {Payload} payload
   * @param {boolean} isPlain
   */
  decodeBlock(part, sequence, first, payload, isPlain) {
    const { decoder, profile: { bits, levels: { length } } } = this
    const { type, stored } = sequence
    const words = this.wordsAt(sequence, first)
    if (isPlain) decoder.plain(payload, words, type)
    else if (stored.has(first)) {
      if (payload.size) fail(CODE, 'a block that is stored has a payload in a later part')
    } else {
      const places = decoder.nested(payload, words, type, bits, part > length ? 0 : part, length)
      if (!places) stored.add(first)
      this.count(part, sequence, first, words, places)
    }
  }

  /** The words of a block. @param {Sequence} sequence @param {number} first */
  wordsAt({ type: { bits }, words }, first) {
    const step = bits === 64 ? 2 : 1
    return words.subarray(first * step, (first + this.head.block) * step)
  }

  /**
   * Note how many words of each tensor have which counter.
   * @param {number} part
   * @param {Sequence} sequence
   * @param {number} first word of the block
   * @param {Words} words
   * @param {Uint32Array | undefined} places of those of the part; of a stored block there are all
   */
  count(part, sequence, first, words, places) {
    const { entries, starts, type } = sequence
    const step = type.bits === 64 ? 2 : 1
    const length = words.length / step
    if (!first) sequence.current = 0
    for (let at = 0; ; sequence.current++) {
      const counts = /** @type {number[]} */ (this.counts.get(entries[sequence.current].name))
      // Where the next tensor begins, if that is in this block.
      const limit = Math.min((starts[sequence.current + 1] ?? Infinity) - first, length)
      if (!places) for (; at < limit; at++) counts[words[at * step] & 2 ** this.profile.bits - 1]++
      else {
        const before = at
        if (limit === length) at = places.length
        else while (places[at] < limit) at++
        counts[part] += at - before
      }
      if (limit === length) return
    }
  }

  /** The tensors of a part that have no counters (ELSA-D-014). @param {number} part @returns {Entry[]} */
  plainEntries(part) {
    const { header, profile } = this
    const dense = part > profile.levels.length
    return header.order.filter(({ name }) => {
      if (isReserved(name)) return name.startsWith(`__elsa__.${part}.`) && !dense
      return profile.perLevel.has(name) ? dense : part === 1 && !profile.nested.has(name)
    })
  }

  /** Make room for the words of a sequence. @param {Sequence} sequence */
  place(sequence) {
    const { entries, type: { bits }, count } = sequence
    const { buffer } = allocate(count * bits / 8)
    sequence.words = new (bits === 8 ? Uint8Array : bits === 16 ? Uint16Array : Uint32Array)(buffer)
    let at = 0
    for (const { name, size } of entries) {
      this.arrays.set(name, new Uint8Array(buffer, at, size))
      at += size
    }
  }

  /** Forget what a part brought that did not arrive whole. @param {number} part */
  undo(part) {
    for (const { name } of this.plainEntries(part)) this.arrays.delete(name)
    for (const sequence of this.nested) {
      const { count, stored, type: { bits } } = sequence
      if (part === 1) stored.clear()
      for (let first = 0; first < count; first += this.head.block) {
        const bytes = bytesOf(this.wordsAt(sequence, first))
        if (!stored.has(first)) this.copyLevel(bytes, bytes, bits / 8, part - 1)
      }
    }
  }

  /**
   * The tensors of a level that is there.
   * @param {number | 'dense'} level
   * @param {boolean} copy whether what is given stays as it is when more is decoded
   * @returns {Map<string, Tensor>}
   */
  tensors(level, copy) {
    const { arrays, header, nested, profile } = this
    const holdsMore = level !== 'dense' && (this.parts > level || nested.some(({ stored }) => stored.size))
    return new Map([...wantedNames(header, profile, level)].map(([from, name]) => {
      const stored = arrays.get(from) ?? new Uint8Array(0)
      const entry = /** @type {Entry} */ (header.tensors.get(name))
      const target = copy ? allocate(entry.size) : stored
      if (level !== 'dense' && holdsMore && profile.nested.has(name)) this.copyLevel(stored, target, FLOATS[entry.dtype].width, level)
      else if (copy) target.set(stored)
      return [name, makeTensor(entry, target)]
    }))
  }

  /** @param {Uint8Array} stored @param {Uint8Array} target @param {number} width @param {number} level */
  copyLevel(stored, target, width, level) {
    const { block, mask } = this.kernels
    for (let at = 0; at < stored.length; at += BLOCK) {
      const { length } = stored.subarray(at, at + BLOCK)
      block.set(stored.subarray(at, at + BLOCK))
      mask(width, length, 2 ** this.profile.bits - 1, level)
      target.set(block.subarray(0, length), at)
    }
  }

  /**
   * Compare the words of parts with the counts of the profile (ELSA-D-024).
   * @param {number} last
   * @param {Findings} [findings] reported at once where there are none
   */
  checkCounts(last, findings) {
    const found = findings ?? []
    for (const entry of this.header.order) {
      let kept = 0
      const counts = this.counts.get(entry.name)
      for (let level = 1; counts && level <= Math.min(last, this.profile.levels.length); level++) {
        checkCount(entry, this.profile, level, kept += counts[level], found)
      }
    }
    if (!findings) report(found)
  }

  /** The source, byte for byte, once all parts are there (ELSA-D-004). @returns {Uint8Array[]} */
  source() {
    return [this.head.source, ...this.header.order.map(({ name }) => this.arrays.get(name) ?? new Uint8Array(0))]
  }
}

/**
 * @param {Entry[]} entries in the order of their data
 * @returns {Sequence[]}
 */
function sequences(entries) {
  /** @type {Map<string, Sequence>} */
  const found = new Map()
  for (const entry of entries) {
    const { dtype, size } = entry
    if (!size) continue
    const bits = Math.max(8, DTYPES[dtype][0])
    const sequence = found.get(dtype) ?? {
      type: { bits, mantissa: FLOATS[dtype]?.mantissa ?? -1 }, entries: [], starts: [], count: 0, words: new Uint8Array(0), stored: new Set(), current: 0,
    }
    found.set(dtype, sequence)
    sequence.entries.push(entry)
    sequence.starts.push(sequence.count)
    sequence.count += 8 * size / bits
  }
  return [...found.values()]
}

/** A size in an index. @param {Uint8Array} index @param {number} i */
const sizeAt = (index, i) => index[3 * i] | index[3 * i + 1] << 8 | index[3 * i + 2] << 16

/**
 * The sizes of an index (ELSA-D-015, 018).
 * @param {Uint8Array} index
 * @param {{sequence: Sequence, first: number}[]} blocks
 * @param {number} block
 * @param {number} size of the part
 */
function checkIndex(index, blocks, block, size) {
  let sum = 3 * blocks.length
  for (const [i, { sequence: { type: { bits }, count }, first }] of blocks.entries()) {
    const words = Math.min(block, count - first)
    const length = sizeAt(index, i)
    if (length > words * bits / 8 + Math.ceil(words / 8) + 1024) fail(CODE, `a payload of ${length} bytes for ${words} words`)
    sum += length && length + 8
  }
  if (sum !== size) fail(CODE, `a part of ${size} bytes, its index says ${sum}`)
}
