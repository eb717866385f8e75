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

/** Milliseconds of a run of each, the shortest of many, and how far outputs of the first two are apart. */
async function race(runs, given, seconds) {
  const out = []
  for (const run of runs) out.push(Object.values(await run.run(given))[0].data)
  const apart = out[0].reduce((most, value, i) => Math.max(most, Math.abs(value - out[1][i])), 0)
  const best = runs.map(() => Infinity)
  // What is compiled in the first seconds is slow.
  for (const phase of [seconds / 2, seconds]) {
    const end = performance.now() + 1000 * phase
    best.fill(Infinity)
    for (let n = 0; n < 5 || performance.now() < end; n++) {
      for (const [i, run] of runs.entries()) {
        const start = performance.now()
        await run.run(given)
        best[i] = Math.min(best[i], performance.now() - start)
      }
      await new Promise(done => setTimeout(done)) // the driver asks in between
    }
  }
  return { apart, best }
}

/** Of each level and shape. */
globalThis.measure = async (folder, levels, shapes, seconds) => {
  const rows = []
  const peers = [await session(`${folder}.onnx`)]
  if ((await fetch(`${folder}.int8.onnx`, { method: 'HEAD' })).ok) peers.push(await session(`${folder}.int8.onnx`))
  for (const level of levels) {
    const net = await open(`${folder}/`, { level, cache: false })
    // The same level in ONNX Runtime tells whether outputs are right; its time is that of the dense network.
    const exact = await session(`${folder}.${level}.onnx`)
    for (const shape of shapes) {
      const given = shape.length === 2 && net.inputs.includes('input_ids') ? feeds(net.inputs, ...shape) : picture(shape)
      const { apart } = await race([net, exact], given, 0)
      const { best } = await race([net, ...peers], given, seconds)
      rows.push({ level, shape, apart, best })
    }
    await net.close()
    await exact.release()
  }
  return rows
}

/** One answer, for the memory it takes. */
globalThis.once = async (folder, level) => {
  const run = level ? await open(`${folder}/`, { level, cache: false }) : await session(`${folder}.onnx`)
  await run.run(folder === 'minilm' ? feeds(run.inputs ?? run.inputNames, 1, 32) : picture([48, 320]))
  globalThis.kept = run
  return true
}
globalThis.ready = true
