// What browser.py measures: levels by elsa-format/run, and the same network by ONNX Runtime Web, in turn, with one thread.
import * as ort from './ort/ort.wasm.bundle.min.mjs'
import { open } from './src/run.js'

ort.env.wasm.numThreads = 1
const bytes = async name => new Uint8Array(await (await fetch(name)).arrayBuffer())
const session = async name => ort.InferenceSession.create(await bytes(name))

/** Inputs of so many texts of so many tokens. */
function feeds(inputs, batch, tokens) {
  const data = BigInt64Array.from({ length: batch * tokens }, (_, i) => BigInt(1000 + i * 7919 % 20000))
  const values = { input_ids: data, attention_mask: data.map(() => 1n), token_type_ids: data.map(() => 0n) }
  return Object.fromEntries(inputs.map(name => [name, new ort.Tensor('int64', values[name], [batch, tokens])]))
}

const picture = ([height, width]) => ({ x: new ort.Tensor('float32', Float32Array.from({ length: 3 * height * width }, (_, i) => Math.sin(i)), [1, 3, height, width]) })

/** The subject, ONNX Runtime Web with the dense network and with its int8 form, on inputs of one shape. */
globalThis.prepare = async (folder, level, shape) => {
  if (globalThis.prepared !== `${folder} ${level}`) {
    await globalThis.net?.close()
    globalThis.net = await open(`${folder}/`, { level, cache: false })
    globalThis.prepared = `${folder} ${level}`
  }
  if (globalThis.peersOf !== folder) {
    globalThis.peers = [await session(`${folder}.onnx`)]
    if ((await fetch(`${folder}.int8.onnx`, { method: 'HEAD' })).ok) peers.push(await session(`${folder}.int8.onnx`))
    globalThis.peersOf = folder
  }
  globalThis.given = net.inputs.includes('input_ids') ? feeds(net.inputs, ...shape) : picture(shape)
  return 1 + peers.length
}

/** Run one of them so many times. */
globalThis.repeat = async (which, times) => {
  const start = performance.now()
  for (let i = 0; i < times; i++) await [net, ...peers][which].run(given)
  return { ms: (performance.now() - start) / times }
}

/** How far the outputs of a level are from those of ONNX Runtime with the same level. */
globalThis.compare = async (folder, level) => {
  const exact = await session(`${folder}.${level}.onnx`)
  const [mine, theirs] = [await net.run(given), await exact.run(given)].map(found => Object.values(found)[0].data)
  await exact.release()
  return { apart: mine.reduce((most, value, i) => Math.max(most, Math.abs(value - theirs[i])), 0) }
}

/** One answer, for the memory it takes. */
globalThis.once = async (folder, level) => {
  const run = level ? await open(`${folder}/`, { level, cache: false }) : await session(`${folder}.onnx`)
  await run.run(folder === 'minilm' ? feeds(run.inputs ?? run.inputNames, 1, 32) : picture([48, 320]))
  globalThis.kept = run
  return true
}
globalThis.ready = true
