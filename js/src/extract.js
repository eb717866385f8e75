import { csrWriter } from './csr.js'
import { allocate, readData } from './data.js'
import { bitsOf } from './dtypes.js'
import { fail, say } from './errors.js'
import { checkLength, countBits } from './header.js'
import { makeKernels } from './kernels.js'
import { LAYOUT, partsOf } from './layouts.js'
import { masked, onlyOne, wantedNames } from './load.js'
import { withNetwork } from './network.js'
import { ownMetadata, pickLevel } from './profile.js'
import { report, sifter } from './words.js'
import { compareText, writeJson } from './written.js'

/** @import { Entry } from './header.js' */
/** @import { Layout, Stored } from './layouts.js' */
/** @import { LoadOptions } from './load.js' */
/** @import { Part } from './network.js' */
/** @import { Source } from './source.js' */
/** @import { Findings } from './words.js' */

/**
 * @typedef {LoadOptions & {layout?: Layout}} ExtractOptions
 * @typedef {(bytes: Uint8Array, position: number) => unknown} Write stores bytes at a place; they are good until it, or
 *   the promise that it gives, is done
 */

/** Where a tensor, or a part of one, goes. @typedef {Stored & {begin: number}} Place */

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
export function extractTo(source, write, options, begin) {
  return withNetwork(source, options, async ({ parts }) => {
    const part = onlyOne(parts)
    const { profile } = part
    const level = pickLevel(profile, options)
    const { head, places, size } = planLevel(part, level, options.layout ?? 'dense')
    begin?.(size)
    await write(head, 0)
    const kernels = makeKernels()
    /** @type {Findings} */
    const findings = []
    await readData(part, kernels, options.verify !== false && profile.checksums, entry => {
      const to = places.get(entry.name)
      if (!to) return undefined
      if (to.length > 1) return sifter(kernels, profile, entry, [/** @type {number} */ (level)], findings, sparse(entry, to, write))
      return masked(kernels, profile, entry, level, findings, (piece, at) => write(piece, to[0].begin + at))
    })
    report(findings)
    return { level, size }
  })
}

/**
 * Writes the parts of a nested tensor.
 * @param {Entry} entry
 * @param {Place[]} to
 * @param {Write} write
 * @returns {(level: number, bits: Uint8Array, values: Uint8Array, at: number, done: number) => Promise<void>}
 */
function sparse(entry, to, write) {
  const width = bitsOf(entry.dtype) / 8
  const at = to.map(({ begin }) => begin)
  const last = at.pop() ?? 0
  const most = Number(to[at.length].shape[0])
  const addRows = at.length > 1 && csrWriter(entry, most, to[0].dtype === 'I64', at, write)
  return async (_, bits, values, offset, done) => {
    if (addRows) await addRows(bits, offset / width)
    else await write(bits, at[0] + offset / width / 8)
    // Too many of them would overwrite what is behind; it is reported once all data was seen.
    await write(values.subarray(0, Math.max(0, most * width - done)), last + done)
  }
}

/**
 * The head of the output, and where each stored tensor goes (ELSA-R-064, ELSA-R-094).
 * @param {Part} part
 * @param {number | 'dense'} level
 * @param {Layout} layout
 */
function planLevel({ header, profile }, level, layout) {
  if (!LAYOUT[1](layout) || level === 'dense' && layout !== level) {
    fail('InvalidOption', say`layout is ${layout}, expected ${level === 'dense' ? level : LAYOUT[0]}`)
  }
  const { nested, levels, shard } = profile
  const wanted = wantedNames(header, profile, level)
  /** @type {Map<string, Place[]>} */
  const places = new Map()
  for (const { name: stored, dtype, shape } of header.order) {
    const name = wanted.get(stored)
    if (name === undefined) continue
    const counts = level !== 'dense' && nested.get(name)
    places.set(stored, /** @type {Place[]} */ (partsOf({ name, dtype, shape }, counts ? layout : 'dense', counts ? counts[level - 1] : 0)))
  }
  const order = [...places.values()].flat()
  if (layout !== 'dense') order.sort((a, b) => bitsOf(b.dtype) - bitsOf(a.dtype))
  const metadata = ownMetadata([header])
  if (level !== 'dense') {
    const { name, digest } = levels[level - 1]
    const tensors = new Map([...nested.keys()].sort(compareText).map(name => {
      const { dtype, shape } = /** @type {Entry} */ (header.tensors.get(name))
      if (shape.some(d => typeof d === 'bigint')) fail('TooLarge', say`shape of ${name} is ${shape}, expected less than 2^53`)
      return [name, { dtype, shape }]
    }))
    metadata.set('elsa_level', writeJson({ digest: shard ? undefined : digest, layout, level, name, tensors, version: '1.0' }))
  }
  const entries = new Map()
  if (metadata.size) entries.set('__metadata__', new Map([...metadata].sort(([a], [b]) => compareText(a, b))))
  let end = 0
  for (const place of order) {
    const { name, dtype, shape } = place
    place.begin = end
    end += Number(countBits(place, 'TooLarge')) / 8
    entries.set(name, { dtype, shape, data_offsets: [place.begin, end] })
  }
  const text = new TextEncoder().encode(writeJson(entries))
  const head = new Uint8Array(Math.ceil((8 + text.length) / 256) * 256).fill(32)
  new DataView(head.buffer).setBigUint64(0, BigInt(checkLength(head.length - 8)), true)
  head.set(text, 8)
  for (const place of order) place.begin += head.length
  return { head, places, size: head.length + end }
}
