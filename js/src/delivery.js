import { allocate, bytesOf } from './data.js'
import { DeliveryFile } from './delivery_file.js'
import { readDeliveryHead } from './delivery_head.js'
import { ElsaError, about, fail, show } from './errors.js'
import { Feed } from './feed.js'
import { describe } from './load.js'
import { chooseLevel, ownMetadata } from './profile.js'
import { checkMap, joinShards, openAll, readIndex } from './shards.js'
import { isIndex, nameOf } from './source.js'

/** @import { Tensor } from './data.js' */
/** @import { FeedOptions } from './feed.js' */
/** @import { LevelChoice, Profile } from './profile.js' */
/** @import { Files, Source } from './source.js' */

/**
 * @typedef {object} DeliveryOptions
 * @property {AbortSignal} [signal]
 * @property {(loaded: number, total: number) => void} [onProgress] bytes of the file that are there, and that the level needs
 */

/** @typedef {{level: number | 'dense', tensors: Map<string, Tensor>}} Delivered */

/** A network that arrives level by level (delivery-1.0.md): open it with `openDelivery`. */
export class Delivery {
  /**
   * @param {DeliveryFile[]} files
   * @param {Profile} profile
   * @param {Map<string, string>} metadata
   */
  constructor(files, profile, metadata) {
    this.files = files
    this.profile = profile
    this.metadata = metadata
  }

  /** How many bytes of the file, or of all shards, a level needs, counted from the first. @param {LevelChoice} choice */
  bytes(choice) {
    const level = chooseLevel(this.profile, choice)
    return this.files.reduce((sum, file) => sum + file.head.ends[file.partOf(level)], 0)
  }

  /** What every network of the file consists of: dtype, shape and bytes of each tensor, as `inspect` gives them. */
  get tensors() {
    return describe(this.files)
  }

  /** The version of the file on the server, to be given to `openDelivery` with the bytes that were saved. */
  get etag() {
    return this.files[0].feed.etag
  }

  /**
   * The tensors of a level, of which only what is missing is read. Arrays of earlier calls stay as they are, unless
   * `final` is set: then the arrays are handed over without a copy, and no other level can be loaded.
   * @param {LevelChoice} choice
   * @param {DeliveryOptions & {final?: boolean}} [options]
   * @returns {Promise<Delivered>}
   */
  async load(choice, { signal, onProgress, final = false } = {}) {
    const level = chooseLevel(this.profile, choice)
    if (!this.files.length) fail('InvalidOption', 'the arrays of this delivery were handed over')
    const total = this.bytes(level)
    const tensors = new Map()
    let before = 0
    for (const file of this.files) {
      await about(file.name, async () => {
        const done = before
        await file.decode(file.partOf(level), signal, loaded => onProgress?.(Math.min(done + loaded, total), total))
        file.checkCounts(file.partOf(level))
      })
      before += file.head.ends[file.partOf(level)]
    }
    for (const file of this.files) for (const [name, tensor] of file.tensors(level, !final)) tensors.set(name, tensor)
    if (final) this.files = []
    return { level, tensors }
  }

  /**
   * One level after the other, each as soon as it is there: 1, 2, … and the dense network.
   * @param {DeliveryOptions & {to?: LevelChoice}} [options] `to`: the last one
   * @returns {AsyncGenerator<Delivered>}
   */
  async* levels({ to = 'dense', ...options } = {}) {
    const last = chooseLevel(this.profile, to)
    for (const { level } of this.profile.levels) {
      if (last !== 'dense' && level > last) return
      yield this.load(level, options)
    }
    if (last === 'dense') yield this.load(last, options)
  }

  /**
   * A level laid out like the ELSA file, as `loadImage` gives it.
   * @param {LevelChoice} choice
   * @param {DeliveryOptions} [options]
   * @returns {Promise<Uint8Array<ArrayBuffer>>}
   */
  async image(choice, options) {
    const [{ head: { source, header } }, ...others] = this.files
    if (others.length) fail('InvalidOption', 'an image is of one file, not of shards')
    const { tensors } = await this.load(choice, options)
    const image = allocate(source.length + header.size)
    image.set(source)
    for (const { name, begin } of header.order) {
      const tensor = tensors.get(name)
      if (tensor) image.set(bytesOf(tensor.data), source.length + begin)
    }
    return image
  }

  /** The ELSA file that was made into this, byte for byte. @param {DeliveryOptions} [options] @returns {AsyncGenerator<Uint8Array>} */
  async* source(options) {
    const [file, ...others] = this.files
    if (others.length) fail('InvalidOption', 'a network in shards has several sources')
    await about(file.name, () => file.decode(file.partOf('dense'), options?.signal))
    for (const piece of file.source()) yield piece.slice()
  }

  /** Let go of connections that are open. */
  async close() {
    for (const file of this.files) await file.feed.close()
  }
}

/**
 * Open a delivery file, the first bytes of one, or the index of one in shards.
 * @param {Source} source
 * @param {FeedOptions & {signal?: AbortSignal, files?: Files}} [options]
 * @returns {Promise<Delivery>}
 */
export async function openDelivery(source, options = {}) {
  /** @param {Source} source @param {string} name @param {FeedOptions} options */
  const openFile = (source, name, options) => about(name, async () => {
    const feed = new Feed(source, options)
    try {
      return new DeliveryFile(name, feed, await readDeliveryHead(feed, signal))
    } catch (error) {
      await feed.close()
      throw error
    }
  })
  const { signal } = options
  if (!isIndex(source, options)) {
    const file = await openFile(source, nameOf(source), options)
    return new Delivery([file], file.profile, ownMetadata([file.header]))
  }
  const index = await readIndex(source, options)
  const shards = await openAll(index, (shard, name) => openFile(shard, name, {}).catch(error => {
    if (error instanceof ElsaError && error.code === 'NotElsa') fail('InvalidIndex', `${show(name)} is no delivery file`)
    throw error
  }))
  return about(nameOf(source), async () => {
    checkMap(index, shards)
    const { parts, profile, metadata } = joinShards(shards)
    return new Delivery(parts, profile, metadata)
  })
}
