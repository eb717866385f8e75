import { bytesOf } from './data.js'
import { openDelivery } from './delivery.js'
import { ElsaError } from './errors.js'
import { Folder } from './folder.js'
import { keep } from './kept.js'

/** @import { Delivered } from './delivery.js' */
/** @import { LevelChoice } from './profile.js' */

/**
 * @typedef {object} ElsaOptions
 * @property {LevelChoice} [level] 1, the sparsest, if nothing is said
 * @property {boolean | string} [cache] whether the device keeps the weights; outside of browsers also the folder where
 * @property {(event: Progress) => void} [progress_callback] as transformers.js has it; sees the bytes of the weights, too
 * @property {AbortSignal} [signal]
 */

/** An event of transformers.js. @typedef {{status: 'progress' | 'done', name: string, file: string, loaded: number, total: number, progress: number}} Progress */

/** What says nothing of the bytes that a device has kept. */
const OTHERS = ['RemoteError', 'NoSuchLevel', 'InvalidOption', 'TooLarge']

/**
 * A level of a network for transformers.js, from a directory that `elsa-export --web` wrote.
 * @param {string | URL} place of the directory
 * @param {ElsaOptions} [options]
 * @returns {Promise<ElsaModel>}
 */
export async function elsa(place, options = {}) {
  const folder = new Folder(place)
  const { signal } = options
  const file = await folder.weights({ signal })
  const kept = await keep(folder.file(file), options)
  try {
    return await begin(folder, file, options, kept)
  } catch (error) {
    if (!kept.have.size || !(error instanceof ElsaError) || OTHERS.includes(error.code)) throw error
    await kept.forget() // it may be what is damaged
    return begin(folder, file, options, kept)
  }
}

/**
 * @param {Folder} folder
 * @param {string} file
 * @param {ElsaOptions} options
 * @param {Awaited<ReturnType<typeof keep>>} kept
 */
async function begin(folder, file, { level = 1, signal, progress_callback: callback }, kept) {
  const name = `${folder.place}`
  let model
  try {
    const delivery = await openDelivery(folder.file(file), { ...kept, signal })
    model = new ElsaModel(delivery, kept, { name, file, callback })
    await model.upgrade(level, { signal })
    return model
  } catch (error) {
    await model?.close()
    throw error
  } finally {
    await kept.flush()
  }
}

/** A network whose levels transformers.js runs; `elsa` makes one. */
export class ElsaModel {
  #delivery
  #kept
  #about
  /** @type {Delivered['tensors']} */
  #tensors = new Map()

  /**
   * @param {Awaited<ReturnType<typeof openDelivery>>} delivery
   * @param {Awaited<ReturnType<typeof keep>>} kept
   * @param {{name: string, file: string, callback?: (event: Progress) => void}} about
   */
  constructor(delivery, kept, about) {
    this.#delivery = delivery
    this.#kept = kept
    this.#about = about
    this.profile = delivery.profile
    /** The level that `options` have. @type {number | 'dense'} */
    this.level = 1
  }

  /** How many bytes of the weights a level needs, counted from the first. @param {LevelChoice} choice */
  bytes(choice) {
    return this.#delivery.bytes(choice)
  }

  /** What `pipeline` and `from_pretrained` are given. */
  get options() {
    const { callback } = this.#about
    // The names that elsa-export --web gives to external data: each tensor is a file of its own.
    const externalData = [...this.#tensors].map(([name, { data }]) => ({ path: `elsa.${encodeURIComponent(name)}`, data: bytesOf(data) }))
    return { dtype: 'fp32', ...callback && { progress_callback: callback }, session_options: { externalData } }
  }

  /**
   * Have another level; only what is missing is downloaded. Models that were made stay as they are: make one anew, of `options`.
   * @param {LevelChoice} choice
   * @param {{signal?: AbortSignal}} [options]
   */
  async upgrade(choice, { signal } = {}) {
    const { callback, ...about } = this.#about
    const total = this.bytes(choice)
    /** @param {'progress' | 'done'} status @param {number} loaded */
    const tell = (status, loaded) => callback?.({ status, ...about, loaded, total, progress: 100 * loaded / total })
    try {
      const { level, tensors } = await this.#delivery.load(choice, { signal, onProgress: loaded => tell('progress', loaded) })
      this.level = level
      this.#tensors = tensors
      tell('done', total)
    } finally {
      await this.#kept.flush()
    }
    return this
  }

  /** Let go of the connection and of the tensors, once the models are made. */
  async close() {
    this.#tensors = new Map()
    await this.#delivery.close()
  }
}
