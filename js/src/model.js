import { Delivery } from './delivery.js'
import { openDeliveryFile } from './delivery_file.js'
import { ElsaError } from './errors.js'
import { openFiles } from './files.js'
import { Folder } from './folder.js'
import { keep } from './kept.js'
import { joinParts } from './network.js'

/** @import { Storage } from './delivery_file.js' */
/** @import { LevelChoice } from './profile.js' */

/**
 * @typedef {object} ModelOptions
 * @property {LevelChoice} [level] 1, the sparsest, if nothing is said
 * @property {boolean | string} [cache] whether the device keeps the weights; outside of browsers also the folder where
 * @property {(event: Progress) => void} [progress_callback] as transformers.js has it; sees the bytes of the weights, too
 * @property {AbortSignal} [signal]
 */

/** An event of transformers.js. @typedef {{status: 'progress' | 'done', name: string, file: string, loaded: number, total: number, progress: number}} Progress */

/** What says nothing of the bytes that a device has kept. */
const OTHERS = ['RemoteError', 'NoSuchLevel', 'InvalidOption', 'TooLarge']

/** A network of which more and more arrives. */
export class Model {
  /** @type {Delivery} */
  #delivery
  #kept
  #about

  /**
   * @param {Delivery} delivery
   * @param {Awaited<ReturnType<typeof keep>>} kept
   * @param {{folder: Folder, file: string, callback?: (event: Progress) => void}} about
   */
  constructor(delivery, kept, about) {
    this.#delivery = delivery
    this.#kept = kept
    this.#about = about
    this.profile = delivery.profile
    /** The level that is ready. @type {number | 'dense'} */
    this.level = 1
    /** Its tensors. @type {Map<string, any>} */
    this.tensors = new Map()
  }

  /** Where it comes from. */
  get folder() {
    return this.#about.folder
  }

  /** What transformers.js is given, to tell of its own files. */
  get callback() {
    return this.#about.callback
  }

  /** How many bytes of the weights a level needs, counted from the first. @param {LevelChoice} choice */
  bytes(choice) {
    return this.#delivery.bytes(choice)
  }

  /**
   * Have another level; only what is missing is downloaded.
   * @param {LevelChoice} choice
   * @param {{signal?: AbortSignal}} [options]
   */
  async upgrade(choice, { signal } = {}) {
    const { callback, folder, file } = this.#about
    const total = this.bytes(choice)
    /** @param {'progress' | 'done'} status @param {number} loaded */
    const tell = (status, loaded) => callback?.({ status, name: `${folder.place}`, file, loaded, total, progress: 100 * loaded / total })
    try {
      const { level, tensors } = await this.#delivery.load(choice, { signal, onProgress: loaded => tell('progress', loaded) })
      await this.use(tensors)
      this.level = level
      tell('done', total)
    } finally {
      await this.#kept.flush()
    }
    return this
  }

  /** Take in a level that has arrived. @param {Map<string, any>} tensors @returns {unknown} */
  use(tensors) {
    this.tensors = tensors
    return undefined
  }

  /** Let go of the connection and of the tensors. */
  async close() {
    this.tensors = new Map()
    await this.#delivery.close()
  }
}

/**
 * Open a directory that `elsa-export --web` wrote, and load a level.
 * @template {Model} T
 * @param {new (...args: ConstructorParameters<typeof Model>) => T} Kind
 * @param {string | URL} place
 * @param {ModelOptions} options
 * @param {Storage} [storage]
 * @returns {Promise<T>}
 */
export async function openModel(Kind, place, options, storage) {
  const { level = 1, signal, progress_callback: callback } = options
  const folder = new Folder(place)
  const file = await folder.weights({ signal })
  const kept = await keep(folder.file(file), options)
  const begin = async () => {
    let model
    try {
      const delivery = new Delivery(await openFiles(folder.file(file), { ...kept, signal }, (bytes, shard) => openDeliveryFile(bytes, shard, storage), joinParts))
      model = new Kind(delivery, kept, { folder, file, callback })
      await model.upgrade(level, { signal })
      return model
    } catch (error) {
      await model?.close()
      throw error
    } finally {
      await kept.flush()
    }
  }
  try {
    return await begin()
  } catch (error) {
    if (!kept.have.size || !(error instanceof ElsaError) || OTHERS.includes(error.code)) throw error
    await kept.forget() // it may be what is damaged
    return begin()
  }
}
