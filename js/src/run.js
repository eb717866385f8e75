import { ElsaError } from './errors.js'
import { Model, openModel } from './model.js'
import { Tensor, makeSession, sparseWords } from './run/runtime.js'

/** @import { ModelOptions } from './model.js' */

export { Tensor }

/**
 * Open a directory that `elsa-export --web` wrote, and load a level, to be run by kernels that skip its zeros.
 * @param {string | URL} place
 * @param {ModelOptions & {fallback?: any}} [options] `fallback`: ONNX Runtime Web, for graphs with other operators
 * @returns {Promise<Net>}
 */
export async function open(place, { fallback, ...options } = {}) {
  /** The class is given the fallback before it takes in its first level. */
  class Made extends Net {
    /** @override */
    get fallback() {
      return fallback
    }
  }
  return openModel(Made, place, options, sparseWords())
}

/** A network that runs at one of its levels. */
export class Net extends Model {
  /** @type {any} */
  #session
  /** @type {Promise<Uint8Array> | undefined} */
  #graph

  /** ONNX Runtime Web, if it stands by. @returns {any} */
  get fallback() {
    return undefined
  }

  /** @override @param {Map<string, any>} tensors */
  async use(tensors) {
    const graph = await (this.#graph ??= this.folder.read('onnx/model.onnx'))
    let session
    try {
      session = await makeSession(graph, tensors)
    } catch (error) {
      if (!this.fallback || !(error instanceof ElsaError) || error.code !== 'InvalidOption') throw error
      session = await this.fallback.InferenceSession.create(graph, { externalData: [...tensors].map(externalOf) })
    }
    await this.#session?.release?.()
    this.#session = session
  }

  /** The names of what `run` needs. @returns {string[]} */
  get inputs() {
    return this.#session.inputNames
  }

  /** The names of what it gives. @returns {string[]} */
  get outputs() {
    return this.#session.outputNames
  }

  /**
   * What the network makes of its inputs.
   * @param {Record<string, {data: any, dims: readonly number[], type?: string}>} feeds floats in a Float32Array; all else are integers
   * @returns {Promise<Record<string, {data: any, dims: readonly number[], type: string}>>}
   */
  async run(feeds) {
    if (this.#session instanceof (this.fallback?.InferenceSession ?? Never)) {
      feeds = Object.fromEntries(Object.entries(feeds).map(([name, { data, dims, type = data instanceof Float32Array ? 'float32' : 'int64' }]) => [name, new this.fallback.Tensor(type, data, dims)]))
    }
    return this.#session.run(feeds)
  }
}

class Never {}

/** A tensor as external data. @param {[string, any]} tensor */
function externalOf([name, { shape, data, words, places }]) {
  let all = words ?? data
  if (places) {
    all = new words.constructor(shape.reduce((/** @type {number} */ a, /** @type {number} */ b) => a * b, 1))
    for (let i = 0; i < places.length; i++) all[places[i]] = words[i]
  }
  return { path: `elsa.${encodeURIComponent(name)}`, data: new Uint8Array(all.buffer, all.byteOffset, all.byteLength) }
}
