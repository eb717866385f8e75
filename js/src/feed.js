import { fail } from './errors.js'
import { Bytes, chunks, isUrl, openBytes, request, sizeOf } from './source.js'

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
    this.size = source instanceof Blob ? source.size : /** @type {any} */ (source).byteLength
    /** Whether bytes can be read again. */
    this.again = isUrl(source) || this.size !== undefined
    this.bytes = new Bytes([].values())
    this.limit = 0
    this.lost = false
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
    const begin = at + rest.length
    if (this.limit < end && begin < end) {
      await this.close()
      this.bytes = Object.assign(new Bytes(this.read(begin, end, signal)), { at, rest })
      this.limit = this.again ? end : Infinity
    }
    this.bytes.options = { signal, onProgress }
    return this.bytes
  }

  /**
   * Read on from an earlier place. A stream cannot, and is of no more use.
   * @param {number} at
   */
  async back(at) {
    await this.close()
    this.bytes = Object.assign(new Bytes([].values()), { at })
    this.lost = !this.again
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
    const { source, have } = this
    if (have && begin < have.size) {
      yield* chunks(have.slice(begin, end).stream())
      begin = have.size
    }
    if (begin >= end) return
    if (source instanceof Blob) return yield* chunks(source.slice(begin, end).stream())
    // A stream cannot start anywhere else; what is there already is passed over.
    const pieces = isUrl(source) ? this.request(source, begin, end, signal) : skip(await openBytes(source), begin)
    for await (const piece of pieces) {
      if (!ArrayBuffer.isView(source) && !(source instanceof ArrayBuffer)) await this.save?.(piece, begin)
      begin += piece.length
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
      /** @type {any} */
      let broken
      /** An answer that is final: to ask again would not help. @type {string | undefined} */
      let refused
      try {
        /** @type {Record<string, string>} */
        const headers = { Range: `bytes=${begin}-${end - 1}` }
        if (this.etag && !this.etag.startsWith('W/')) headers['If-Range'] = this.etag
        const response = await request(url, { signal, headers })
        const { body, status } = response
        if (status === 416) return // the file ends before
        refused = this.check(response, begin)
        let ahead = status === 206 ? 0 : begin
        for await (let piece of refused || !body ? [] : chunks(body)) {
          const passed = Math.min(ahead, piece.length)
          ahead -= passed
          piece = piece.subarray(passed, passed + end - begin)
          begin += piece.length
          if (piece.length) yield piece
          if (begin >= end) return
        }
        if (begin >= (this.size ?? Infinity)) return
      } catch (error) {
        signal?.throwIfAborted()
        broken = error
      }
      if (refused) fail('RemoteError', refused)
      tries = begin > before ? TRIES : tries - 1
      if (!tries && !broken) return
      if (!tries) fail('RemoteError', `broke off at byte ${begin}: ${broken.message}`)
    }
  }

  /**
   * What is wrong with an answer, if anything is.
   * @param {Response} response
   * @param {number} begin
   * @returns {string | undefined}
   */
  check(response, begin) {
    const { headers, ok, status, statusText } = response
    if (!ok) return `the server answered ${status} ${statusText}`
    const etag = headers.get('etag')
    if (this.etag && etag && etag.replace('W/', '') !== this.etag.replace('W/', '')) return 'the file on the server has changed'
    this.etag ??= etag
    // Across origins the header may be hidden.
    const [, first, size] = /^bytes (\d+)-\d+\/(\d+)?/.exec(headers.get('content-range') ?? '') ?? []
    if (status !== 206) this.size = sizeOf(response) ?? this.size
    else if (first && Number(first) !== begin) return `the server sent byte ${first} and on, expected ${begin}`
    else if (size) this.size = Number(size)
  }
}

/** @param {Bytes} bytes @param {number} count @returns {AsyncGenerator<Uint8Array>} */
async function* skip(bytes, count) {
  try {
    while (await bytes.more()) {
      const piece = bytes.rest.subarray(count)
      count = Math.max(0, count - bytes.rest.length)
      bytes.rest = new Uint8Array(0)
      if (piece.length) yield piece
    }
  } finally {
    await bytes.close()
  }
}
