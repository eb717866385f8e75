import { csrWriter, indexDtype, matrixOf } from './csr.js'
import { allocate, masker, readData } from './data.js'
import { DTYPES, FLOATS } from './dtypes.js'
import { about, fail, show } from './errors.js'
import { makeKernels } from './kernels.js'
import { wantedNames } from './load.js'
import { openNetwork } from './network.js'
import { chooseLevel, ownMetadata } from './profile.js'
import { compact } from './sift.js'
import { checkCount, checkWords, report } from './words.js'
import { compareText, writeJson } from './written.js'

/** @import { Visitor } from './data.js' */
/** @import { Entry } from './header.js' */
/** @import { Kernels } from './kernels.js' */
/** @import { LoadOptions } from './load.js' */
/** @import { Part } from './network.js' */
/** @import { Source } from './source.js' */
/** @import { Findings } from './words.js' */

/**
 * @typedef {'dense' | 'bitmask' | 'csr'} Layout
 * @typedef {LoadOptions & {layout?: Layout}} ExtractOptions
 * @typedef {(bytes: Uint8Array, position: number) => unknown} Write stores bytes at a place; they are good until it, or
 *   the promise that it gives, is done
 */

/**
 * Where a tensor, or a part of one, goes.
 * @typedef {{name: string, dtype: string, shape: (number | bigint)[], size: number, begin: number}} Place
 */

/**
 * One level of an ELSA file as a file of its own (elsa-1.0.md §9), in one pass over the source. The dense layout takes
 * constant memory. The others are held in memory until they are complete; `extractTo` needs no more than 64 MiB for them.
 * @param {Source} source
 * @param {ExtractOptions} options
 * @returns {ReadableStream<Uint8Array>}
 */
export function extract(source, options) {
  const { readable, writable } = new TransformStream()
  const writer = writable.getWriter()
  const send = async (/** @type {Uint8Array} */ bytes) => {
    await writer.ready
    writer.write(bytes.slice()).catch(() => {})
  }
  const run = async () => {
    if ((options.layout ?? 'dense') === 'dense') return extractTo(source, send, options)
    let held = new Uint8Array(0)
    await extractTo(source, (bytes, position) => held.set(bytes, position), options, size => {
      held = allocate(size)
    })
    for (let at = 0; at < held.length; at += 1 << 16) await send(held.subarray(at, at + (1 << 16)))
  }
  run().then(() => writer.close(), error => writer.abort(error)).catch(() => {})
  return readable
}

/**
 * The same to where bytes can be put at any place: a file.
 * @param {Source} source
 * @param {Write} write
 * @param {ExtractOptions} options
 * @param {(size: number) => void} [begin] gets the number of bytes that will be written
 * @returns {Promise<{level: number | 'dense', size: number}>}
 */
export async function extractTo(source, write, options, begin) {
  const { parts: [part, ...others] } = await openNetwork(source, options)
  const { name, header, profile } = part
  return about(name, async () => {
    if (others.length) fail('InvalidOption', 'one file can be extracted, not an index')
    const bytes = await part.data()
    try {
      const level = chooseLevel(profile, options.level)
      const { head, places, size } = planLevel(part, level, options.layout ?? 'dense')
      begin?.(size)
      await write(head, 0)
      const kernels = makeKernels()
      /** @type {Findings} */
      const findings = []
      await readData(bytes, header, kernels, options.verify === false ? undefined : profile.checksums, entry => {
        const at = places.get(entry.name)?.map(({ begin }) => head.length + begin)
        if (!at) return undefined
        if (at.length > 1) return sparse(kernels, part, entry, /** @type {number} */ (level), at, write, findings)
        const mask = masker(kernels, profile, entry, level)
        return async (piece, offset) => {
          mask?.(piece)
          await write(piece, at[0] + offset)
        }
      })
      report(findings)
      return { level, size }
    } finally {
      await bytes.close()
    }
  })
}

/**
 * @param {Kernels} kernels
 * @param {Part} part
 * @param {Entry} entry
 * @param {number} level
 * @param {number[]} at where the parts begin
 * @param {Write} write
 * @param {Findings} findings
 * @returns {Visitor}
 */
function sparse(kernels, { profile }, entry, level, at, write, findings) {
  const { width } = FLOATS[entry.dtype]
  const most = (profile.nested.get(entry.name)?.[level - 1] ?? 0) * width
  const addRows = at.length === 3 && csrWriter(entry, most / width, at, write)
  let done = 0
  return async (piece, offset) => {
    const { length } = piece
    checkWords(kernels, entry, profile, length, findings)
    kernels.mask(width, length, 2 ** profile.bits - 1, level)
    const size = compact(kernels, width, length)
    const bits = kernels.bits.subarray(0, Math.ceil(length / width / 8))
    if (addRows) await addRows(bits, offset / width, length / width)
    else await write(bits, at[0] + offset / width / 8)
    // Too many of them would overwrite what is behind; it is reported once all data was seen.
    const room = Math.max(0, Math.min(size, most - done))
    await write(kernels.values.subarray(0, room), at[at.length - 1] + done)
    done += size
    if (offset + length === entry.size) checkCount(entry, profile, level, done / width, findings)
  }
}

/**
 * The head of the output, and where each stored tensor goes (ELSA-R-064, ELSA-R-094).
 * @param {Part} part
 * @param {number | 'dense'} level
 * @param {Layout} layout
 */
function planLevel({ header, profile }, level, layout) {
  if (!['dense', 'bitmask', 'csr'].includes(layout) || level === 'dense' && layout !== level) {
    fail('InvalidOption', `layout ${show(layout)}, expected dense${level === 'dense' ? '' : ', bitmask or csr'}`)
  }
  const wanted = wantedNames(header, profile, level)
  /** @type {Map<string, Place[]>} */
  const places = new Map()
  for (const entry of header.order) {
    const name = wanted.get(entry.name)
    if (name !== undefined) places.set(entry.name, partsOf(entry, name, profile.nested.get(name), level, layout))
  }
  const order = [...places.values()].flat()
  if (layout !== 'dense') order.sort((a, b) => DTYPES[b.dtype][0] - DTYPES[a.dtype][0])
  let end = 0
  for (const place of order) {
    place.begin = end
    end += place.size
  }
  const metadata = ownMetadata([header])
  if (level !== 'dense') metadata.set('elsa_level', levelDocument({ header, profile }, level, layout))
  const head = writeHeader(metadata, order)
  return { head, places, size: head.length + end }
}

/**
 * What the output says of itself (§9.1), its keys sorted.
 * @param {Pick<Part, 'header' | 'profile'>} part
 * @param {number} level
 * @param {Layout} layout
 */
function levelDocument({ header: { tensors }, profile: { nested, levels, shard } }, level, layout) {
  const { name, digest } = levels[level - 1]
  const listed = [...nested.keys()].sort(compareText).map(name => {
    const { dtype, shape } = /** @type {Entry} */ (tensors.get(name))
    if (shape.some(d => typeof d === 'bigint')) fail('TooLarge', `tensor ${show(name)}: a level file has no dimension above 2^53 − 1`)
    return /** @type {const} */ ([name, record({ dtype, shape })])
  })
  return writeJson(record({ digest: shard ? undefined : digest, layout, level, name, tensors: new Map(listed), version: '1.0' }))
}

/** @param {Record<string, unknown>} fields */
function record(fields) {
  return new Map(Object.entries(fields).filter(([, value]) => value !== undefined))
}

/**
 * @param {Entry} entry
 * @param {string} name
 * @param {number[] | undefined} counts
 * @param {number | 'dense'} level
 * @param {Layout} layout
 * @returns {Place[]}
 */
function partsOf({ dtype, shape, size, elements }, name, counts, level, layout) {
  if (!counts || level === 'dense' || layout === 'dense') return [{ name, dtype, shape, size, begin: 0 }]
  const kept = counts[level - 1]
  /** @param {string} part @param {string} dtype @param {number} length */
  const one = (part, dtype, length) =>
    ({ name: `__elsa__.${part}.${name}`, dtype, shape: [length], size: length * DTYPES[dtype][0] / 8, begin: 0 })
  const values = one('values', dtype, kept)
  if (layout === 'bitmask') return [one('bitmask', 'U8', Math.ceil(elements / 8)), values]
  const [rows, columns] = matrixOf(shape).map(Number)
  const index = indexDtype(kept, columns)
  return [one('indptr', index, rows + 1), one('indices', index, kept), values]
}

/**
 * @param {Map<string, string>} metadata
 * @param {Place[]} order
 * @returns {Uint8Array} length, header and padding
 */
function writeHeader(metadata, order) {
  const entries = new Map()
  if (metadata.size) entries.set('__metadata__', new Map([...metadata].sort(([a], [b]) => compareText(a, b))))
  for (const { name, dtype, shape, begin, size } of order) {
    entries.set(name, record({ dtype, shape, data_offsets: [begin, begin + size] }))
  }
  const text = new TextEncoder().encode(writeJson(entries))
  const head = new Uint8Array(Math.ceil((8 + text.length) / 256) * 256).fill(32)
  if (head.length - 8 > 100_000_000) fail('HeaderTooLarge', `a header of ${head.length - 8} bytes, expected at most 100000000`)
  new DataView(head.buffer).setBigUint64(0, BigInt(head.length - 8), true)
  head.set(text, 8)
  return head
}
