import { ElsaError, expect, fail, say } from './errors.js'

/** @import { ErrorCode } from './errors.js' */

/**
 * Where bytes come from. A string is a URL or, in Node.js, Deno and Bun, the path of a file.
 * @typedef {string | URL | Response | Blob | ArrayBuffer | ArrayBufferView | ReadableStream<Uint8Array>
 *   | AsyncIterable<Uint8Array> | Iterable<Uint8Array>} Source
 */

/**
 * @typedef {object} BytesOptions
 * @property {AbortSignal} [signal]
 * @property {(loaded: number, total?: number) => void} [onProgress]
 * @property {Blob} [have] the first bytes of the file, if the device has them already
 * @property {string | null} [etag] the version of the file that `have` is of
 * @property {(bytes: Uint8Array, position: number) => unknown} [save] gets what arrives beyond `have`, in order
 */

const CODE = 'RemoteError'
const TRIES = 3
const NONE = /** @type {Uint8Array} */ (new Uint8Array(0))

/** @param {unknown} source @returns {source is string | URL} */
export const isUrl = source => typeof source === 'string' || source instanceof URL

/**
 * Whether a source is a file of this machine. In a page, what has no scheme is a URL beside it.
 * @param {unknown} source
 * @returns {source is string | URL}
 */
export const isLocal = source => isUrl(source) && (/^file:/i.test(`${source}`) || !globalThis.location && !/^[a-z][a-z\d+.-]+:/i.test(`${source}`))

/** A Blob, or a file that is read like one. @param {any} source */
const isBlob = source => typeof source.stream === 'function'

/** Bytes front to back, however many the source gives at a time; from any place on, where the source allows. */
export class Bytes {
  /**
   * @param {Source} source
   * @param {BytesOptions} [options]
   */
  constructor(source, options = {}) {
    this.source = source
    this.options = options
    /** The version of the file on the server. */
    this.etag = options.etag || null
    /** Of the whole file, where it is known. @type {number | undefined} */
    this.size = isBlob(source) ? /** @type {Blob} */ (source).size : /** @type {any} */ (source).byteLength
    this.seekable = isUrl(source) || this.size !== undefined
    /** Up to where bytes are asked for; of a stream all come. */
    this.limit = Infinity
    /** How many bytes were taken. */
    this.at = 0
    /** What was read and not yet taken. */
    this.rest = NONE
    /** @type {AsyncIterator<Uint8Array> | undefined} */
    this.pieces = undefined
  }

  /** Have at least one byte, unless the source has ended. @returns {Promise<boolean>} */
  async more() {
    const { signal, onProgress } = this.options
    while (!this.rest.length) {
      signal?.throwIfAborted()
      this.pieces ??= this.open(this.at)
      const { done, value } = await this.pieces.next()
      if (done) return false
      this.rest = value
      onProgress?.(this.at + value.length, this.size ?? this.total)
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
      const piece = this.next(target.length - filled)
      target.set(piece, filled)
      filled += piece.length
    }
    return filled
  }

  /**
   * So many bytes, or fewer at the end. Memory is taken as they arrive, not as they were promised.
   * @param {number} count
   * @returns {Promise<Uint8Array>}
   */
  async take(count) {
    const pieces = []
    for (let piece; count && await this.more(); count -= piece.length) pieces.push((piece = this.next(count)).slice())
    return new Uint8Array(await new Blob(pieces).arrayBuffer())
  }

  /**
   * So many bytes, all of them.
   * @param {number} count
   * @param {ErrorCode} code if there are fewer
   * @param {string} what they are
   * @returns {Promise<Uint8Array>}
   */
  async all(count, code, what) {
    const found = await this.take(count)
    expect(code, `size of the ${what}`, found.length, count)
    return found
  }

  /** Of what was read, so many bytes at most. @param {number} most */
  next(most) {
    const piece = this.rest.subarray(0, most)
    this.rest = this.rest.subarray(piece.length)
    this.at += piece.length
    return piece
  }

  /** Ask for bytes up to a place, if less was asked for. @param {number} end */
  async reach(end) {
    if (end <= this.limit) return
    await this.close()
    this.limit = end
  }

  /** Read on from an earlier place. A stream cannot, and is of no more use. @param {number} at */
  async back(at) {
    await this.close()
    this.at = at
    this.rest = NONE
    if (!this.seekable) this.open = () => fail('Incomplete', 'the stream broke off, expected no other call')
  }

  /** Let go of what is open; what can be opened again is, should more be wanted. */
  async close() {
    const { pieces } = this
    this.pieces = undefined
    await pieces?.return?.()
  }

  /** @param {number} begin @returns {AsyncGenerator<Uint8Array>} */
  async* open(begin) {
    const { limit, options: { have, save } } = this
    if (have && begin < have.size) {
      yield* chunks(have.slice(begin, limit).stream())
      begin = have.size
    }
    if (begin >= limit) return
    /** @type {any} */
    const { source } = this
    const blob = isBlob(source) && source.slice(begin).stream()
    const view = source.byteLength >= 0 && [new Uint8Array(source.buffer ?? source, source.byteOffset, source.byteLength)]
    const pieces = isUrl(source) || source instanceof Response ? this.request(source, begin)
      : cut(blob || view || source, blob ? 0 : begin, limit - begin)
    for await (const piece of pieces) {
      await save?.(piece, begin)
      begin += piece.length
      yield piece
    }
  }

  /**
   * A file on a server from a byte on, which is asked for again from where it broke.
   * @param {string | URL | Response} source
   * @param {number} begin
   * @returns {AsyncGenerator<Uint8Array>}
   */
  async* request(source, begin) {
    const { limit, options: { signal } } = this
    for (let tries = TRIES; begin < limit;) {
      const before = begin
      /** @type {any} */
      let broken
      try {
        /** @type {Record<string, string>} */
        const headers = {}
        if (begin || limit < Infinity) headers.Range = `bytes=${begin}-${limit < Infinity ? limit - 1 : ''}`
        if (this.etag && !this.etag.startsWith('W/')) headers['If-Range'] = this.etag
        const response = isUrl(source) ? await fetch(source, { signal, headers }) : source
        if (response.status === 416) return // the file ends before
        const partial = this.check(response, begin)
        for await (const piece of cut(response.body ?? [], partial ? 0 : begin, limit - begin)) {
          begin += piece.length
          yield piece
        }
        if (!partial || begin >= (this.size ?? Infinity)) return
      } catch (error) {
        signal?.throwIfAborted()
        if (error instanceof ElsaError || !isUrl(source)) throw error
        broken = error
      }
      tries = begin > before ? TRIES : tries - 1
      if (!tries && !broken) return
      if (!tries) fail(CODE, `broke off at byte ${begin}: ${broken.cause?.message ?? broken.message}`)
    }
  }

  /**
   * Whether an answer is a part of the file, from the byte on that was asked for.
   * @param {Response} response
   * @param {number} begin
   * @returns {boolean}
   */
  check({ headers, ok, status }, begin) {
    if (!ok) fail(CODE, `the server answered ${status}, expected the file`, status)
    const etag = headers.get('etag')
    if (this.etag && etag && etag.replace('W/', '') !== this.etag.replace('W/', '')) fail(CODE, 'the file on the server has changed, expected the same')
    this.etag ??= etag
    const partial = status === 206
    // Across origins the header may be hidden.
    const [, first = begin, size] = /^bytes (\d+)-\d+\/(\d+)/.exec(headers.get('content-range') ?? '') ?? []
    if (partial) expect(CODE, 'first byte of the answer', Number(first), begin)
    if (partial && size) this.size = Number(size)
    // For progress alone: an answer may have other bytes than its headers say, with a Content-Encoding it has.
    if (!partial && !headers.get('content-encoding')) this.total = Number(headers.get('content-length')) || undefined
    return partial
  }
}

/**
 * A stream, by its reader: not all browsers can iterate over one.
 * @param {ReadableStream<Uint8Array>} stream
 * @returns {AsyncGenerator<Uint8Array>}
 */
async function* chunks(stream) {
  const reader = stream.getReader()
  try {
    for (let step; !(step = await reader.read()).done;) yield step.value
  } finally {
    // Also where the stream has failed: then there is nothing to cancel.
    await reader.cancel().catch(() => {})
  }
}

/**
 * So many bytes, behind others that are passed over.
 * @param {any} pieces
 * @param {number} ahead
 * @param {number} count
 * @returns {AsyncGenerator<Uint8Array>}
 */
async function* cut(pieces, ahead, count) {
  for await (const piece of pieces.getReader ? chunks(pieces) : pieces) {
    // Not instanceof: it may come from another window.
    if (piece?.BYTES_PER_ELEMENT !== 1) fail('InvalidOption', say`the source gave ${piece}, expected a Uint8Array`)
    const passed = Math.min(ahead, piece.length)
    const wanted = piece.subarray(passed, passed + count)
    ahead -= passed
    count -= wanted.length
    if (wanted.length) yield wanted
    if (!count) return
  }
}
