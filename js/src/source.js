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

/**
 * What to call a source in messages.
 * @param {Source} source
 * @returns {string}
 */
export function nameOf(source) {
  if (typeof source === 'string' || source instanceof URL) return String(source).replace(/[?#].*/s, '')
  const name = /** @type {any} */ (source)?.name ?? /** @type {any} */ (source)?.url
  return typeof name === 'string' ? name : ''
}

/**
 * Whether a source is the index of shards rather than a file.
 * @param {Source} source
 * @param {{files?: Files}} options
 */
export function isIndex(source, options) {
  return Boolean(options.files) || (typeof source === 'string' || source instanceof URL) && nameOf(source).endsWith('.index.json')
}

/** Bytes front to back, however many the source gives at a time. */
export class Bytes {
  /**
   * @param {AsyncIterator<Uint8Array> | Iterator<Uint8Array>} iterator
   * @param {number} [size] of all bytes, where it is known
   * @param {{signal?: AbortSignal, onProgress?: (loaded: number, total?: number) => void}} [options]
   */
  constructor(iterator, size, { signal, onProgress } = {}) {
    this.iterator = iterator
    this.size = size
    this.signal = signal
    this.onProgress = onProgress
    /** How many bytes were taken. */
    this.at = 0
    /** What was read and not yet taken. */
    this.rest = /** @type {Uint8Array} */ (new Uint8Array(0))
  }

  /** How many bytes there are still, where it is known. */
  left() {
    return this.size === undefined ? undefined : this.size - this.at
  }

  /** Have at least one byte, unless the source has ended. @returns {Promise<boolean>} */
  async more() {
    while (!this.rest.length) {
      this.signal?.throwIfAborted()
      const { done, value } = await this.iterator.next()
      if (done) return false
      if (!(value instanceof Uint8Array)) throw TypeError(`a source gave ${typeof value}, expected Uint8Array`)
      this.rest = value
      this.onProgress?.(this.at + value.length, this.size)
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
      const piece = this.rest.length > target.length - filled ? this.rest.subarray(0, target.length - filled) : this.rest
      target.set(piece, filled)
      filled += piece.length
      this.rest = this.rest.subarray(piece.length)
    }
    this.at += filled
    return filled
  }

  /**
   * So many bytes, or fewer at the end. Memory is taken as they arrive, not as they were promised.
   * @param {number} count
   * @returns {Promise<Uint8Array>}
   */
  async take(count) {
    const pieces = []
    let size = 0
    while (size < count) {
      const piece = new Uint8Array(Math.min(count - size, Math.max(1 << 16, size)))
      const filled = await this.fill(piece)
      pieces.push(piece.subarray(0, filled))
      size += filled
      if (filled < piece.length) break
    }
    return pieces.length === 1 ? pieces[0] : join(pieces, size)
  }

  /** Tell the source that no more is wanted. */
  async close() {
    await this.iterator.return?.()
  }
}

/**
 * @param {Uint8Array[]} pieces
 * @param {number} size
 * @returns {Uint8Array}
 */
export function join(pieces, size) {
  const result = new Uint8Array(size)
  let at = 0
  for (const piece of pieces) {
    result.set(piece, at)
    at += piece.length
  }
  return result
}

/**
 * @param {Source} source
 * @param {{signal?: AbortSignal, onProgress?: (loaded: number, total?: number) => void}} [options]
 * @returns {Promise<Bytes>}
 */
export async function openBytes(source, options = {}) {
  options.signal?.throwIfAborted()
  if (typeof source === 'string' || source instanceof URL) source = await request(source, { signal: options.signal })
  if (typeof Response !== 'undefined' && source instanceof Response) {
    if (!source.ok) fail('RemoteError', `the server answered ${source.status} ${source.statusText}`)
    // With a Content-Encoding the length is that of other bytes.
    const length = source.headers.get('content-encoding') ? null : source.headers.get('content-length')
    const total = length === null ? undefined : Number(length)
    const { onProgress } = options
    return new Bytes(chunks(source.body), undefined, { ...options, onProgress: onProgress && (n => onProgress(n, total)) })
  }
  if (source instanceof ArrayBuffer) return new Bytes([new Uint8Array(source)].values(), source.byteLength, options)
  if (ArrayBuffer.isView(source)) {
    const bytes = new Uint8Array(source.buffer, source.byteOffset, source.byteLength)
    return new Bytes([bytes].values(), bytes.length, options)
  }
  if (typeof Blob !== 'undefined' && source instanceof Blob) return new Bytes(chunks(source.stream()), source.size, options)
  if ('getReader' in source) return new Bytes(chunks(source), undefined, options)
  if (Symbol.asyncIterator in source) return new Bytes(source[Symbol.asyncIterator](), undefined, options)
  return new Bytes(/** @type {Iterable<Uint8Array>} */ (source)[Symbol.iterator](), undefined, options)
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
    if (init.signal?.aborted) throw init.signal.reason
    const { message, cause } = /** @type {any} */ (error)
    fail('RemoteError', `no answer: ${cause?.message ?? message}`)
  }
}

/**
 * A stream, by its reader: not all browsers can iterate over one.
 * @param {ReadableStream<Uint8Array> | null} stream
 * @returns {AsyncGenerator<Uint8Array>}
 */
export async function* chunks(stream) {
  const reader = stream?.getReader()
  try {
    for (let step; reader && !(step = await reader.read()).done;) yield step.value
  } finally {
    // Also where the stream has failed: then there is nothing to cancel.
    await reader?.cancel().catch(() => {})
  }
}
