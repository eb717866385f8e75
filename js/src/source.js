import { fail } from './errors.js'

/**
 * Where bytes come from. A string is a URL.
 * @typedef {string | URL | Response | Blob | ArrayBuffer | ArrayBufferView | ReadableStream<Uint8Array>
 *   | AsyncIterable<Uint8Array> | Iterable<Uint8Array>} Source
 */

/**
 * The file of a name that stands beside the index; nothing if there is none. It is asked for more than once.
 * @typedef {(name: string) => Source | undefined | Promise<Source | undefined>} Files
 */

/** @typedef {{signal?: AbortSignal, onProgress?: (loaded: number, total?: number) => void}} BytesOptions */

/** @param {Source} source @returns {source is string | URL} */
export const isUrl = source => typeof source === 'string' || source instanceof URL

/**
 * What to call a source in messages.
 * @param {any} source
 * @returns {string}
 */
export function nameOf(source) {
  if (isUrl(source)) return String(source).replace(/[?#].*/s, '')
  const name = source?.name ?? source?.url
  return typeof name === 'string' ? name : ''
}

/**
 * Whether a source is the index of shards rather than a file.
 * @param {Source} source
 * @param {{files?: Files}} options
 */
export function isIndex(source, { files }) {
  return Boolean(files) || isUrl(source) && /\.index(\.[^./\\]+)*\.json$/.test(nameOf(source))
}

/** Bytes front to back, however many the source gives at a time. */
export class Bytes {
  /**
   * @param {AsyncIterator<Uint8Array> | Iterator<Uint8Array>} iterator
   * @param {number} [size] of all bytes, where it is known
   * @param {BytesOptions} [options]
   */
  constructor(iterator, size, options = {}) {
    this.iterator = iterator
    this.size = size
    this.options = options
    /** How many bytes were taken. */
    this.at = 0
    /** What was read and not yet taken. */
    this.rest = /** @type {Uint8Array} */ (new Uint8Array(0))
  }

  /** Have at least one byte, unless the source has ended. @returns {Promise<boolean>} */
  async more() {
    const { signal, onProgress } = this.options
    while (!this.rest.length) {
      signal?.throwIfAborted()
      const { done, value } = await this.iterator.next()
      if (done) return false
      if (!(value instanceof Uint8Array)) throw TypeError(`a source gave ${typeof value}, expected Uint8Array`)
      this.rest = value
      onProgress?.(this.at + value.length, this.size)
    }
    return true
  }

  /**
   * Fill a piece of memory; gives how much of it, which is less only at the end.
   * @param {Uint8Array} target
   * @returns {Promise<number>}
   */
  async fill(target) {
    let filled = 0
    while (filled < target.length && (this.rest.length || await this.more())) {
      const piece = this.rest.subarray(0, target.length - filled)
      target.set(piece, filled)
      filled += piece.length
      this.at += piece.length
      this.rest = this.rest.subarray(piece.length)
    }
    return filled
  }

  /**
   * So many bytes, or fewer at the end. Memory is taken as they arrive, not as they were promised.
   * @param {number} count
   * @returns {Promise<Uint8Array>}
   */
  async take(count) {
    let bytes = new Uint8Array(Math.min(count, 1 << 16))
    for (let size = 0; ;) {
      size += await this.fill(bytes.subarray(size))
      if (size < bytes.length || size === count) return bytes.subarray(0, size)
      const longer = new Uint8Array(Math.min(count, 2 * size))
      longer.set(bytes)
      bytes = longer
    }
  }

  /** Tell the source that no more is wanted. */
  async close() {
    await this.iterator.return?.()
  }
}

/**
 * @param {Source} source
 * @param {BytesOptions} [options]
 * @returns {Promise<Bytes>}
 */
export async function openBytes(source, options = {}) {
  const { signal, onProgress } = options
  signal?.throwIfAborted()
  /** @type {any} */
  let pieces = isUrl(source) ? await request(source, { signal }) : source
  let size
  if (pieces instanceof Response) {
    if (!pieces.ok) fail('RemoteError', `the server answered ${pieces.status} ${pieces.statusText}`)
    // Only for progress: where it is wrong, or of other bytes than those that come, the file may still be right.
    const total = sizeOf(pieces)
    options = { signal, onProgress: onProgress && (loaded => onProgress(loaded, total)) }
    pieces = pieces.body ?? []
  } else if (pieces instanceof Blob) {
    size = pieces.size
    pieces = pieces.stream()
  } else if (pieces.byteLength >= 0) {
    size = pieces.byteLength
    pieces = [pieces.buffer ? new Uint8Array(pieces.buffer, pieces.byteOffset, size) : new Uint8Array(pieces)]
  }
  if (pieces.getReader) pieces = chunks(pieces)
  return new Bytes(pieces[Symbol.asyncIterator]?.() ?? pieces[Symbol.iterator](), size, options)
}

/** How many bytes an answer has, where it says so. @param {Response} response */
export function sizeOf({ headers }) {
  // With a Content-Encoding the length is that of other bytes.
  const length = headers.get('content-encoding') ? null : headers.get('content-length')
  return length ? Number(length) : undefined
}

/**
 * @param {string | URL} url
 * @param {RequestInit} init
 * @returns {Promise<Response>}
 */
export async function request(url, init) {
  try {
    return await fetch(url, init)
  } catch (error) {
    init.signal?.throwIfAborted()
    const { message, cause } = /** @type {any} */ (error)
    fail('RemoteError', `no answer: ${cause?.message ?? message}`)
  }
}

/**
 * A stream, by its reader: not all browsers can iterate over one.
 * @param {ReadableStream<Uint8Array>} stream
 * @returns {AsyncGenerator<Uint8Array>}
 */
export async function* chunks(stream) {
  const reader = stream.getReader()
  try {
    for (let step; !(step = await reader.read()).done;) yield step.value
  } finally {
    // Also where the stream has failed: then there is nothing to cancel.
    await reader.cancel().catch(() => {})
  }
}
