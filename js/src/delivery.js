import { asPart, openDeliveryFile } from './delivery_file.js'
import { about, fail } from './errors.js'
import { closeAll, openFiles } from './files.js'
import { describe, makeImage, onlyOne, wantedNames } from './load.js'
import { joinParts } from './network.js'
import { chooseLevel } from './profile.js'
import { report } from './words.js'

/** @import { Tensor } from './data.js' */
/** @import { DeliveryFile } from './delivery_file.js' */
/** @import { Files } from './files.js' */
/** @import { Network } from './network.js' */
/** @import { LevelChoice, Profile } from './profile.js' */
/** @import { BytesOptions, Source } from './source.js' */
/** @import { Findings } from './words.js' */

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
    const { source } = await this.arrive('dense', options, ({ parts }) => onlyOne(parts), true)
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
   * @param {boolean} [all] whether tensors are used that the level does not have
   * @returns {Promise<T>}
   */
  arrive(choice, options, use, all) {
    const done = this.turn.then(async () => use(await this.decode(choice, options, all)))
    this.turn = done.catch(() => {})
    return done
  }

  /**
   * Decode a level in the order of ELSA-D-044, each line for all files.
   * @param {LevelChoice} choice
   * @param {DeliveryOptions} [options]
   * @param {boolean} [all]
   */
  async decode(choice, { signal, onProgress } = {}, all) {
    const { profile, metadata, files } = this
    const level = chooseLevel(profile, choice)
    const part = partOf(profile, level)
    if (!files.length) fail('InvalidOption', 'the arrays were handed over, expected no other call')
    /** @param {(file: DeliveryFile) => unknown} action */
    const each = async action => {
      for (const file of files) await about(file.name, async () => action(file))
    }
    const total = this.bytes(level)
    let before = 0
    /** @type {Findings} */
    const findings = []
    await each(({ need }) => need(part))
    await each(async ({ decode, ends }) => {
      await decode(part, { signal, onProgress: loaded => onProgress?.(Math.min(before + loaded, total), total) })
      before += ends[part]
    })
    await each(({ check, header, profile }) => check(all ? header.tensors.keys() : wantedNames(header, profile, level).keys(), part, findings))
    report(findings)
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
