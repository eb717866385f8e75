import { allocate } from './data.js'
import { DTYPES, FLOATS } from './dtypes.js'
import { fail, show } from './errors.js'
import { BLOCK, makeKernels } from './kernels.js'
import { Decoder } from './payload.js'
import { isReserved, storedName } from './profile.js'
import { Payload } from './streams.js'
import { xxh3 } from './xxh3.js'

/** @import { Tensor } from './data.js' */
/** @import { DeliveryHead } from './delivery_head.js' */
/** @import { Feed } from './feed.js' */
/** @import { Entry } from './header.js' */
/** @import { Words, WordType } from './payload.js' */
/** @import { Bytes } from './source.js' */

/**
 * Words of one dtype, of several tensors one after the other (ELSA-D-016), and where they go.
 * @typedef {{type: WordType, entries: Entry[], starts: number[], count: number, words: Words, stored: Set<number>}} Sequence
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
    this.name = name
    this.feed = feed
    this.head = head
    this.header = head.header
    this.profile = head.profile
    this.kernels = makeKernels()
    /** Parts that are decoded: 0 … T + 1, the last being the dense one. */
    this.parts = 0
    /** Stored tensors that are there, as bytes. @type {Map<string, Uint8Array>} */
    this.arrays = new Map()
    const { order } = head.header
    this.nested = sequences(order.filter(({ name }) => head.profile.nested.has(name)))
    /** Words of each nested tensor that have a counter. @type {Map<string, Float64Array>} */
    this.counts = new Map([...head.profile.nested.keys()].map(name => [name, new Float64Array(257)]))
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
    const { ends } = this.head
    while (this.parts < last) {
      const part = this.parts + 1
      // Of a file whose size is known nothing is read that would be in vain.
      const { size = Infinity } = this.feed
      if (ends[part] > size) this.incomplete(part, size)
      const bytes = await this.feed.reach(ends[last], signal, onProgress)
      try {
        await this.decodePart(part, bytes)
      } catch (error) {
        this.undo(part)
        await this.feed.back(ends[part - 1])
        throw error
      }
      this.parts = part
      if (part === ends.length - 1 && await bytes.more()) fail('TrailingData', `bytes follow the ${ends[part]} of the file`)
    }
  }

  /** @param {number} part @param {number} size @returns {never} */
  incomplete(part, size) {
    const what = part > this.profile.levels.length ? 'the dense network' : `level ${part}`
    fail('Incomplete', `${size} bytes, ${what} needs ${this.head.ends[part]}`)
  }

  /**
   * @param {number} part
   * @param {Bytes} bytes
   */
  async decodePart(part, bytes) {
    const { ends, block } = this.head
    const plain = sequences(this.plainEntries(part))
    const all = [...plain, ...this.nested]
    const size = ends[part] - ends[part - 1]
    const count = all.reduce((sum, { count }) => sum + Math.ceil(count / block), 0)
    if (3 * count > size) fail(CODE, `part ${part} has ${size} bytes, expected an index of ${count} blocks`)
    const index = await this.take(bytes, 3 * count, part)
    checkIndex(index, all, block, size)
    for (const sequence of part === 1 ? all : plain) this.place(sequence)
    const longest = all.reduce((most, { count }) => Math.max(most, count), 0)
    this.decoder ??= new Decoder(Math.min(block, Math.max(longest, 64)))
    if (this.decoder.left.length < Math.min(block, longest)) this.decoder = new Decoder(Math.min(block, longest))
    let at = 0
    for (const sequence of all) {
      for (let first = 0; first < sequence.count; first += block, at += 3) {
        const payload = await this.payload(bytes, part, sizeAt(index, at))
        this.decodeBlock(part, sequence, first, payload, plain.includes(sequence))
      }
    }
  }

  /** @param {Bytes} bytes @param {number} count @param {number} part */
  async take(bytes, count, part) {
    const taken = await bytes.take(count)
    if (taken.length < count) this.incomplete(part, bytes.at)
    return taken
  }

  /**
   * @param {Bytes} bytes
   * @param {number} part
   * @param {number} size
   */
  async payload(bytes, part, size) {
    // Behind its checksum, and with 8 bytes to spare: decoders read whole words.
    if (!this.buffer || this.buffer.length < size + 16) this.buffer = new Uint8Array(size + size / 4 + 1024)
    const whole = size && size + 8
    if (await bytes.fill(this.buffer.subarray(0, whole)) < whole) this.incomplete(part, bytes.at)
    const payload = this.buffer.subarray(8)
    if (size && xxh3(payload.subarray(0, size), this.head.seed, this.kernels) !== new DataView(this.buffer.buffer).getBigUint64(0, true)) {
      fail('ChecksumMismatch', `a payload of part ${part} does not have its checksum`)
    }
    return new Payload(payload, size)
  }

  /**
   * @param {number} part
   * @param {Sequence} sequence
   * @param {number} first
   * @param {Payload} payload
   * @param {boolean} isPlain
   */
  decodeBlock(part, sequence, first, payload, isPlain) {
    const { block, profile } = this.head
    const { type, words, stored } = sequence
    const step = type.bits === 64 ? 2 : 1
    const piece = words.subarray(first * step, Math.min(first + block, sequence.count) * step)
    const decoder = /** @type {Decoder} */ (this.decoder)
    if (isPlain) decoder.plain(payload, piece, type)
    else if (stored.has(first)) {
      if (payload.size) fail(CODE, 'a block that is stored has a payload in a later part')
    } else {
      const levels = profile.levels.length
      const places = decoder.nested(payload, piece, type, profile.bits, part > levels ? 0 : part, levels)
      if (!places) stored.add(first)
      this.count(part, sequence, first, piece, places)
    }
  }

  /**
   * Note how many words of each tensor have which counter.
   * @param {number} part
   * @param {Sequence} sequence
   * @param {number} first word of the block
   * @param {Words} words
   * @param {Uint32Array | undefined} places of those of the part; of a stored block there are all
   */
  count(part, { entries, starts, type }, first, words, places) {
    const step = type.bits === 64 ? 2 : 1
    const end = first + words.length / step
    let low = 0
    for (let high = entries.length; high - low > 1;) {
      const middle = low + high >> 1
      if (starts[middle] <= first) low = middle
      else high = middle
    }
    for (let at = 0; low < entries.length && starts[low] < end; low++) {
      const limit = low + 1 < entries.length ? starts[low + 1] - first : Infinity
      const counts = /** @type {Float64Array} */ (this.counts.get(entries[low].name))
      if (places) {
        const before = at
        if (limit >= end - first) at = places.length
        else while (at < places.length && places[at] < limit) at++
        counts[part] += at - before
      } else {
        for (; at < Math.min(limit, end - first); at++) counts[words[at * step] & 2 ** this.profile.bits - 1]++
      }
    }
  }

  /** The tensors of a part that have no counters (ELSA-D-014). @param {number} part @returns {Entry[]} */
  plainEntries(part) {
    const { header, profile } = this.head
    const dense = part > profile.levels.length
    return header.order.filter(({ name }) => {
      if (isReserved(name)) return name.startsWith(`__elsa__.${part}.`) && !dense
      if (profile.perLevel.has(name)) return dense
      return part === 1 && !profile.nested.has(name)
    })
  }

  /** Make room for the words of a sequence. @param {Sequence} sequence */
  place(sequence) {
    const { entries, type: { bits }, count } = sequence
    const buffer = allocate(count * bits / 8)
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
    for (const counts of this.counts.values()) counts.fill(0, part === 1 ? 0 : part, part === 1 ? 257 : part + 1)
    const { block, profile } = this.head
    const low = 2 ** profile.bits - 1
    for (const { type, words, stored } of this.nested) {
      if (part === 1) stored.clear()
      const step = type.bits === 64 ? 2 : 1
      for (let i = 0; i < words.length; i += step) {
        if (stored.has(Math.floor(i / step / block) * block)) continue
        const counter = words[i] & low
        if (counter === 0 || counter >= part) words.fill(0, i, i + step)
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
    const { header, profile } = this.head
    const result = new Map()
    for (const [name, { dtype, shape, size }] of header.tensors) {
      if (isReserved(name)) continue
      const stored = this.arrays.get(storedName(profile, name, level)) ?? new Uint8Array(0)
      const target = copy ? new Uint8Array(allocate(size)) : stored
      const holdsMore = profile.nested.has(name) && (this.parts !== this.partOf(level) || this.nested.some(({ stored }) => stored.size))
      if (copy || holdsMore) this.copyLevel(stored, target, holdsMore ? FLOATS[dtype].width : 0, level)
      const Type = DTYPES[dtype][1]
      const width = /** @type {any} */ (Type).BYTES_PER_ELEMENT
      // @ts-expect-error all of these arrays take a place and a length
      result.set(name, { dtype, shape, data: new Type(target.buffer, target.byteOffset, size / width) })
    }
    return result
  }

  /** @param {Uint8Array} stored @param {Uint8Array} target @param {0|2|4|8} width @param {number | 'dense'} level */
  copyLevel(stored, target, width, level) {
    if (!width || level === 'dense') {
      if (target !== stored) target.set(stored)
      return
    }
    const low = 2 ** this.profile.bits - 1
    for (let at = 0; at < stored.length; at += BLOCK) {
      const piece = stored.subarray(at, at + BLOCK)
      this.kernels.block.set(piece)
      this.kernels.mask(width, piece.length, low, level)
      target.set(this.kernels.block.subarray(0, piece.length), at)
    }
  }

  /** Compare the words of a level with the counts of the profile (ELSA-D-024). @param {number | 'dense'} level */
  checkCounts(level) {
    const last = level === 'dense' ? this.profile.levels.length : level
    for (const [name, stated] of this.profile.nested) {
      let kept = 0
      for (let t = 1; t <= last; t++) {
        kept += /** @type {Float64Array} */ (this.counts.get(name))[t]
        if (kept !== stated[t - 1]) fail('CountMismatch', `tensor ${show(name)} keeps ${kept} weights at level ${t}, expected ${stated[t - 1]}`)
      }
    }
  }

  /** The source, byte for byte, once all parts are there (ELSA-D-004). @returns {Generator<Uint8Array>} */
  * source() {
    yield this.head.source
    for (const { name } of this.header.order) {
      const bytes = this.arrays.get(name)
      if (bytes?.length) yield bytes
    }
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
    if (!entry.elements) continue
    const bits = Math.max(8, DTYPES[entry.dtype][0])
    const sequence = found.get(entry.dtype) ?? {
      type: { bits, mantissa: FLOATS[entry.dtype]?.mantissa ?? -1 }, entries: [], starts: [], count: 0, words: new Uint8Array(0), stored: new Set(),
    }
    found.set(entry.dtype, sequence)
    sequence.entries.push(entry)
    sequence.starts.push(sequence.count)
    sequence.count += 8 * entry.size / bits
  }
  return [...found.values()]
}

/** A size in an index. @param {Uint8Array} index @param {number} at */
const sizeAt = (index, at) => index[at] | index[at + 1] << 8 | index[at + 2] << 16

/**
 * The sizes of an index (ELSA-D-015, 018).
 * @param {Uint8Array} index
 * @param {Sequence[]} all
 * @param {number} block
 * @param {number} size of the part
 */
function checkIndex(index, all, block, size) {
  let at = 0
  let sum = 0
  for (const { type: { bits }, count } of all) {
    for (let first = 0; first < count; first += block, at += 3) {
      const words = Math.min(block, count - first)
      const length = sizeAt(index, at)
      if (length > words * bits / 8 + Math.ceil(words / 8) + 1024) fail(CODE, `a payload of ${length} bytes for ${words} words`)
      sum += 3 + (length && length + 8)
    }
  }
  if (sum !== size) fail(CODE, `a part of ${size} bytes, its index says ${sum}`)
}
