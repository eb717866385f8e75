import { OBJECT, TEXT, integer, mapOf, optional, readFields } from './document.js'
import { ElsaError, about, expect, fail, say, within } from './errors.js'
import { parseJson } from './json.js'
import { openLocal } from './local.js'
import { Bytes, isLocal, isUrl } from './source.js'
import { compareText } from './written.js'

/** @import { Header } from './header.js' */
/** @import { BytesOptions, Source } from './source.js' */

/**
 * The file of a name that stands beside the index; nothing if there is none.
 * @typedef {(name: string) => Source | undefined | Promise<Source | undefined>} Files
 */

/**
 * @typedef {object} ReadOptions
 * @property {AbortSignal} [signal]
 * @property {(loaded: number, total?: number) => void} [onProgress] of the file, or shard, that is being read
 * @property {Files} [files] the shards of an index by their names; a URL that ends in .index.json finds its own
 */

/** @typedef {{name: string, bytes: Bytes, header: Header}} Opened */

const CODE = 'InvalidIndex'
const LIMIT = 100_000_000

/**
 * What to call a source in messages.
 * @param {any} source
 * @returns {string}
 */
export function nameOf(source) {
  return isLocal(source) ? `${source}` : String(isUrl(source) ? source : source.name ?? source.url ?? '').replace(/[?#].*/s, '')
}

/**
 * Open a file, or all shards of an index, and put together what they say.
 * @template {{header: Header}} T
 * @template R
 * @param {Source} source
 * @param {ReadOptions & BytesOptions} options
 * @param {(bytes: Bytes, shard: boolean) => Promise<T>} open
 * @param {(files: (T & Opened)[], metadata?: Map<string, any>) => R} join gets what the index says, if there is one
 * @returns {Promise<R>}
 */
export async function openFiles(source, options, open, join) {
  const { signal, onProgress } = options
  const whole = nameOf(source)
  const isIndex = options.files || isUrl(source) && /\.index(\.[^./\\]+)*\.json$/.test(whole)
  /** @type {(T & Opened)[]} */
  const opened = []
  /** @param {Source} source @param {string} name @param {BytesOptions} options @param {boolean} shard */
  const add = (source, name, options, shard) => about(name, async () => {
    const bytes = new Bytes(source, options)
    try {
      opened.push(Object.assign(await open(bytes, shard), { name, bytes }))
      // Opened again when it is its turn: shards may be many.
      if (shard && bytes.seekable) await bytes.close()
    } catch (error) {
      await bytes.close()
      throw error
    }
  })
  return about(whole, async () => {
    try {
      const place = await locate(source)
      if (!isIndex) {
        await add(place.source, whole, options, false)
        return join(opened)
      }
      const index = await readIndex(new Bytes(place.source, { signal }))
      const files = options.files ?? place.files
      if (!options.files) place.check?.(index.names)
      /** @type {unknown} */
      let first
      for (const name of index.names) {
        try {
          await add(await files(name) ?? fail('RemoteError', 'no such file', 404), name, { signal, onProgress }, true)
        } catch (error) {
          if (!(error instanceof ElsaError)) throw error
          if (error.status === 404) fail(CODE, say`${name} is missing, expected by the index`)
          first ??= error // that a later shard is missing would count before
        }
      }
      if (first) throw first
      checkMap(index, opened)
      return join(opened, index.metadata)
    } catch (error) {
      await closeAll(opened)
      throw error
    }
  })
}

/**
 * Where bytes are, and how the files beside them are found.
 * @param {Source} source
 * @returns {Promise<{source: Source, files: Files, check?: (names: string[]) => void}>}
 */
async function locate(source) {
  // Encoded, a name cannot be taken for a scheme, a query or another folder.
  return isLocal(source) ? openLocal(source) : { source, files: name => new URL(encodeURIComponent(name), new Request(/** @type {string} */ (source)).url) }
}

/** @param {{bytes: Bytes}[]} files */
export async function closeAll(files) {
  for (const { bytes } of files) await bytes.close()
}

/**
 * The index by itself (elsa-1.0.md §10.1).
 * @param {Bytes} bytes
 * @returns {Promise<{weightMap: Map<string, string>, names: string[], metadata: Map<string, any>}>}
 */
async function readIndex(bytes) {
  const text = await bytes.take(LIMIT + 1)
  await bytes.close()
  within(CODE, 'size of the index', text.length, 0, LIMIT)
  const { weight_map: weightMap, metadata } = readFields(parseJson(text, 'index'), CODE, {
    weight_map: ['a non-empty object', map => map instanceof Map && map.size > 0],
    metadata: optional(OBJECT, new Map()),
  })
  const names = [...new Set(mapOf(weightMap, CODE, TEXT, 'weight_map: ').values())].sort(compareText)
  for (const name of names) {
    if (/^\.{0,2}$|[/\\\0]/.test(name)) fail('UnsafePath', say`the name ${name} is a path, expected one beside the index`)
  }
  return { weightMap, names, metadata }
}

/**
 * The map of the index against what the shards hold (ELSA-R-074).
 * @param {{weightMap: Map<string, string>}} index
 * @param {Opened[]} shards
 */
function checkMap({ weightMap }, shards) {
  let count = 0
  for (const { name, header } of shards) {
    for (const tensor of header.tensors.keys()) {
      count++
      expect(CODE, say`shard of ${tensor}`, weightMap.get(tensor), name)
    }
  }
  expect(CODE, 'size of weight_map', weightMap.size, count)
}

/**
 * The size that an index states against that of its shards.
 * @param {Map<string, any>} metadata of the index
 * @param {{header: Header}[]} shards
 */
export function checkTotal(metadata, shards) {
  const total = shards.reduce((sum, { header }) => sum + header.size, 0)
  readFields(metadata, CODE, { total_size: optional(integer(total, total)) })
}
