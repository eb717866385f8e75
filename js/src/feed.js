import { ElsaError, fail } from './errors.js'
import { Bytes, chunks, openBytes, request } from './source.js'

/** @import { Source } from './source.js' */

/**
 * @typedef {object} FeedOptions
 * @property {Blob} [have] the first bytes of the file, if the device has them already
 * @property {string | null} [etag] the version of the file that `have` is of
 * @property {(bytes: Uint8Array, position: number) => unknown} [save] gets what arrives beyond `have`, in order
 */

const TRIES = 3

/** The bytes of a file from any place on, where the source allows; of a stream, front to back. */
export class Feed {
  /**
   * @param {Source} source
   * @param {FeedOptions} options
   */
  constructor(source, { have, etag, save }) {
    this.source = source
    this.have = have
    this.save = save
    /** The version of the file on the server. */
    this.etag = etag || null
    /** Of the whole file, where it is known. @type {number | undefined} */
    this.size = source instanceof ArrayBuffer || ArrayBuffer.isView(source) ? source.byteLength
      : typeof Blob !== 'undefined' && source instanceof Blob ? source.size : undefined
    this.bytes = new Bytes([].values())
    this.limit = 0
    this.lost = false
    /** An answer that is final. @type {ElsaError | undefined} */
    this.refused = undefined
  }

  /**
   * Have the bytes ahead up to a place in the file.
   * @param {number} end
   * @param {AbortSignal} [signal]
   * @param {(loaded: number) => void} [onProgress]
   * @returns {Promise<Bytes>}
   */
  async reach(end, signal, onProgress) {
    const { at, rest } = this.bytes
    if (this.lost) fail('Incomplete', 'the stream broke off; open the file again')
    if (this.limit < end && at + rest.length < end) {
      await this.bytes.close()
      const begin = at + rest.length
      this.bytes = new Bytes(this.read(begin, end, signal))
      Object.assign(this.bytes, { at, rest })
      this.limit = this.rereadable() ? end : Infinity
    }
    Object.assign(this.bytes, { signal, onProgress })
    return this.bytes
  }

  rereadable() {
    return typeof this.source === 'string' || this.source instanceof URL || this.size !== undefined
  }

  /**
   * Read on from an earlier place. A stream cannot, and is of no more use.
   * @param {number} at
   */
  async back(at) {
    await this.close()
    this.bytes = new Bytes([].values())
    this.bytes.at = at
    this.lost = !this.rereadable()
  }

  async close() {
    this.limit = 0
    await this.bytes.close()
  }

  /**
   * @param {number} begin
   * @param {number} end
   * @param {AbortSignal} [signal]
   * @returns {AsyncGenerator<Uint8Array>}
   */
  async* read(begin, end, signal) {
    const { source, have, size } = this
    if (have && begin < have.size) {
      yield* chunks(have.slice(begin, end).stream())
      begin = have.size
    }
    if (begin >= end) return
    if (typeof source === 'string' || source instanceof URL) yield* this.kept(begin, this.request(source, begin, end, signal))
    else if (source instanceof ArrayBuffer) yield new Uint8Array(source).subarray(begin, end)
    else if (ArrayBuffer.isView(source)) yield new Uint8Array(source.buffer, source.byteOffset, source.byteLength).subarray(begin, end)
    else if (size !== undefined) yield* chunks(/** @type {Blob} */ (source).slice(begin, end).stream())
    else {
      const bytes = await openBytes(source)
      // A stream cannot start anywhere else; what is there already is passed over.
      yield* this.kept(begin, skip(bytes, begin))
    }
  }

  /** @param {number} at @param {AsyncIterable<Uint8Array>} pieces */
  async* kept(at, pieces) {
    for await (const piece of pieces) {
      await this.save?.(piece, at)
      at += piece.length
      yield piece
    }
  }

  /**
   * A range of a file on a server; asked for again from where it broke.
   * @param {string | URL} url
   * @param {number} begin
   * @param {number} end
   * @param {AbortSignal} [signal]
   * @returns {AsyncGenerator<Uint8Array>}
   */
  async* request(url, begin, end, signal) {
    for (let tries = TRIES; begin < end;) {
      const before = begin
      /** @type {unknown} */
      let broken
      try {
        /** @type {Record<string, string>} */
        const headers = { Range: `bytes=${begin}-${end - 1}` }
        if (this.etag && !this.etag.startsWith('W/')) headers['If-Range'] = this.etag
        const response = await request(url, { signal, headers })
        if (response.status === 416) return // the file ends before
        let ahead = this.check(response, begin)
        for await (let piece of chunks(response.body)) {
          const passed = Math.min(ahead, piece.length)
          ahead -= passed
          piece = piece.subarray(passed, passed + end - begin)
          begin += piece.length
          if (piece.length) yield piece
          if (begin >= end) return
        }
        if (this.size !== undefined && begin >= this.size) return
      } catch (error) {
        signal?.throwIfAborted()
        if (error === this.refused) throw error
        broken = error
      }
      tries = begin > before ? TRIES : tries - 1
      if (!tries && !broken) return
      if (!tries) fail('RemoteError', `broke off at byte ${begin}: ${/** @type {any} */ (broken).message}`)
    }
  }

  /**
   * @param {Response} response
   * @param {number} begin
   * @returns {number} bytes to pass over
   */
  check(response, begin) {
    /** @param {string} text @returns {never} */
    const refuse = text => {
      // To ask again would not help.
      throw this.refused = new ElsaError('RemoteError', text)
    }
    if (!response.ok) refuse(`the server answered ${response.status} ${response.statusText}`)
    const etag = response.headers.get('etag')
    if (this.etag && etag && etag.replace('W/', '') !== this.etag.replace('W/', '')) refuse('the file on the server has changed')
    this.etag ??= etag
    if (response.status !== 206) {
      const length = response.headers.get('content-length')
      if (length && !response.headers.get('content-encoding')) this.size = Number(length)
      return begin
    }
    const found = /^bytes (\d+)-\d+\/(\d+)?/.exec(response.headers.get('content-range') ?? '')
    // Across origins the header may be hidden.
    if (found && Number(found[1]) !== begin) refuse(`the server sent byte ${found[1]} and on, expected ${begin}`)
    if (found?.[2]) this.size = Number(found[2])
    return 0
  }
}

/** @param {Bytes} bytes @param {number} count @returns {AsyncGenerator<Uint8Array>} */
async function* skip(bytes, count) {
  try {
    while (await bytes.more()) {
      const passed = Math.min(count, bytes.rest.length)
      count -= passed
      const piece = bytes.rest.subarray(passed)
      bytes.rest = new Uint8Array(0)
      if (piece.length) yield piece
    }
  } finally {
    await bytes.close()
  }
}
