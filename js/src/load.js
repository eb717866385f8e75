import { allocate, makeTensor, masker, readData } from './data.js'
import { about, fail } from './errors.js'
import { makeKernels } from './kernels.js'
import { openNetwork } from './network.js'
import { chooseLevel, isReserved, storedName } from './profile.js'

/** @import { Tensor, Visitor } from './data.js' */
/** @import { Entry, Header } from './header.js' */
/** @import { Network, ReadOptions } from './network.js' */
/** @import { LevelChoice, Profile } from './profile.js' */
/** @import { Source } from './source.js' */

/**
 * @typedef {ReadOptions & {level: LevelChoice, verify?: boolean}} LoadOptions
 *   `verify: false` leaves the checksums out
 */

/**
 * What a file holds, from its header alone.
 * @param {Source} source
 * @param {ReadOptions} [options]
 * @returns {Promise<{profile: Profile, metadata: Map<string, string>, tensors: Map<string, {dtype: string, shape: number[], size: number}>}>}
 */
export async function inspect(source, options = {}) {
  const { profile, metadata, parts } = await openNetwork(source, options)
  await closeAll(parts)
  return { profile, metadata, tensors: describe(parts) }
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

/** @param {Network['parts']} parts */
async function closeAll(parts) {
  for (const part of parts) await (await part.data()).close()
}

/**
 * The tensors of one level.
 * @param {Source} source
 * @param {LoadOptions} options
 * @returns {Promise<{level: number | 'dense', profile: Profile, metadata: Map<string, string>, tensors: Map<string, Tensor>}>}
 */
export async function load(source, options) {
  const { profile, metadata, parts } = await openNetwork(source, options)
  const tensors = new Map()
  const level = await readLevel(parts, profile, options, (entry, name) => {
    const target = allocate(entry.size)
    tensors.set(name, makeTensor(entry, target))
    return (piece, at) => target.set(piece, at)
  })
  return { level, profile, metadata, tensors }
}

/**
 * One file with a level in place of the dense network: every byte is where it is in the file. So it can stand for the
 * file where something points into it, as the external data of an ONNX model.
 * @param {Source} source
 * @param {LoadOptions} options
 * @returns {Promise<Uint8Array<ArrayBuffer>>}
 */
export async function loadImage(source, options) {
  const { profile, parts } = await openNetwork(source, options)
  const [{ header: { bytes, size, tensors } }] = parts
  if (parts.length > 1) fail('InvalidOption', 'an image is of one file, not of shards')
  const start = 8 + bytes.length
  const image = allocate(start + size)
  new DataView(image.buffer).setUint32(0, bytes.length, true)
  image.set(bytes, 8)
  await readLevel(parts, profile, options, (entry, name) => {
    // A variant is wanted in the place of its plain name.
    const { begin } = tensors.get(name) ?? entry
    return (piece, at) => image.set(piece, start + begin + at)
  })
  return image
}

/**
 * Read all data of a network, and hand out what a level has of it.
 * @param {Network['parts']} parts
 * @param {Profile} whole
 * @param {LoadOptions} options
 * @param {(entry: Entry, name: string) => Visitor} take gets the stored tensor, its name in the level, and then the pieces
 * @returns {Promise<number | 'dense'>}
 */
async function readLevel(parts, whole, { level: choice, verify = true }, take) {
  /** @type {number | 'dense'} */
  let level
  try {
    level = chooseLevel(whole, choice)
  } catch (error) {
    await closeAll(parts)
    throw error
  }
  const kernels = makeKernels()
  for (const { name, header, profile, data } of parts) {
    const wanted = wantedNames(header, profile, level)
    await about(name, async () => readData(await data(), header, kernels, verify ? profile.checksums : undefined, entry => {
      const name = wanted.get(entry.name)
      if (name === undefined) return undefined
      const visitor = take(entry, name)
      const mask = masker(kernels, profile, entry, level)
      return mask ? (piece, at) => (mask(piece), visitor(piece, at)) : visitor
    }))
  }
  return level
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
