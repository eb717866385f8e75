import { allocate, bytesOf, makeTensor, masker, readData } from './data.js'
import { about, fail } from './errors.js'
import { makeKernels } from './kernels.js'
import { openNetwork } from './network.js'
import { chooseLevel, isReserved, storedName } from './profile.js'

/** @import { Tensor, Visitor } from './data.js' */
/** @import { Entry } from './header.js' */
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
  const tensors = new Map()
  for (const part of parts) {
    await (await part.data()).close()
    for (const [name, { dtype, shape, size }] of part.header.tensors) {
      if (!isReserved(name)) tensors.set(name, { dtype, shape, size })
    }
  }
  return { profile, metadata, tensors }
}

/**
 * The tensors of one level.
 * @param {Source} source
 * @param {LoadOptions} options
 * @returns {Promise<{level: number | 'dense', profile: Profile, metadata: Map<string, string>, tensors: Map<string, Tensor>}>}
 */
export async function load(source, options) {
  const network = await openNetwork(source, options)
  const tensors = new Map()
  const level = await readLevel(network, options, (entry, name) => {
    const tensor = makeTensor(entry)
    tensors.set(name, tensor)
    const target = bytesOf(tensor)
    return (piece, at) => target.set(piece, at)
  })
  return { level, profile: network.profile, metadata: network.metadata, tensors }
}

/**
 * One file with a level in place of the dense network: every byte is where it is in the file. So it can stand for the
 * file where something points into it, as the external data of an ONNX model.
 * @param {Source} source
 * @param {LoadOptions} options
 * @returns {Promise<Uint8Array<ArrayBuffer>>}
 */
export async function loadImage(source, options) {
  const network = await openNetwork(source, options)
  const [{ header }] = network.parts
  if (network.parts.length > 1) fail('InvalidOption', 'an image is of one file, not of shards')
  const start = 8 + header.bytes.length
  const image = new Uint8Array(allocate(start + header.size))
  new DataView(image.buffer).setBigUint64(0, BigInt(header.bytes.length), true)
  image.set(header.bytes, 8)
  await readLevel(network, options, (entry, name) => {
    // A variant is wanted in the place of its plain name.
    const { begin } = header.tensors.get(name) ?? entry
    return (piece, at) => image.set(piece, start + begin + at)
  })
  return image
}

/**
 * Read all data of a network, and hand out what a level has of it.
 * @param {Network} network
 * @param {LoadOptions} options
 * @param {(entry: Entry, name: string) => Visitor} take gets the stored tensor, its name in the level, and then the pieces
 * @returns {Promise<number | 'dense'>}
 */
async function readLevel(network, { level: choice, verify = true }, take) {
  /** @type {number | 'dense'} */
  let level
  try {
    level = chooseLevel(network.profile, choice)
  } catch (error) {
    for (const part of network.parts) await (await part.data()).close()
    throw error
  }
  const kernels = makeKernels()
  for (const part of network.parts) {
    const { header, profile } = part
    const wanted = new Map()
    for (const name of header.tensors.keys()) {
      if (!isReserved(name)) wanted.set(storedName(profile, name, level), name)
    }
    await about(part.name, async () => {
      const bytes = await part.data()
      try {
        await readData(bytes, header, kernels, verify ? profile.checksums : new Map(), entry => {
          const name = wanted.get(entry.name)
          if (name === undefined) return undefined
          const visitor = take(entry, name)
          const mask = masker(kernels, profile, entry, level)
          return mask ? (piece, at) => (mask(piece), visitor(piece, at)) : visitor
        })
      } finally {
        await bytes.close()
      }
    })
  }
  return level
}
