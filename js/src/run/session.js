import { bytesOf } from '../data.js'
import { fail, say } from '../errors.js'
import { OPERATORS } from './operators.js'
import { simplify } from './simplify.js'

/** @import { Graph, Node } from './graph.js' */

/**
 * A value: floats in the memory of the kernels, integers in JavaScript, or a tensor of the network that is not yet in memory.
 * @typedef {object} Value
 * @property {number[]} dims
 * @property {number} [at] where its floats are
 * @property {number[]} [ints] or its integers
 * @property {Weight} [weight]
 * @property {{at: number, users: number}} [room] that it shares with its views; a constant has none
 */

/** Numbers at places, in order, or at all of them. @typedef {{values: Float32Array, places?: Uint32Array}} Weight */

/** @param {number[]} dims */
export const sizeOf = dims => dims.reduce((a, b) => a * b, 1)

/** @param {string} problem @returns {never} */
export const refuse = problem => fail('InvalidOption', problem)

/** What a node reads. @param {Node} node */
const inputsOf = ({ in: names, a }) => [...names, ...a.sum ? [a.sum] : []].filter(Boolean)

/** Numbers for a graph, as ONNX Runtime has them, too. */
export class Tensor {
  /** @param {string} type @param {any} data @param {readonly number[]} [dims] */
  constructor(type, data, dims = [data.length]) {
    this.type = type
    this.data = data
    this.dims = [...dims]
    this.size = data.length
    this.location = 'cpu'
  }

  /** There is nothing to let go of. */
  dispose() {}
}

/** One level of a network, ready to run. */
export class Session {
  /**
   * @param {any} wasm exports of an instance of its own
   * @param {Graph} graph
   * @param {Map<string, Weight & {dims: number[]}>} weights
   */
  constructor(wasm, graph, weights) {
    this.wasm = wasm
    this.opset = graph.opset
    this.inputMetadata = graph.inputs
    this.inputNames = graph.inputs.map(({ name }) => name)
    this.outputNames = graph.outputs
    /** Of small lists. */
    this.scratch = wasm.place(256)
    /** @type {Map<string, Value>} */
    this.constants = new Map()
    for (const { name, dims, data, type } of graph.constants) {
      const weight = weights.get(name)
      if (weight) this.constants.set(name, { dims, weight })
      else if (!data) fail('InvalidOption', say`the network has no tensor ${name}, which the graph expects`)
      else this.constants.set(name, type === 1 || type === 10 || type === 11 ? { dims, weight: { values: Float32Array.from(data) } } : { dims, ints: [...data] })
    }
    const nodes = graph.nodes.filter(node => !this.fold(node))
    this.nodes = simplify(nodes, graph.outputs, name => this.scalar(name), name => this.constants.get(name)?.dims)
    const unknown = new Set(this.nodes.filter(({ op }) => !OPERATORS[op]).map(({ op }) => op))
    if (unknown.size) refuse(`elsa-format/run has no operator ${[...unknown].join(', ')}; give { fallback: ort } to run the graph with ONNX Runtime Web`)
    /** How many nodes read a value. @type {Map<string, number>} */
    this.uses = new Map(graph.outputs.map(name => [name, 1]))
    for (const node of this.nodes) for (const name of inputsOf(node)) this.uses.set(name, (this.uses.get(name) ?? 0) + 1)
    for (const node of this.nodes) OPERATORS[node.op].prepare?.(this, node, ...node.in.map(name => this.constants.get(name)))
  }

  /** Compute a node now, if all it reads is constant. @param {Node} node */
  fold(node) {
    const operator = OPERATORS[node.op]
    if (!operator || operator.prepare || !inputsOf(node).every(name => this.constants.has(name))) return false
    if (node.op !== 'Constant' && node.in.some(name => (this.constants.get(name)?.weight?.values.length ?? 0) > 1 << 16) && node.op !== 'Transpose' && node.op !== 'Cast') return false
    this.set(this.constants, node, operator.run(this, node, ...node.in.map(name => this.constants.get(name))))
    for (const name of node.out) delete this.constants.get(name)?.room
    return true
  }

  /** @param {Map<string, Value>} values @param {Node} node @param {Value | Value[]} found */
  set(values, node, found) {
    [found].flat().forEach((value, i) => {
      if (!node.out[i]) return
      values.set(node.out[i], value)
      if (!value.room) return
      value.room.users += this.uses?.get(node.out[i]) ?? 0
      if (this.uses && !value.room.users) this.drop(value)
    })
  }

  /** A constant that is one number. @param {string} name */
  scalar(name) {
    const value = this.constants.get(name)
    if (!value || sizeOf(value.dims) !== 1) return undefined
    return value.ints ? value.ints[0] : this.floats(value)[0]
  }

  /** Room for a value of this run. @param {number[]} dims @returns {Value & {at: number}} */
  room(dims) {
    const size = 4 * sizeOf(dims) + 64
    const at = this.wasm.malloc(size) || fail('TooLarge', `no memory for ${size} bytes`)
    return { dims, at, room: { at, users: 0 } }
  }

  /** Let go of a value once. @param {Value | undefined} value */
  drop(value) {
    const room = value?.room
    if (room && --room.users <= 0) this.wasm.free(room.at)
  }

  /** Bytes that stay in the memory of the kernels. @param {ArrayBufferView} array @returns {number} */
  place(array) {
    const at = this.wasm.place(array.byteLength + 64) || fail('TooLarge', `no memory for ${array.byteLength} bytes`)
    new Uint8Array(this.wasm.memory.buffer, at, array.byteLength).set(bytesOf(array))
    return at
  }

  /** Small numbers for one call of a kernel. @param {...number} list @returns {number} */
  list(...list) {
    new Int32Array(this.wasm.memory.buffer, this.scratch, list.length).set(list)
    return this.scratch
  }

  /** Where a value's floats are. @param {Value | undefined} value @returns {number} */
  at(value) {
    if (!value) return 0
    if (value.at !== undefined) return value.at
    if (value.ints) return value.at = this.place(Float32Array.from(value.ints))
    const { values, places } = /** @type {Weight} */ (value.weight)
    if (!places) return value.at = this.place(values)
    const dense = new Float32Array(sizeOf(value.dims))
    for (let i = 0; i < places.length; i++) dense[places[i]] = values[i]
    return value.at = this.place(dense)
  }

  /** A value's floats. @param {Value} value */
  floats(value) {
    if (value.weight && !value.weight.places) return value.weight.values
    return new Float32Array(this.wasm.memory.buffer, this.at(value), sizeOf(value.dims))
  }

  /**
   * What the graph makes of its inputs.
   * @param {Record<string, {data: any, dims: readonly number[]}>} feeds
   * @returns {Promise<Record<string, Tensor>>}
   */
  async run(feeds) {
    const values = new Map(this.constants)
    for (const name of this.inputNames) {
      const { data, dims } = feeds[name] ?? fail('InvalidOption', say`the input ${name} is missing, expected ${this.inputNames.join(', ')}`)
      if (data instanceof Float32Array) {
        const value = this.room([...dims])
        this.floats(value).set(data)
        value.room && (value.room.users = this.uses.get(name) ?? 0)
        values.set(name, value)
      } else values.set(name, { dims: [...dims], ints: Array.from(data, Number) })
    }
    for (const node of this.nodes) {
      const inputs = node.in.map(name => values.get(name))
      this.set(values, node, OPERATORS[node.op].run(this, node, ...inputs, ...node.a.sum ? [values.get(node.a.sum)] : []))
      for (const name of inputsOf(node)) this.drop(values.get(name))
    }
    return Object.fromEntries(this.outputNames.map(name => {
      const value = /** @type {Value} */ (values.get(name))
      const tensor = value.ints ? new Tensor('int64', BigInt64Array.from(value.ints, BigInt), value.dims) : new Tensor('float32', this.floats(value).slice(), value.dims)
      this.drop(value)
      return [name, tensor]
    }))
  }

  /** All of its memory goes with it. */
  async release() {}
}
