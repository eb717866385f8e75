import { allocate, bytesOf, makeTensor } from './data.js'
import { checkEnd, readHead } from './delivery_head.js'
import { MANTISSA, bitsOf, wordsOf } from './dtypes.js'
import { fail, say, within } from './errors.js'
import { eachBlock, makeKernels } from './kernels.js'
import { wantedNames } from './load.js'
import { makeDecoder } from './payload.js'
import { isReserved } from './profile.js'
import { Bytes } from './source.js'
import { checkCount } from './words.js'
import { checkSum, writeChecksum, xxh3 } from './xxh3.js'

/** @import { Tensor } from './data.js' */
/** @import { Opened } from './files.js' */
/** @import { Entry } from './header.js' */
/** @import { Words } from './payload.js' */
/** @import { Payload } from './streams.js' */
/** @import { Findings } from './words.js' */

const CODE = 'InvalidDelivery'

/**
 * Words of one dtype, of several tensors one after the other (ELSA-D-016), and where they go.
 * @typedef {object} Sequence
 * @property {number} bits of a word
 * @property {number} mantissa its bits, if the dtype can carry counters, else −1
 * @property {Entry[]} entries
 * @property {number} count of words
 * @property {Words} words
 * @property {Set<number>} stored the first words of blocks that were stored, and so are complete
 * @property {Map<number, any>} [kept] what `Words` has of each block
 */

/**
 * How the words of nested tensors are kept: as they are, if nothing else is said.
 * @typedef {object} Storage
 * @property {(sequence: Sequence, first: number, size: number) => Words} open the words of a block
 * @property {(sequence: Sequence, first: number, words: Words) => void} close takes in what became of them
 * @property {(sequence: Sequence, block: number, from: number, to: number, mask?: (bytes: Uint8Array, width: number) => void) => any} read
 */

/** One delivery file, as far as it has arrived. @typedef {Opened & Awaited<ReturnType<typeof openDeliveryFile>>} DeliveryFile */

/**
 * @param {Bytes} bytes
 * @param {boolean} shard
 * @param {Storage} [storage]
 */
export async function openDeliveryFile(bytes, shard, storage) {
  const { block, ends, start, seed, header, profile } = await readHead(bytes, shard)
  const { bits, levels: { length: levels } } = profile
  const kernels = makeKernels()
  const nested = sequences(header.order.filter(({ name }) => profile.nested.has(name)))
  /** Stored tensors that are there. @type {Map<string, Uint8Array>} */
  const arrays = new Map()
  /** Stored tensors whose checksum was compared. @type {Set<string>} */
  const compared = new Set()
  /** Words of each nested tensor that have a counter. @type {Map<string, number[]>} */
  let counts = new Map([...profile.nested.keys()].map(name => [name, Array(levels + 2).fill(0)]))
  const file = { header, profile, ends, arrays, parts: 0, need, decode, check, tensors, source }

  /** Refuse a part that is not there, where the size of the file is known: nothing is decoded in vain. @param {number} part */
  function need(part) {
    if (ends[part] > (bytes.size ?? Infinity)) incomplete(part, bytes.size)
  }

  /**
   * Decode all parts up to one.
   * @param {number} last
   * @param {{signal?: AbortSignal, onProgress?: (loaded: number) => void}} [options]
   */
  async function decode(last, options) {
    bytes.options = { ...bytes.options, ...options }
    while (file.parts < last) {
      const part = file.parts + 1
      need(part)
      await bytes.reach(ends[last])
      const before = structuredClone(counts)
      try {
        await decodePart(part)
      } catch (error) {
        counts = before
        undo(part)
        await bytes.back(ends[part - 1])
        throw error
      }
      file.parts = part
      if (part > levels && await bytes.more()) checkEnd(ends[part] + bytes.rest.length, ends[part])
    }
  }

  /** The words of a block. @param {Sequence} sequence @param {number} first @returns {Words} */
  function wordsAt(sequence, first) {
    if (!sequence.kept || !storage) return sequence.words.subarray(first, first + block)
    return storage.open(sequence, first, Math.min(block, sequence.count - first))
  }

  /** @param {number} part @param {number | undefined} size @returns {never} */
  function incomplete(part, size) {
    fail('Incomplete', `${size} bytes are there, expected ${ends[part]} for ${part > levels ? 'the dense network' : `level ${part}`}`)
  }

  /** @param {number} part */
  async function decodePart(part) {
    const plain = sequences(plainEntries(part))
    const all = [...plain, ...nested]
    const size = ends[part] - ends[part - 1]
    const where = `part ${part}`
    const start = 3 * all.reduce((sum, { count }) => sum + Math.ceil(count / block), 0)
    within(CODE, `${where}: size of the index`, start, 0, size)
    const index = await bytes.take(start)
    if (index.length < start) incomplete(part, bytes.at)
    /** @type {[Sequence, first: number, length: number][]} */
    const blocks = []
    let sum = start
    let at = 0
    let longest = 0
    for (const sequence of all) {
      for (let first = 0; first < sequence.count; first += block) {
        const length = index[at++] | index[at++] << 8 | index[at++] << 16
        const words = Math.min(block, sequence.count - first)
        within(CODE, `${where}: size of a payload`, length, 0, words * sequence.bits / 8 + Math.ceil(words / 8) + 1024)
        sum += length && length + 8
        longest = Math.max(longest, length)
        blocks.push([sequence, first, length])
      }
    }
    within(CODE, `${where}: size by the index`, sum, size)
    for (const sequence of part === 1 ? all : plain) {
      if (storage && nested.includes(sequence)) sequence.kept = new Map()
      else place(sequence)
    }
    const decoder = makeDecoder(Math.min(block, Math.max(0, ...all.map(({ count }) => count))), bits, levels)
    // Of a payload behind its checksum, and with 8 bytes to spare: decoders read whole words.
    const buffer = new Uint8Array(longest + 16)
    for (const [sequence, first, length] of blocks) {
      const whole = length && length + 8
      if (await bytes.fill(buffer.subarray(0, whole)) < whole) incomplete(part, bytes.at)
      const name = `${where}, ${sequence.entries[0].dtype} words from ${first} on`
      if (length) {
        const stated = new DataView(buffer.buffer).getBigUint64(0, true)
        checkSum(`${name}: checksum`, xxh3(buffer.subarray(8, whole), seed, kernels), writeChecksum(stated))
      }
      const { stored } = sequence
      const one = wordsAt(sequence, first)
      /** @type {Payload} */
      const payload = [buffer.subarray(8), length, name]
      if (plain.includes(sequence)) decoder.plain(payload, one, sequence)
      else if (stored.has(first)) within(CODE, `${name}: size of a payload of a stored block`, length, 0)
      else {
        const places = decoder.nested(payload, one, sequence, part > levels ? 0 : part)
        if (!places) stored.add(first)
        count(sequence, first, bytesOf(one), part, places)
        if (sequence.kept) storage?.close(sequence, first, one)
      }
    }
  }

  /**
   * Note how many words of each tensor have which counter.
   * @param {Sequence} sequence
   * @param {number} first word of the block
   * @param {Uint8Array} bytes of the block
   * @param {number} part
   * @param {Uint32Array | undefined} places of the words of the part; of a stored block there are all
   */
  function count({ entries, bits: width }, first, bytes, part, places) {
    const words = 8 * bytes.length / width
    let at = 0
    /** Where a tensor ends in the block. */
    let end = -first
    for (const { name, size } of entries) {
      end += 8 * size / width
      if (end <= 0) continue
      const found = /** @type {number[]} */ (counts.get(name))
      const before = at
      if (!places) for (; at < Math.min(end, words); at++) found[bytes[at * width / 8] & 2 ** bits - 1]++
      else {
        if (end >= words) at = places.length
        else while (places[at] < end) at++
        found[part] += at - before
      }
      if (end >= words) return
    }
  }

  /** The tensors of a part that have no counters (ELSA-D-014). @param {number} part @returns {Entry[]} */
  function plainEntries(part) {
    return header.order.filter(({ name }) => {
      if (isReserved(name)) return name.startsWith(`__elsa__.${part}.`)
      return profile.perLevel.has(name) ? part > levels : part === 1 && !profile.nested.has(name)
    })
  }

  /** Make room for the words of a sequence. @param {Sequence} sequence */
  function place(sequence) {
    const { buffer } = allocate(sequence.count * sequence.bits / 8)
    sequence.words = wordsOf(sequence.bits, buffer)
    let at = 0
    for (const { name, size } of sequence.entries) {
      arrays.set(name, new Uint8Array(buffer, at, size))
      at += size
    }
  }

  /** Forget what a part brought that did not arrive whole. @param {number} part */
  function undo(part) {
    for (const { name } of plainEntries(part)) arrays.delete(name)
    for (const sequence of nested) {
      const { count, stored, bits: width } = sequence
      if (part === 1) stored.clear()
      for (let first = 0; first < count; first += block) {
        if (stored.has(first)) continue
        const one = wordsAt(sequence, first)
        mask(bytesOf(one), width, part - 1)
        if (sequence.kept) storage?.close(sequence, first, one)
      }
    }
  }

  /** Mask words in place. @param {Uint8Array} bytes @param {number} width @param {number} level */
  function mask(bytes, width, level) {
    eachBlock(kernels, bytes, piece => {
      kernels.mask(width / 8, piece.length, 2 ** bits - 1, level)
      piece.set(kernels.block.subarray(0, piece.length))
    })
  }

  /** Where the words of a nested tensor are, if they are not kept as they are. @param {Entry} entry @returns {[Sequence, number, number, number] | undefined} */
  function keptOf(entry) {
    for (const sequence of nested) {
      let at = 0
      for (const { name, size } of sequence.kept ? sequence.entries : []) {
        const end = at + 8 * size / sequence.bits
        if (name === entry.name) return [sequence, block, at, end]
        at = end
      }
    }
    return undefined
  }

  /**
   * The tensors of a level that is there.
   * @param {number | 'dense'} level
   * @param {boolean} [final] whether they may be those of this file, which is of no more use then
   * @returns {[string, Tensor][]}
   */
  function tensors(level, final) {
    // Where no words of later parts are there, none has to be masked.
    const exact = level === 'dense' || file.parts === level && nested.every(({ stored }) => !stored.size)
    return [...wantedNames(header, profile, level)].map(([stored, name]) => {
      const entry = /** @type {Entry} */ (header.tensors.get(stored))
      const kept = storage && keptOf(entry)
      if (kept) return [name, { ...makeTensor(entry, allocate(0)), ...storage.read(...kept, exact ? undefined : (bytes, width) => mask(bytes, width, level)) }]
      const found = arrays.get(stored) ?? allocate(0)
      const bytes = final ? found : allocate(entry.size)
      if (!final) bytes.set(found)
      if (!exact && profile.nested.has(name)) mask(bytes, bitsOf(entry.dtype), level)
      return [name, makeTensor(entry, bytes)]
    })
  }

  /**
   * Compare tensors that are there with their checksums, and the words of parts with the counts of the profile (ELSA-D-024).
   * @param {Iterable<string>} names under which the tensors are stored
   * @param {number} last
   * @param {Findings} findings
   */
  function check(names, last, findings) {
    for (const name of names) {
      const stated = profile.checksums.get(name)
      // Before the dense part, words of nested tensors are missing.
      if (!stated || compared.has(name) || last <= levels && profile.nested.has(name)) continue
      const kept = storage && keptOf(/** @type {Entry} */ (header.tensors.get(name)))
      const bytes = kept ? bytesOf(storage.read(...kept).words) : arrays.get(name)
      checkSum(say`checksum of ${name}`, xxh3(bytes ?? allocate(0), 0n, kernels), stated)
      compared.add(name)
    }
    for (const entry of header.order) {
      let kept = 0
      const found = counts.get(entry.name)
      for (let level = 1; found && level <= last && level <= levels; level++) checkCount(entry, profile, level, kept += found[level], findings)
    }
  }

  /** The source, byte for byte, once all parts are there (ELSA-D-004); what is not there is zero. @returns {Uint8Array[]} */
  function source() {
    return [start, ...header.order.map(({ name, size }) => arrays.get(name) ?? new Uint8Array(size))]
  }

  return file
}

/** What is there of a file, to be read as an ELSA file. @param {DeliveryFile} file */
export const asPart = file => ({ ...file, bytes: new Bytes(file.source().slice(1)) })

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
    const bits = Math.max(8, bitsOf(dtype))
    const sequence = found.get(dtype) ?? { bits, mantissa: MANTISSA[dtype] ?? -1, entries: [], count: 0, words: new Uint8Array(0), stored: new Set() }
    found.set(dtype, sequence)
    sequence.entries.push(entry)
    sequence.count += 8 * size / bits
  }
  return [...found.values()]
}
