import { bytesOf } from './data.js'
import { Model, openModel } from './model.js'

/** @import { ModelOptions } from './model.js' */

/**
 * A level of a network for transformers.js, from a directory that `elsa-export --web` wrote.
 * @param {string | URL} place of the directory
 * @param {ModelOptions & {run?: boolean}} [options] `run`: compute with elsa-format/run, which skips zeros; then transformers.js
 *   has to be imported after this call
 * @returns {Promise<ElsaModel>}
 */
export async function elsa(place, { run, ...options } = {}) {
  if (!run) return openModel(ElsaModel, place, options)
  const { forTransformers, sparseWords } = await import('./run/runtime.js')
  forTransformers()
  return openModel(RunModel, place, options, sparseWords())
}

/** A network whose levels transformers.js runs. Models that were made stay as they are: after `upgrade` make one anew, of `options`. */
export class ElsaModel extends Model {
  /** What `pipeline` and `from_pretrained` are given. @returns {any} */
  get options() {
    // The names that elsa-export --web gives to external data: each tensor is a file of its own.
    const externalData = [...this.tensors].map(([name, { data }]) => ({ path: `elsa.${encodeURIComponent(name)}`, data: bytesOf(data) }))
    return this.optionsWith({ session_options: { externalData } })
  }

  /** @param {object} options */
  optionsWith(options) {
    return { dtype: 'fp32', ...this.callback && { progress_callback: this.callback }, ...options }
  }
}

/** The same, computed by elsa-format/run. */
class RunModel extends ElsaModel {
  /** @override */
  get options() {
    return this.optionsWith({ device: 'auto', session_options: { elsa: this.tensors } })
  }
}
