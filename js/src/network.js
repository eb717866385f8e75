import { checkSize } from './data.js'
import { about, expect } from './errors.js'
import { checkTotal, closeAll, nameOf, openFiles } from './files.js'
import { readHeader } from './header.js'
import { checkSums, ownMetadata, readProfile } from './profile.js'

/** @import { Opened, ReadOptions } from './files.js' */
/** @import { Header } from './header.js' */
/** @import { Profile } from './profile.js' */
/** @import { Bytes, Source } from './source.js' */

/**
 * One file of a network, its header read.
 * @typedef {Opened & {profile: Profile}} Part
 */

/**
 * An ELSA file, or all shards of one.
 * @template {{header: Header, profile: Profile}} [P=Part]
 * @typedef {{profile: Profile, metadata: Map<string, string>, parts: P[]}} Network
 */

/**
 * Open a network, and close it when it was used.
 * @template T
 * @param {Source} source
 * @param {ReadOptions} options
 * @param {(network: Network) => Promise<T>} use
 * @returns {Promise<T>}
 */
export async function withNetwork(source, options, use) {
  const network = await openFiles(source, options, bytes => readFile(bytes, readProfile, 'profile'), joinParts)
  try {
    return await about(nameOf(source), () => use(network))
  } finally {
    await closeAll(network.parts)
  }
}

/**
 * The header of a file, and what it says.
 * @template {string} K
 * @template T
 * @param {Bytes} bytes
 * @param {(header: Header) => T} read
 * @param {K} key what to call that
 * @returns {Promise<{header: Header} & Record<K, T>>}
 */
export async function readFile(bytes, read, key) {
  const header = await readHeader(bytes)
  const said = read(header)
  if (bytes.size !== undefined) checkSize(header, bytes.size - 8 - header.text.length)
  return /** @type {any} */ ({ header, [key]: said })
}

/**
 * What the files of a network say of it; shards are compared (elsa-1.0.md §10.2).
 * @template {{header: Header, profile: Profile}} P
 * @param {P[]} files
 * @param {Map<string, any>} [index] its metadata; nothing for a file by itself
 * @returns {Network<P>}
 */
export function joinParts(files, index) {
  const number = (/** @type {P} */ { profile: { shard } }) => shard?.number ?? 0
  const parts = [...files].sort((a, b) => number(a) - number(b))
  const [{ profile: first }] = parts
  const metadata = ownMetadata(parts.map(({ header }) => header))
  if (!index) return { profile: first, metadata, parts }
  const code = 'InvalidIndex'
  /** @param {'nested' | 'perLevel' | 'checksums'} key @returns {any[]} */
  const all = key => parts.flatMap(({ profile }) => [...profile[key]])
  const profile = { ...first, nested: new Map(all('nested')), perLevel: new Set(all('perLevel')), checksums: new Map(all('checksums')), shard: undefined }
  for (const [i, { profile }] of parts.entries()) {
    const { shard } = profile
    expect(code, 'number of a shard', `${shard?.number} of ${shard?.of}`, `${i + 1} of ${parts.length}`)
    const [found, expected] = [profile, first].map(({ bits, levels }) => JSON.stringify({ bits, levels }))
    // From where they differ; of equal ones the last character.
    const at = [...found].findIndex((character, i) => character !== expected[i])
    expect(code, `shard ${i + 1} from where it differs`, found.slice(at), expected.slice(at))
  }
  checkTotal(index, parts)
  checkSums(profile)
  return { profile, metadata, parts }
}
