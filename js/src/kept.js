import { openPlace } from './local.js'
import { isLocal } from './source.js'
import { writeChecksum, xxh3 } from './xxh3.js'

/**
 * Where bytes are kept: a folder of small files.
 * @typedef {object} Place
 * @property {() => Promise<string[]>} names
 * @property {(name: string) => Promise<Blob>} read
 * @property {(name: string, data: Blob) => Promise<unknown>} write
 * @property {() => Promise<unknown>} clear
 */

/** The first bytes of a file on a server, kept on the device. @typedef {Awaited<ReturnType<typeof keep>>} Kept */

/** Bytes of a piece. What is written of a file in OPFS counts when it is closed, so a visit that ends early loses a piece at most. */
const PIECE = 1 << 20
const ETAG = 'etag'

/**
 * What earlier visits left of a file, and a way to add to it: in the origin private file system, or in a folder of files. The
 * server is asked which version it has; what is of another is dropped.
 * @param {string | URL} url
 * @param {{cache?: boolean | string, signal?: AbortSignal}} options `cache`: false for none, or a folder of this machine
 */
export async function keep(url, { cache = true, signal }) {
  const place = cache && !isLocal(url) ? await open(`${url}`, cache).catch(() => undefined) : undefined
  let blob = new Blob([])
  /** @type {Blob[]} */
  let pending = []
  /** @type {string | null} */
  let etag = null
  let end = 0
  let usable = Boolean(place)

  /** @param {(place: Place) => Promise<unknown>} action what may fail: the device is full, or lets nobody write */
  const attempt = async action => {
    try {
      if (place && usable) await action(place)
    } catch {
      usable = false
    }
  }

  async function forget() {
    blob = new Blob([])
    pending = []
    end = 0
    await attempt(place => place.clear())
  }

  async function flush() {
    if (!pending.length) return
    const data = new Blob(pending)
    const at = end - data.size
    pending = []
    await attempt(async place => {
      if (!at && etag) await place.write(ETAG, new Blob([etag]))
      await place.write(`${at}`, data)
      blob = new Blob([blob, await place.read(`${at}`)])
    })
    end = blob.size
  }

  /** @param {Uint8Array} bytes @param {number} position */
  async function save(bytes, position) {
    if (!usable || position !== end) return
    pending.push(new Blob([/** @type {BlobPart} */ (bytes)]))
    end += bytes.length
    if (end - blob.size >= PIECE) await flush()
  }

  await attempt(async place => {
    const known = await place.names()
    const before = known.includes(ETAG) ? await (await place.read(ETAG)).text() : null
    etag = await versionOf(url, before, signal)
    if (!etag || etag.replace('W/', '') !== before?.replace('W/', '')) {
      await forget()
      usable &&= Boolean(etag)
      return
    }
    for (const at of known.map(Number).filter(at => at >= 0).sort((a, b) => a - b)) {
      // Two pages may have cut the same bytes differently.
      if (at <= blob.size) blob = new Blob([blob, (await place.read(`${at}`)).slice(blob.size - at)])
    }
    end = blob.size
  })
  signal?.throwIfAborted()
  /** A Blob that grows: what was saved needs no second request. @type {any} */
  const have = { get size() { return blob.size }, slice: (/** @type {number} */ from, /** @type {number} */ to) => blob.slice(from, to) }
  return { have: /** @type {Blob} */ (have), etag, save, flush, forget }
}

/**
 * The version that a server has; the one before if it cannot be reached, so that what is kept serves without a network.
 * @param {string | URL} url
 * @param {string | null} before
 * @param {AbortSignal} [signal]
 */
async function versionOf(url, before, signal) {
  try {
    const response = await fetch(url, { method: 'HEAD', cache: 'no-store', signal })
    return response.ok ? response.headers.get('etag') : null
  } catch {
    return before
  }
}

/** @param {string} url @param {true | string} cache @returns {Promise<Place>} */
async function open(url, cache) {
  const name = writeChecksum(xxh3(new TextEncoder().encode(url))).slice(5)
  const { storage } = globalThis.navigator ?? {}
  if (!storage?.getDirectory) return openPlace(name, cache)
  const root = await (await storage.getDirectory()).getDirectoryHandle('elsa', { create: true })
  const folder = await root.getDirectoryHandle(name, { create: true })
  const names = async () => {
    const found = []
    for await (const name of /** @type {any} */ (folder).keys()) found.push(name)
    return found
  }
  return {
    names,
    read: async name => (await folder.getFileHandle(name)).getFile(),
    async write(name, data) {
      const out = await (await folder.getFileHandle(name, { create: true })).createWritable()
      await out.write(data)
      await out.close()
    },
    async clear() {
      for (const name of await names()) await folder.removeEntry(name)
    },
  }
}
