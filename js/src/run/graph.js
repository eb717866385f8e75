import { fail, say } from '../errors.js'

/**
 * @typedef {{op: string, in: string[], out: string[], a: Record<string, any>}} Node
 * @typedef {{dims: number[], type: number, name: string, data?: number[]}} Constant numbers, but for tensors of the network
 * @typedef {{name: string, isTensor: true, type: string, shape: (number | string)[]}} Input as ONNX Runtime has it
 * @typedef {{nodes: Node[], constants: Constant[], inputs: Input[], outputs: string[], opset: number}} Graph
 */

const TEXT = new TextDecoder()
/** Of elements as raw bytes, by the numbers that ONNX has for types. @type {Record<number, any>} */
const ARRAYS = { 1: Float32Array, 2: Uint8Array, 3: Int8Array, 6: Int32Array, 7: BigInt64Array, 9: Uint8Array, 11: Float64Array }

/** The fields of a message: numbers, or bytes. @param {Uint8Array} bytes @returns {Generator<[field: number, value: any]>} */
function* fields(bytes) {
  let at = 0
  const varint = () => {
    let value = 0n
    for (let shift = 0n, byte = 128; byte > 127; shift += 7n) {
      if (at >= bytes.length) fail('InvalidOption', 'the graph ends within a message, expected an ONNX model')
      byte = bytes[at++]
      value |= BigInt(byte & 127) << shift
    }
    return BigInt.asIntN(64, value)
  }
  while (at < bytes.length) {
    const key = Number(varint())
    const wire = key & 7
    if (!wire) yield [key >> 3, varint()]
    else {
      const size = wire === 2 ? Number(varint()) : wire === 5 ? 4 : 8
      yield [key >> 3, bytes.subarray(at, at += size)]
    }
  }
}

/** @param {Uint8Array} bytes @param {number} field @returns {any[]} */
const all = (bytes, field) => [...fields(bytes)].filter(([found]) => found === field).map(([, value]) => value)
/** @param {Uint8Array} bytes */
const text = bytes => TEXT.decode(bytes)
/** @param {Uint8Array} bytes */
const float = bytes => new DataView(bytes.buffer, bytes.byteOffset).getFloat32(0, true)

/** Integers, packed or alone. @param {any[]} values @returns {number[]} */
const ints = values => values.flatMap(value => {
  if (typeof value === 'bigint') return [Number(value)]
  // A field 1 before each of them makes a message of packed numbers.
  const bytes = [...value].reduce((/** @type {number[]} */ list, byte, i) => [...list, ...i && value[i - 1] > 127 ? [byte] : [8, byte]], [])
  return all(Uint8Array.from(bytes), 1).map(Number)
})

/** @param {any[]} values */
const floats = values => values.flatMap(value => [...new Float32Array(value.slice().buffer)])

/** @param {Uint8Array} bytes @returns {Constant} */
function constant(bytes) {
  const [type, name] = [Number(all(bytes, 2)[0]), text(all(bytes, 8)[0] ?? new Uint8Array(0))]
  const found = { dims: ints(all(bytes, 1)), type, name }
  if (all(bytes, 14).length) return found
  const [raw] = all(bytes, 9)
  if (raw && ARRAYS[type]) return { ...found, data: Array.from(new ARRAYS[type](raw.slice().buffer), Number) }
  const typed = type === 1 ? floats(all(bytes, 4)) : ints([...all(bytes, 7), ...all(bytes, 5)])
  if (raw) fail('InvalidOption', say`the graph has a constant ${name} of type ${type}, expected numbers`)
  return { ...found, data: typed }
}

/** @param {Uint8Array} bytes @returns {Node} */
function node(bytes) {
  const attributes = all(bytes, 5).map(attribute => {
    const kind = Number(all(attribute, 20)[0])
    const one = (/** @type {number} */ field) => all(attribute, field)[0]
    const value = kind === 1 ? float(one(2)) : kind === 2 ? Number(one(3)) : kind === 3 ? text(one(4)) : kind === 4 ? constant(one(5))
      : kind === 6 ? floats(all(attribute, 7)) : kind === 7 ? ints(all(attribute, 8)) : undefined
    return [text(one(1)), value]
  })
  const op = text(all(bytes, 4)[0])
  const domain = all(bytes, 7).map(text).join()
  return { op: domain && domain !== 'ai.onnx' ? `${domain}.${op}` : op, in: all(bytes, 1).map(text), out: all(bytes, 2).map(text), a: Object.fromEntries(attributes) }
}

/** @type {Record<number, string>} */
const TYPES = { 1: 'float32', 2: 'uint8', 3: 'int8', 6: 'int32', 7: 'int64', 9: 'bool', 10: 'float16', 11: 'float64' }

/** @param {Uint8Array} bytes @returns {Input} */
function input(bytes) {
  const [tensor] = all(all(bytes, 2)[0] ?? bytes.subarray(0, 0), 1)
  const dims = tensor ? all(tensor, 2).flatMap(shape => all(shape, 1)) : []
  const shape = dims.map(dim => Number(all(dim, 1)[0] ?? -1) < 0 ? all(dim, 2).map(text).join() : Number(all(dim, 1)[0]))
  return { name: text(all(bytes, 1)[0]), isTensor: true, type: TYPES[tensor ? Number(all(tensor, 1)[0]) : 1] ?? 'float32', shape }
}

/** Read an ONNX model. @param {Uint8Array} bytes @returns {Graph} */
export function readGraph(bytes) {
  const [graph] = all(bytes, 7)
  if (!graph) fail('InvalidOption', 'the file has no graph, expected an ONNX model')
  const constants = all(graph, 5).map(constant)
  const names = new Set(constants.map(({ name }) => name))
  const [opset] = all(bytes, 8).filter(entry => !all(entry, 1).map(text).join()).map(entry => Number(all(entry, 2)[0]))
  return { nodes: all(graph, 1).map(node), constants, inputs: all(graph, 11).map(input).filter(({ name }) => !names.has(name)), outputs: all(graph, 12).map(value => text(all(value, 1)[0])), opset }
}
