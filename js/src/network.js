import { checkSize } from './data.js'
import { about } from './errors.js'
import { readHeader } from './header.js'
import { readProfile } from './profile.js'
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
  if (isIndex(source, options)) {
    // Few networks are in shards; the others do without this module.
    const { openShards } = await import('./shards.js')
    return openShards(source, options, openPart)
  }
  const part = await openPart(source, nameOf(source), options)
  const metadata = new Map([...part.header.metadata].filter(([key]) => key !== 'elsa' && key !== 'elsa_level'))
  return { profile: part.profile, metadata, parts: [part] }
}

/**
 * @param {Source} source
 * @param {string} name
 * @param {ReadOptions} options
 * @returns {Promise<Part>}
 */
async function openPart(source, name, options) {
  return about(name, async () => {
    const bytes = await openBytes(source, options)
    try {
      const header = await readHeader(bytes)
      const profile = readProfile(header)
      checkSize(header, bytes.left())
      return { name, header, profile, data: async () => bytes }
    } catch (error) {
      await bytes.close()
      throw error
    }
  })
}
