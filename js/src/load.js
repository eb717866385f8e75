import { allocate, collect, readData } from './data.js'
import { bitsOf } from './dtypes.js'
import { fail } from './errors.js'
import { makeKernels } from './kernels.js'
import { withNetwork } from './network.js'
import { isReserved, pickLevel, storedName } from './profile.js'
import { countWords } from './sift.js'
import { checkCount, report } from './words.js'

/** @import { Tensor, Visitor } from './data.js' */
/** @import { ReadOptions } from './files.js' */
/** @import { Entry, Header } from './header.js' */
/** @import { Kernels } from './kernels.js' */
/** @import { Network } from './network.js' */
/** @import { Profile, Wanted } from './profile.js' */
/** @import { Source } from './source.js' */
/** @import { Findings } from './words.js' */

/**
 * @typedef {ReadOptions & Wanted & {verify?: boolean}} LoadOptions
 *   `verify: false` leaves the checksums out
 */

/**
 * What a file holds, from its header alone.
 * @param {Source} source
 * @param {ReadOptions} [options]
 * @returns {Promise<{profile: Profile, metadata: Map<string, string>, tensors: Map<string, {dtype: string, shape: number[], size: number}>}>}
 */
export function inspect(source, options = {}) {
  return withNetwork(source, options, async ({ profile, metadata, parts }) => ({ profile, metadata, tensors: describe(parts) }))
}

/**
 * The tensors of files, but for variants.
 * @param {{header: Header}[]} parts
 * @returns {Map<string, {dtype: string, shape: number[], size: number}>}
 */
export function describe(parts) {
  return new Map(parts.flatMap(({ header }) => [...header.tensors.values()]).filter(({ name }) => !isReserved(name))
    .map(({ name, dtype, shape, size }) => [name, { dtype, shape: /** @type {number[]} */ (shape), size }]))
}

/**
 * The tensors of one level.
 * @param {Source} source
 * @param {LoadOptions} options
 * @returns {Promise<{level: number | 'dense', profile: Profile, metadata: Map<string, string>, tensors: Map<string, Tensor>}>}
 */
export function load(source, options) {
  return withNetwork(source, options, async network => {
    const { profile, metadata } = network
    const tensors = new Map()
    const level = await readLevel(network, options, (entry, name) => collect(entry, tensor => tensors.set(name, tensor)))
    return { level, profile, metadata, tensors }
  })
}

/**
 * One file with a level in place of the dense network: every byte is where it is in the file. So it can stand for the
 * file where something points into it, as the external data of an ONNX model.
 * @param {Source} source
 * @param {LoadOptions} options
 * @returns {Promise<Uint8Array<ArrayBuffer>>}
 */
export function loadImage(source, options) {
  return withNetwork(source, options, network => makeImage(network, options))
}

/** @param {Network} network @param {LoadOptions} options */
export async function makeImage(network, options) {
  const { header: { text, size, tensors } } = onlyOne(network.parts)
  const start = 8 + text.length
  const image = allocate(start + size)
  new DataView(image.buffer).setUint32(0, text.length, true)
  image.set(text, 8)
  await readLevel(network, options, (entry, name) => {
    // A variant is wanted in the place of its plain name.
    const { begin } = tensors.get(name) ?? entry
    return (piece, at) => image.set(piece, start + begin + at)
  })
  return image
}

/**
 * The file of what can be had of one file only.
 * @template T
 * @param {T[]} files
 * @returns {T}
 */
export function onlyOne([file, ...others]) {
  if (others.length) fail('InvalidOption', 'shards, expected one file')
  return file
}

/**
 * Read all data of a network, and hand out what a level has of it.
 * @param {Network} network
 * @param {LoadOptions} options
 * @param {(entry: Entry, name: string) => Visitor} take gets the stored tensor, its name in the level, and then the pieces
 * @returns {Promise<number | 'dense'>}
 */
async function readLevel({ profile: whole, parts }, { verify = true, ...wanted }, take) {
  const level = pickLevel(whole, wanted)
  const kernels = makeKernels()
  /** @type {Findings} */
  const findings = []
  for (const part of parts) {
    const { header, profile } = part
    const wanted = wantedNames(header, profile, level)
    await readData(part, kernels, verify && profile.checksums, entry => {
      const name = wanted.get(entry.name)
      return name === undefined ? undefined : masked(kernels, profile, entry, level, findings, take(entry, name))
    })
  }
  report(findings)
  return level
}

/**
 * A visitor that gets the level of a nested tensor (elsa-1.0.md §4.2), counted.
 * @param {Kernels} kernels
 * @param {Profile} profile
 * @param {Entry} entry
 * @param {number | 'dense'} level
 * @param {Findings} findings
 * @param {Visitor} visitor
 * @returns {Visitor}
 */
export function masked(kernels, profile, entry, level, findings, visitor) {
  if (level === 'dense' || !profile.nested.has(entry.name)) return visitor
  const width = bitsOf(entry.dtype) / 8
  let kept = 0
  return (piece, at) => {
    const { length } = piece
    kernels.mask(width, length, 2 ** profile.bits - 1, level)
    kept += countWords(kernels, width, length)
    if (at + length === entry.size) checkCount(entry, profile, level, kept, findings)
    return visitor(piece, at)
  }
}

/**
 * The names of a level's tensors by those under which they are stored.
 * @param {Header} header
 * @param {Profile} profile
 * @param {number | 'dense'} level
 * @returns {Map<string, string>}
 */
export function wantedNames({ tensors }, profile, level) {
  return new Map([...tensors.keys()].filter(name => !isReserved(name)).map(name => [storedName(profile, name, level), name]))
}
