import { asPart, openDeliveryFile } from './delivery_file.js'
import { about, fail } from './errors.js'
import { closeAll, openFiles } from './files.js'
import { describe, makeImage, onlyOne } from './load.js'
import { joinParts } from './network.js'
import { chooseLevel } from './profile.js'

/** @import { Tensor } from './data.js' */
/** @import { DeliveryFile } from './delivery_file.js' */
/** @import { Files } from './files.js' */
/** @import { Network } from './network.js' */
/** @import { LevelChoice, Profile } from './profile.js' */
/** @import { BytesOptions, Source } from './source.js' */

/**
 * @typedef {object} DeliveryOptions
 * @property {AbortSignal} [signal]
 * @property {(loaded: number, total: number) => void} [onProgress] bytes of the file that are there, and that the level needs
 */

/** @typedef {BytesOptions & {files?: Files}} OpenOptions */

/** @typedef {{level: number | 'dense', tensors: Map<string, Tensor>}} Delivered */

/** A network that arrives level by level (delivery-1.0.md): open it with `openDelivery`. */
export class Delivery {
  /** @param {Network<DeliveryFile>} network */
  constructor({ profile, metadata, parts }) {
    this.files = parts
    this.profile = profile
    this.metadata = metadata
    /** The call before is done. @type {Promise<unknown>} */
    this.turn = Promise.resolve()
  }

  /** How many bytes of the file, or of all shards, a level needs, counted from the first. @param {LevelChoice} choice */
  bytes(choice) {
    const part = partOf(this.profile, choice)
    return this.files.reduce((sum, { ends }) => sum + ends[part], 0)
  }

  /** What every network of the file consists of: dtype, shape and bytes of each tensor, as `inspect` gives them. */
  get tensors() {
    return describe(this.files)
  }

  /** The version of the file on the server, to be given to `openDelivery` with the bytes that were saved. */
  get etag() {
    return this.files[0].bytes.etag
  }

  /**
   * The tensors of a level, of which only what is missing is read. Arrays of earlier calls stay as they are, unless
   * `final` is set: then the arrays are handed over without a copy, and no other level can be loaded.
   * @param {LevelChoice} choice
   * @param {DeliveryOptions & {final?: boolean}} [options]
   * @returns {Promise<Delivered>}
   */
  load(choice, options = {}) {
    return this.arrive(choice, options, ({ profile, parts }) => {
      const level = chooseLevel(profile, choice)
      if (options.final) this.files = []
      return { level, tensors: new Map(parts.flatMap(({ tensors }) => tensors(level, options.final))) }
    })
  }

  /**
   * One level after the other, each as soon as it is there: 1, 2, … and the dense network.
   * @param {DeliveryOptions & {to?: LevelChoice}} [options] `to`: the last one
   * @returns {AsyncGenerator<Delivered>}
   */
  async* levels({ to = 'dense', ...options } = {}) {
    const last = partOf(this.profile, to)
    for (let part = 1; part <= last; part++) yield this.load(part > this.profile.levels.length ? 'dense' : part, options)
  }

  /**
   * A level laid out like the ELSA file, as `loadImage` gives it.
   * @param {LevelChoice} choice
   * @param {DeliveryOptions} [options]
   * @returns {Promise<Uint8Array<ArrayBuffer>>}
   */
  image(choice, options) {
    return this.arrive(choice, options, network => makeImage(network, { level: choice, verify: false }))
  }

  /** The ELSA file that was made into this, byte for byte. @param {DeliveryOptions} [options] @returns {AsyncGenerator<Uint8Array>} */
  async* source(options) {
    const { source } = await this.arrive('dense', options, ({ parts }) => onlyOne(parts))
    for (const piece of source()) yield piece.slice()
  }

  /** Let go of connections that are open. */
  async close() {
    await closeAll(this.files)
  }

  /**
   * Have all that a level needs, and use what is there, to be read as an ELSA file. Calls wait for each other: files have one
   * state.
   * @template T
   * @param {LevelChoice} choice
   * @param {DeliveryOptions | undefined} options
   * @param {(network: Network<ReturnType<typeof asPart>>) => T | Promise<T>} use
   * @returns {Promise<T>}
   */
  arrive(choice, options, use) {
    const done = this.turn.then(async () => use(await this.decode(choice, options)))
    this.turn = done.catch(() => {})
    return done
  }

  /** @param {LevelChoice} choice @param {DeliveryOptions} [options] */
  async decode(choice, { signal, onProgress } = {}) {
    const { profile, metadata, files } = this
    const part = partOf(profile, choice)
    if (!files.length) fail('InvalidOption', 'the arrays were handed over, expected no other call')
    const total = this.bytes(choice)
    let before = 0
    for (const file of files) {
      const done = before
      await about(file.name, async () => {
        await file.decode(part, { signal, onProgress: loaded => onProgress?.(Math.min(done + loaded, total), total) })
        file.checkCounts(part)
      })
      before += file.ends[part]
    }
    return { profile, metadata, parts: files.map(asPart) }
  }
}

/** The number of the part that completes a level. @param {Profile} profile @param {LevelChoice} choice */
export function partOf(profile, choice) {
  const level = chooseLevel(profile, choice)
  return level === 'dense' ? profile.levels.length + 1 : level
}

/**
 * Open a delivery file, the first bytes of one, or the index of one in shards.
 * @param {Source} source
 * @param {OpenOptions} [options]
 * @returns {Promise<Delivery>}
 */
export async function openDelivery(source, options = {}) {
  return new Delivery(await openFiles(source, options, openDeliveryFile, joinParts))
}
