// The same network in ONNX Runtime Web, where `make web` has found it: the graph is that of the ONNX template, and its
// external data is the level, laid out like the ELSA file.
import { softmax } from './engine.js'

let runtime

async function load() {
  const ort = await import('./ort/ort.wasm.bundle.min.mjs')
  ort.env.wasm.numThreads = 1
  ort.env.wasm.wasmPaths = { wasm: new URL('./ort/ort-wasm-simd-threaded.wasm', import.meta.url).href }
  const graph = new Uint8Array(await (await fetch('net.onnx')).arrayBuffer())
  return { ort, graph }
}

/**
 * @param {Uint8Array} image of a level
 * @returns {Promise<(image: ArrayLike<number>) => Promise<Float32Array>>}
 */
export async function makeSession(image) {
  const { ort, graph } = await (runtime ??= load())
  const session = await ort.InferenceSession.create(graph, { externalData: [{ path: 'net.safetensors', data: image }] })
  const [input] = session.inputNames
  const [output] = session.outputNames
  return async pixels => {
    const values = Float32Array.from(pixels, pixel => (pixel - 4.88) / 6.02)
    const answer = await session.run({ [input]: new ort.Tensor('float32', values, [1, 8, 8, 1]) })
    return softmax(Float32Array.from(answer[output].data))
  }
}
