import { fromBase64 } from '../kernels.js'
import { openLocal } from '../local.js'
import { Bytes } from '../source.js'
import { readGraph } from './graph.js'
import { Session, Tensor } from './session.js'
import { WASM } from './wasm.js'

export { sparseWords } from './sparse_words.js'
export { Tensor }

/** @type {Promise<WebAssembly.Module> | undefined} */
let compiled

/** The kernels, compiled once. */
function compile() {
  const wasm = () => new Response(new Blob([fromBase64(WASM)]).stream().pipeThrough(new DecompressionStream('gzip'))).arrayBuffer()
  return compiled ??= wasm().then(bytes => WebAssembly.compile(bytes))
}

/** Floats of words. @param {{dtype: string, data: any, words?: any}} tensor @returns {Float32Array | undefined} */
function floatsOf({ dtype, data, words = data }) {
  if (dtype === 'F32') return new Float32Array(words.buffer, words.byteOffset, words.length)
  if (dtype === 'BF16') return new Float32Array(Uint32Array.from(words, word => word << 16).buffer)
  if (dtype === 'F16') {
    return Float32Array.from(words, word => {
      const [exponent, rest] = [word >> 10 & 31, word & 1023]
      return (word >> 15 ? -1 : 1) * (exponent === 31 ? rest ? NaN : Infinity : exponent ? 2 ** (exponent - 25) * (1024 + rest) : rest * 2 ** -24)
    })
  }
  return dtype === 'F64' ? Float32Array.from(new Float64Array(words.buffer, words.byteOffset, words.length)) : undefined
}

/**
 * A level of a network, ready to run, in memory of its own.
 * @param {Uint8Array} graph of the network: an ONNX model
 * @param {Map<string, any>} tensors
 */
export async function makeSession(graph, tensors) {
  const { exports } = await WebAssembly.instantiate(await compile())
  /** @type {Map<string, any>} */
  const weights = new Map()
  for (const [name, tensor] of tensors) {
    const values = floatsOf(tensor)
    if (values) weights.set(name, { values, places: tensor.places })
  }
  return new Session(exports, readGraph(graph), weights)
}

/** Be what transformers.js takes for ONNX Runtime, if it is imported after this. */
export function forTransformers() {
  /** @type {any} */ (globalThis)[Symbol.for('onnxruntime')] ??= {
    Tensor,
    env: { versions: { elsa: '1' } },
    InferenceSession: {
      /** Of transformers.js' own small graphs there is no level. @param {string | Uint8Array} model @param {{elsa?: Map<string, any>}} options */
      async create(model, { elsa = new Map() }) {
        const graph = typeof model === 'string' ? await new Bytes((await openLocal(model)).source).take(1 << 30) : model
        return makeSession(graph, elsa)
      },
    },
  }
}
