import { OBJECT, TEXT, fieldsOf, integer, mapOf } from './document.js'
import { ElsaError, about, fail, show } from './errors.js'
import { parseJson } from './json.js'
import { checkSums, ownMetadata } from './profile.js'
import { nameOf, openBytes } from './source.js'
import { compareText } from './written.js'

/** @import { Network, Part, ReadOptions } from './network.js' */
/** @import { Files, Source } from './source.js' */

const CODE = 'InvalidIndex'
const LIMIT = 100_000_000

/**
 * The index by itself (elsa-1.0.md §10.1).
 * @param {Source} source
 * @param {ReadOptions} options
 * @returns {Promise<{weightMap: Map<string, string>, names: string[], metadata: Map<string, any>, open: Files}>}
 */
export async function readIndex(source, options) {
  return about(nameOf(source), async () => {
    const bytes = await openBytes(source, { signal: options.signal })
    const text = await bytes.take(LIMIT + 1)
    await bytes.close()
    if (text.length > LIMIT) fail(CODE, `an index of more than ${LIMIT} bytes`)
    const index = parseJson(text, 'index')
    const get = fieldsOf(index, CODE)
    const weightMap = mapOf(get('weight_map', ['a non-empty object', map => map instanceof Map && map.size > 0]), TEXT, CODE)
    const metadata = get('metadata', OBJECT, new Map())
    const names = [.../** @type {Set<string>} */ (new Set(weightMap.values()))].sort(compareText)
    for (const name of names) {
      if (/^\.{0,2}$|[/\\\0]/.test(name)) fail('UnsafePath', `shard ${show(name)}, expected a plain file name`)
    }
    const { files } = options
    // Encoded, a name cannot be taken for a scheme, a query or another folder.
    return { weightMap, names, metadata, open: files ?? (name => new URL(encodeURIComponent(name), absolute(source))) }
  })
}

/** @param {Source} source */
function absolute(source) {
  const base = /** @type {any} */ (globalThis).document?.baseURI ?? /** @type {any} */ (globalThis).location?.href
  return new URL(String(source), base)
}

/**
 * Open all shards, in the order of their names, and compare the index with them.
 * @template T
 * @param {Awaited<ReturnType<typeof readIndex>>} index
 * @param {(source: Source, name: string) => Promise<T>} openOne
 * @returns {Promise<T[]>}
 */
export async function openAll(index, openOne) {
  const opened = []
  /** @type {unknown} */
  let first
  for (const name of index.names) {
    const source = await index.open(name)
    try {
      if (source === undefined) fail('RemoteError', 'answered 404')
      opened.push(await openOne(source, name))
    } catch (error) {
      if (!(error instanceof ElsaError)) throw error
      if (error.code === 'RemoteError' && error.message.includes('answered 404')) fail(CODE, `shard ${show(name)} is missing`)
      first ??= error // that a later shard is missing would count before
    }
  }
  if (first) throw first
  return opened
}

/**
 * `weight_map` against what the shards hold (ELSA-R-074).
 * @param {Awaited<ReturnType<typeof readIndex>>} index
 * @param {{name: string, header: import('./header.js').Header}[]} shards
 */
export function checkMap(index, shards) {
  let total = 0
  let count = 0
  for (const { name, header } of shards) {
    total += header.size
    for (const tensor of header.tensors.keys()) {
      count++
      if (index.weightMap.get(tensor) !== name) {
        fail(CODE, `weight_map: ${show(tensor)} is in ${show(index.weightMap.get(tensor))}, found in ${show(name)}`)
      }
    }
  }
  if (count !== index.weightMap.size) fail(CODE, `weight_map has ${index.weightMap.size} tensors, the shards have ${count}`)
  const stated = fieldsOf(index.metadata, CODE)('total_size', integer(0), total)
  if (stated !== total) fail(CODE, `total_size is ${stated}, expected ${total}`)
}

/**
 * What shards say of the network, compared and put together (§10.2).
 * @template {{header: import('./header.js').Header, profile: import('./profile.js').Profile}} P
 * @param {P[]} shards
 * @returns {{profile: import('./profile.js').Profile, metadata: Map<string, string>, parts: P[]}}
 */
export function joinShards(shards) {
  const parts = [...shards].sort((a, b) => (a.profile.shard?.number ?? 0) - (b.profile.shard?.number ?? 0))
  const [{ profile: first }] = parts
  const levels = JSON.stringify(first.levels)
  const whole = { ...first, nested: new Map(), perLevel: new Set(), checksums: new Map(), shard: undefined }
  for (const [i, { profile }] of parts.entries()) {
    const { shard } = profile
    if (shard?.number !== i + 1 || shard.of !== parts.length) {
      fail(CODE, `a shard is ${shard?.number} of ${shard?.of}, expected ${i + 1} of ${parts.length}`)
    }
    if (profile.bits !== first.bits || JSON.stringify(profile.levels) !== levels) fail(CODE, `shard ${i + 1} has other levels than shard 1`)
    for (const [name, counts] of profile.nested) whole.nested.set(name, counts)
    for (const name of profile.perLevel) whole.perLevel.add(name)
    for (const [name, checksum] of profile.checksums) whole.checksums.set(name, checksum)
  }
  checkSums(whole)
  return { profile: whole, metadata: ownMetadata(parts.map(({ header }) => header)), parts }
}

/**
 * @param {Source} source
 * @param {ReadOptions} options
 * @param {(source: Source, name: string, options: ReadOptions) => Promise<Part>} openPart
 * @returns {Promise<Network>}
 */
export async function openShards(source, options, openPart) {
  const index = await readIndex(source, options)
  const one = { signal: options.signal }
  const shards = await openAll(index, async (source, name) => {
    const part = await openPart(source, name, one)
    await (await part.data()).close()
    /** @type {Part} */
    return {
      ...part,
      // Opened again when it is its turn: shards may be many.
      async data() {
        const again = await openPart(/** @type {Source} */ (await index.open(name)), name, { ...options, files: undefined })
        if (again.header.bytes.some((byte, i) => byte !== part.header.bytes[i])) fail(CODE, `shard ${show(name)} has changed`)
        return again.data()
      },
    }
  })
  return about(nameOf(source), async () => {
    checkMap(index, shards)
    return joinShards(shards)
  })
}
