import { checkSize } from './data.js'
import { about } from './errors.js'
import { readHeader } from './header.js'
import { ownMetadata, readProfile } from './profile.js'
import { openShards } from './shards.js'
import { isIndex, nameOf, openBytes } from './source.js'

/** @import { Header } from './header.js' */
/** @import { Profile } from './profile.js' */
/** @import { Bytes, Files, Source } from './source.js' */

/**
 * @typedef {object} ReadOptions
 * @property {AbortSignal} [signal]
 * @property {(loaded: number, total?: number) => void} [onProgress] of the file, or shard, that is being read
 * @property {Files} [files] the shards of an index by their names; a URL that ends in .index.json finds its own
 */

/**
 * One file of a network, its header read.
 * @typedef {object} Part
 * @property {string} name
 * @property {Header} header
 * @property {Profile} profile
 * @property {() => Promise<Bytes>} data its bytes, from the data section on; once
 */

/**
 * An ELSA file, or all shards of one.
 * @typedef {{profile: Profile, metadata: Map<string, string>, parts: Part[]}} Network
 */

/**
 * @param {Source} source
 * @param {ReadOptions} options
 * @returns {Promise<Network>}
 */
export async function openNetwork(source, options) {
  if (isIndex(source, options)) return openShards(source, options, openPart)
  const part = await openPart(source, nameOf(source), options)
  return { profile: part.profile, metadata: ownMetadata([part.header]), parts: [part] }
}

/**
 * @param {Source} source
 * @param {string} name
 * @param {ReadOptions} options
 * @returns {Promise<Part>}
 */
function openPart(source, name, options) {
  return openFile(source, name, options, async (header, bytes) =>
    ({ name, header, profile: readProfile(header), data: async () => bytes }))
}

/**
 * Read the header of a file, and what it says.
 * @template T
 * @param {Source} source
 * @param {string} name
 * @param {ReadOptions} options
 * @param {(header: Header, bytes: Bytes) => Promise<T>} read
 * @returns {Promise<T>}
 */
export function openFile(source, name, options, read) {
  return about(name, async () => {
    const bytes = await openBytes(source, options)
    try {
      const header = await readHeader(bytes)
      const result = await read(header, bytes)
      if (bytes.size !== undefined) checkSize(header, bytes.size - 8 - header.bytes.length)
      return result
    } catch (error) {
      await bytes.close()
      throw error
    }
  })
}
