import { refuse, sizeOf } from './session.js'

/** @import { Node } from './graph.js' */
/** @import { Session, Value, Weight } from './session.js' */

/**
 * @typedef {object} Operator
 * @property {(session: Session, node: any, ...inputs: any[]) => Value | Value[]} run
 * @property {(session: Session, node: any, ...constants: any[]) => void} [prepare] what is done once
 */

/** @param {number[]} dims where the elements of each dimension are, in a row-major array */
const stridesOf = dims => dims.map((_, axis) => sizeOf(dims.slice(axis + 1)))
/** @param {number} axis @param {number[]} dims */
const axisOf = (axis, dims) => axis < 0 ? axis + dims.length : axis

/** @param {number[]} a @param {number[]} b the dimensions that both are repeated to */
function broadcast(a, b) {
  const rank = Math.max(a.length, b.length)
  return Array.from({ length: rank }, (_, i) => {
    const [u, v] = [a[a.length - rank + i] ?? 1, b[b.length - rank + i] ?? 1]
    return u === 1 ? v : v === 1 || u === v ? u : refuse(`shapes ${a} and ${b} do not fit each other`)
  })
}

/** Strides of a value that is repeated to dimensions: none where it is. @param {number[]} from @param {number[]} to */
function repeated(from, to) {
  const strides = stridesOf(from)
  return to.map((_, i) => {
    const axis = i - to.length + from.length
    return axis < 0 || from[axis] === 1 ? 0 : strides[axis]
  })
}

/**
 * Dimensions that lie behind one another in all arrays are one; then so many are left, or it is refused.
 * @param {number[]} dims
 * @param {number[][]} strides
 * @param {number} rank
 */
function merge(dims, strides, rank) {
  /** @type {number[]} */
  const sizes = []
  const steps = strides.map(() => /** @type {number[]} */ ([]))
  dims.forEach((size, axis) => {
    if (size === 1) return
    const last = sizes.length - 1
    if (last >= 0 && steps.every((list, i) => list[last] === size * strides[i][axis])) {
      sizes[last] *= size
      steps.forEach((list, i) => list[last] = strides[i][axis])
    } else {
      sizes.push(size)
      steps.forEach((list, i) => list.push(strides[i][axis]))
    }
  })
  if (sizes.length > rank) refuse(`the dimensions ${dims} are too many`)
  const fill = rank - sizes.length
  return [[...Array(fill).fill(1), ...sizes], ...steps.map(list => [...Array(fill).fill(fill && !list.length ? 1 : 0), ...list])]
}

/** @param {Session} s @param {Value} x @param {number} y @param {number[]} dims @param {number[]} from @param {number[]} to @param {number} [first] */
function copy(s, x, y, dims, from, to, first = 0) {
  if (!dims.includes(0)) s.wasm.copy(s.at(x) + 4 * first, y, s.list(...merge(dims, [from, to], 5).flat()))
}

/** Integers at the places that strides lead to. @param {number[]} ints @param {number[]} dims @param {number[]} strides @param {number} [first] */
function pick(ints, dims, strides, first = 0) {
  let places = [first]
  dims.forEach((size, axis) => places = places.flatMap(at => Array.from({ length: size }, (_, i) => at + i * strides[axis])))
  return places.map(at => ints[at])
}

/** A part of a value, or another order of it. @param {Session} s @param {Value} x @param {number[]} dims @param {number[]} strides @param {number} [first] */
function view(s, x, dims, strides, first = 0) {
  if (x.ints) return { dims, ints: pick(x.ints, dims, strides, first) }
  const y = s.room(dims)
  copy(s, x, y.at, dims, strides, stridesOf(dims), first)
  return y
}

/** The same numbers in other dimensions. @param {Value} x @param {number[]} dims @returns {Value} */
const reshaped = (x, dims) => ({ ...x, dims })

/** Operators on integers, and on floats. @type {Record<string, [code: number, (a: number, b: number) => number]>} */
const BINARY = {
  Add: [0, (a, b) => a + b],
  Sub: [1, (a, b) => a - b],
  Mul: [2, (a, b) => a * b],
  Div: [3, (a, b) => Math.trunc(a / b)],
  Max: [4, Math.max],
  Min: [5, Math.min],
  Equal: [-1, (a, b) => Number(a === b)],
  Greater: [-1, (a, b) => Number(a > b)],
  GreaterOrEqual: [-1, (a, b) => Number(a >= b)],
  Less: [-1, (a, b) => Number(a < b)],
  LessOrEqual: [-1, (a, b) => Number(a <= b)],
  And: [-1, (a, b) => a & b],
  Or: [-1, (a, b) => a | b],
  Mod: [-1, (a, b) => a - b * Math.floor(a / b)],
}

/** @param {Session} s @param {string} op @param {Value} a @param {Value} b @returns {Value} */
function binary(s, op, a, b) {
  const dims = broadcast(a.dims, b.dims)
  const [code, f] = BINARY[op]
  const [u, v] = [repeated(a.dims, dims), repeated(b.dims, dims)]
  if (code < 0 || a.ints && b.ints) {
    const [x, y] = [a, b].map(value => value.ints ?? Array.from(s.floats(value)))
    const right = pick(y, dims, v)
    return { dims, ints: pick(x, dims, u).map((value, i) => f(value, right[i])) }
  }
  const y = s.room(dims)
  if (!dims.includes(0)) s.wasm.binary(code, s.at(a), s.at(b), y.at, s.list(...merge(dims, [u, v], 4).flat()))
  return y
}

/** The numbers that operators.c has for functions, and their two parameters. @type {Record<string, (a: any, scalar: (i: number) => number | undefined) => number[]>} */
const UNARY = {
  Relu: () => [0],
  Clip: (a, scalar) => [1, a.min ?? scalar(1) ?? -Infinity, a.max ?? scalar(2) ?? Infinity],
  Sigmoid: () => [2],
  HardSigmoid: ({ alpha = 0.2, beta = 0.5 }) => [3, alpha, beta],
  HardSwish: ({ alpha = 1 / 6, beta = 0.5 }) => [4, alpha, beta],
  Tanh: () => [5],
  Erf: () => [6],
  Gelu: ({ approximate }) => [approximate === 'tanh' ? 16 : 7],
  Exp: () => [8],
  Sqrt: () => [9],
  Neg: () => [10],
  Reciprocal: () => [11],
  Abs: () => [12],
  LeakyRelu: ({ alpha = 0.01 }) => [13, alpha],
  Silu: () => [14],
}

/** @param {Session} s @param {Value} x @param {number} code @param {number} [a] @param {number} [b] */
function unary(s, x, code, a = 0, b = 0) {
  const y = s.room(x.dims)
  s.wasm.unary(code, s.at(x), y.at, sizeOf(x.dims), a, b)
  return y
}

/**
 * A layer of the sparse kernels: rows of weights of which only what is not zero is kept.
 * @param {Session} s
 * @param {Weight} weight
 * @param {number} rows
 * @param {number} columns
 * @param {object} how
 * @param {boolean} [how.transposed] whether rows are columns of the weights
 * @param {number[]} [how.shape] kernel, strides and pads
 * @param {(column: number) => number} [how.column] where a column of the weights is
 * @param {ArrayLike<number>} [how.bias]
 * @param {number[]} [how.scale] of each row
 * @param {number} [how.channels] of a row, each with a kernel
 * @param {[number, number]} [how.part] rows of the weights, of which there are others
 */
function makeLayer(s, { values, places }, rows, columns, { transposed, shape = [1, 1, 1, 1, 0, 0, 0, 0], column = c => c, bias = [], scale, channels = columns, part = [0, rows] }) {
  const starts = new Int32Array(rows + 1)
  const [from, to] = part.map(row => row * columns)
  const count = places?.length ?? values.length
  /** @param {(row: number, column: number, value: number) => void} use */
  const each = use => {
    for (let i = 0; i < count; i++) {
      const place = places ? places[i] : i
      const value = values[i]
      if (!value) continue
      if (transposed) use(place % rows, place / rows | 0, value)
      else if (place >= from && place < to) use((place - from) / columns | 0, (place - from) % columns, value)
    }
  }
  each(row => starts[row + 1]++)
  // The kernels ask for one value in a row at least.
  for (let row = 0; row < rows; row++) starts[row + 1] = starts[row] + Math.max(1, starts[row + 1])
  const next = starts.slice()
  const total = starts[rows]
  const [at, numbers] = [new Uint16Array(total), new Float32Array(total)]
  each((row, c, value) => {
    at[next[row]] = column(c)
    numbers[next[row]++] = value * (scale?.[row] ?? 1)
  })
  const [a, b, c] = [starts, at, numbers].map(array => s.place(array))
  const biases = new Float32Array(rows)
  biases.set(bias)
  const d = s.place(biases)
  return s.wasm.layer(s.list(rows, channels, ...shape), a, b, c, total, d) || refuse(`weights of ${rows} rows and ${columns} columns are too large`)
}

/** The bias that a product adds, as numbers. @param {Session} s @param {Value | undefined} value @param {number} [scale] */
const biasOf = (s, value, scale = 1) => value && Array.from(s.floats(value), x => x * scale)

/** x · w with constant weights; what is added is added at once if it has all dimensions. @param {boolean} gemm */
const product = gemm => /** @type {Operator} */ ({
  prepare(s, node, _, w, bias) {
    if (w?.dims.length !== 2 || !w.weight || node.a.transA) return
    const { alpha = 1, beta = 1, transB } = node.a
    const [columns, rows] = transB ? [...w.dims].reverse() : w.dims
    if (columns > 1 << 16 || gemm && bias && bias.dims.at(-1) !== rows) return
    const scale = alpha === 1 ? undefined : Array(rows).fill(alpha)
    node.layer = makeLayer(s, w.weight, rows, columns, { transposed: !transB, bias: biasOf(s, bias, gemm ? beta : 1), scale })
    node.rows = rows
  },
  run(s, node, x, w, ...others) {
    const { sum, relu, transA, transB, alpha = 1 } = node.a
    const added = sum && others.pop()
    let y
    if (node.layer) {
      const dims = [...x.dims.slice(0, -1), node.rows]
      y = s.room(dims)
      const joined = !added || `${added.dims}` === `${dims}`
      if (s.wasm.matmul(node.layer, s.at(x), sizeOf(dims) / node.rows, joined ? s.at(added) : 0, y.at, Number(Boolean(joined && relu)))) refuse('there is no memory for a product')
      if (joined) return y
    } else {
      if (alpha !== 1 || transA) refuse('elsa-format/run has Gemm only with constant weights')
      y = multiply(s, x, transB ? view(s, w, [...w.dims].reverse(), stridesOf(w.dims).reverse()) : w)
      if (others[0]) y = then(s, y, binary(s, 'Add', y, others[0]))
    }
    if (added) y = then(s, y, binary(s, 'Add', y, added))
    return relu ? then(s, y, unary(s, y, 0)) : y
  },
})

/** A value in place of one that it was made of. @param {Session} s @param {Value} before @param {Value} value */
function then(s, before, value) {
  s.drop(before)
  return value
}

/** A product of values. @param {Session} s @param {Value} a @param {Value} b */
function multiply(s, a, b) {
  const [m, k] = a.dims.length > 1 ? a.dims.slice(-2) : [1, a.dims[0]]
  const n = b.dims.at(-1) ?? 1
  const [more, less] = [a.dims.slice(0, -2), b.dims.slice(0, -2)]
  const outer = broadcast(more, less)
  const y = s.room([...outer, ...a.dims.length > 1 ? [m] : [], n])
  const [p, q] = [a, b].map(value => s.at(value))
  if (sizeOf(less) === 1 && sizeOf(more) === sizeOf(outer)) s.wasm.dense(p, q, y.at, sizeOf(outer) * m, n, k)
  else {
    const places = Array.from({ length: sizeOf(outer) }, (_, i) => i)
    const [u, v] = [more, less].map(dims => pick(places, outer, repeated(dims, outer)))
    u.forEach((_, i) => s.wasm.dense(p + 4 * u[i] * m * k, q + 4 * v[i] * k * n, y.at + 4 * i * m * n, m, n, k))
  }
  return y
}

/**
 * Kernel, strides, pads and output of a window; one dimension is a picture of height 1.
 * @param {any} a
 * @param {number[]} size of the input
 * @param {number[]} [kernel]
 */
function windowOf(a, size, kernel = a.kernel_shape) {
  const two = (/** @type {number[]} */ list, /** @type {number} */ other) => list.length < 2 ? [other, ...list] : list
  const ones = size.map(() => 1)
  const [k, stride, step] = [two(kernel, 1), two(a.strides ?? ones, 1), two(a.dilations ?? ones, 1)]
  const reach = k.map((n, i) => (n - 1) * step[i] + 1)
  const given = a.pads ?? size.flatMap(() => [0, 0])
  let pads = given.length < 4 ? [0, given[0], 0, given[1]] : given
  const input = two(size, 1)
  if (/^SAME/.test(a.auto_pad ?? '')) {
    const need = input.map((n, i) => Math.max(0, (Math.ceil(n / stride[i]) - 1) * stride[i] + reach[i] - n))
    const low = need.map(n => a.auto_pad === 'SAME_LOWER' ? Math.ceil(n / 2) : n >> 1)
    pads = [...low, ...need.map((n, i) => n - low[i])]
  }
  const out = input.map((n, i) => (a.ceil_mode ? Math.ceil : Math.floor)((n + pads[i] + pads[i + 2] - reach[i]) / stride[i]) + 1)
  return { k, stride, step, reach, pads, input, out }
}

/** @type {Operator} */
const Conv = {
  prepare(s, node, _, w, bias) {
    if (!w) return
    const { a } = node
    const [outputs, inner, ...size] = w.dims
    const groups = a.group ?? 1
    let shift = biasOf(s, bias) ?? Array(outputs).fill(0)
    let scale = Array(outputs).fill(1)
    for (const step of a.scale ?? []) {
      /** @type {number[][]} */
      const [one, ...more] = step.in.map((/** @type {string} */ name) => Array.from(s.floats(/** @type {Value} */ (s.constants.get(name)))))
      let [by, add] = step.op === 'Mul' ? [one, []] : [[], one]
      if (step.op === 'BatchNormalization') {
        const [offset, mean, variance] = more
        by = one.map((x, i) => x / Math.sqrt(variance[i] + (step.a.epsilon ?? 1e-5)))
        add = offset.map((x, i) => x - mean[i] * by[i])
      }
      scale = scale.map((/** @type {number} */ x, /** @type {number} */ i) => x * (by[i] ?? 1))
      shift = shift.map((x, i) => x * (by[i] ?? 1) + (add[i] ?? 0))
    }
    node.outputs = outputs
    if (groups > 1 && inner === 1 && outputs === groups) {
      const values = new Float32Array(sizeOf(w.dims))
      const { places, values: given } = w.weight
      for (let i = 0; i < given.length; i++) values[places ? places[i] : i] = given[i]
      node.depthwise = { w: s.place(values.map((x, i) => x * scale[i / (values.length / outputs) | 0])), bias: s.place(Float32Array.from(shift)), size }
      return
    }
    // All but the pads, which may follow from the input.
    node.layers = (/** @type {any} */ window) => {
      const { stride, reach, pads, k, step } = window
      const column = (/** @type {number} */ c) => {
        const [channel, row, at] = [c / (k[0] * k[1]) | 0, (c / k[1] | 0) % k[0], c % k[1]]
        return (channel * reach[0] + row * step[0]) * reach[1] + at * step[1]
      }
      const rows = outputs / groups
      return Array.from({ length: groups }, (_, g) => {
        const part = /** @type {[number, number]} */ ([g * rows, (g + 1) * rows])
        const how = { shape: [...reach, ...stride, ...pads], column, channels: inner, part, bias: shift.slice(...part), scale: scale.slice(...part) }
        return makeLayer(s, w.weight, rows, inner * k[0] * k[1], how)
      })
    }
    node.size = size
  },
  run(s, node, x, _, ...others) {
    const { a, outputs } = node
    if (!outputs) refuse('elsa-format/run has Conv only with constant weights')
    const added = a.sum && others.pop()
    const [batch, channels, ...size] = x.dims
    const window = windowOf(a, size, node.size ?? node.depthwise.size)
    const { input, out, pads, stride, reach, step } = window
    const dims = [batch, outputs, ...size.length > 1 ? out : out.slice(1)]
    const y = s.room(dims)
    const joined = !added || !node.depthwise && !(a.group > 1) && `${added.dims}` === `${dims}`
    const relu = Number(Boolean(joined && a.relu))
    if (node.depthwise) {
      if (step.some(n => n > 1)) refuse('elsa-format/run has no Conv with dilated groups')
      const pitch = Math.max((out[1] + 8) * stride[1] + reach[1], input[1] + pads[1])
      const lines = Math.max((out[0] - 1) * stride[0] + reach[0], input[0] + pads[0])
      const padded = s.room([pitch * lines + 32])
      const list = s.list(channels, ...input, ...out, ...reach, ...stride, pads[0], pads[1], pitch, lines)
      for (let b = 0; b < batch; b++) {
        s.wasm.depthwise(s.at(x) + 4 * b * channels * sizeOf(size), node.depthwise.w, node.depthwise.bias, y.at + 4 * b * channels * sizeOf(out), padded.at, list, relu)
      }
      s.drop(padded)
    } else {
      const key = `${pads}`
      node.made ??= new Map()
      if (!node.made.has(key)) node.made.set(key, node.layers(window))
      const layers = node.made.get(key)
      const [inner, outer] = [channels / layers.length * sizeOf(size), outputs / layers.length * sizeOf(out)]
      const at = s.at(x)
      const whole = layers.length === 1
      for (let b = 0; b < (whole ? 1 : batch); b++) {
        layers.forEach((/** @type {number} */ layer, /** @type {number} */ g) => {
          const i = b * layers.length + g
          if (s.wasm.conv(layer, at + 4 * i * inner, whole ? batch : 1, ...input, joined ? s.at(added) : 0, y.at + 4 * i * outer, relu)) refuse('a kernel is larger than its input, or there is no memory')
        })
      }
    }
    if (joined) return y
    const whole = then(s, y, binary(s, 'Add', y, added))
    return a.relu ? then(s, whole, unary(s, whole, 0)) : whole
  },
}

/** Largest, or mean, of windows. @param {number} most @returns {Operator} */
const pool = most => ({
  run(s, { a }, x) {
    const [batch, channels, ...size] = x.dims
    const { k, stride, pads, input, out } = windowOf(a, size)
    const y = s.room([batch, channels, ...size.length > 1 ? out : out.slice(1)])
    s.wasm.pool(most, s.at(x), y.at, s.list(batch * channels, ...input, ...out, ...k, ...stride, pads[0], pads[1], 0, 0, a.count_include_pad ?? 0))
    return y
  },
})

/** Of neighbouring dimensions. @param {Session} s @param {Value} x @param {number[]} axes @param {boolean} keep @param {number} most @param {boolean} mean */
function reduce(s, x, axes, keep, most, mean) {
  const sorted = axes.map(axis => axisOf(axis, x.dims)).sort((a, b) => a - b)
  if (sorted.some((axis, i) => axis !== sorted[0] + i)) refuse(`axes ${axes} are not beside each other`)
  const [first, last] = [sorted[0], sorted[0] + sorted.length]
  const n = sizeOf(x.dims.slice(first, last))
  const dims = [...x.dims.slice(0, first), ...keep ? sorted.map(() => 1) : [], ...x.dims.slice(last)]
  const outer = sizeOf(x.dims.slice(0, first))
  const inner = sizeOf(x.dims.slice(last))
  if (x.ints) {
    const parts = Array.from({ length: outer * inner }, (_, i) => Array.from({ length: n }, (_, j) => /** @type {number[]} */ (x.ints)[((i / inner | 0) * n + j) * inner + i % inner]))
    return { dims, ints: parts.map(part => most ? Math.max(...part) : part.reduce((a, b) => a + b, 0)) }
  }
  const y = s.room(dims)
  s.wasm.reduce(most, s.at(x), y.at, outer, n, inner, mean ? 1 / n : 1)
  return y
}

/** @param {number} most @param {boolean} mean @returns {Operator} */
const reduction = (most, mean) => ({
  run: (s, { a }, x, axes) => reduce(s, x, a.axes ?? axes?.ints ?? x.dims.map((/** @type {number} */ _, /** @type {number} */ i) => i), a.keepdims !== 0, most, mean),
})

/** @param {(x: Value, node: Node, ...more: any[]) => number[]} dimsOf @returns {Operator} */
const reshape = dimsOf => ({ run: (_, node, x, ...more) => reshaped(x, dimsOf(x, node, ...more)) })

/** @param {Session} s @param {Value[]} parts @param {number} axis */
function concat(s, parts, axis) {
  const along = axisOf(axis, parts[0].dims)
  const dims = [...parts[0].dims]
  dims[along] = parts.reduce((sum, part) => sum + part.dims[along], 0)
  const [outer, inner] = [sizeOf(dims.slice(0, along)), sizeOf(dims.slice(along + 1))]
  if (parts.every(part => part.ints)) {
    const rows = Array.from({ length: outer }, (_, i) => parts.map(part => /** @type {number[]} */ (part.ints).slice(i * part.dims[along] * inner, (i + 1) * part.dims[along] * inner)))
    return { dims, ints: rows.flat(2) }
  }
  const y = s.room(dims)
  let at = 0
  for (const part of parts) {
    const n = part.dims[along] * inner
    copy(s, part, y.at + 4 * at, [outer, n], [n, 1], [dims[along] * inner, 1])
    at += n
  }
  return y
}

/** The rows of a table, of which few may be kept. @param {Session} s @param {any} node @param {Value} table @param {Value} ids */
function rowsOf(s, node, table, ids) {
  const [rows, ...rest] = table.dims
  const width = sizeOf(rest)
  const list = Int32Array.from(/** @type {number[]} */ (ids.ints), id => id < 0 ? id + rows : id)
  if (list.some(id => id < 0 || id >= rows)) refuse(`an index is outside of a table of ${rows} rows`)
  const y = s.room([...ids.dims, ...rest])
  const places = s.room([list.length])
  new Int32Array(s.wasm.memory.buffer, places.at, list.length).set(list)
  const [starts, columns, values] = node.table ?? [0, 0, s.at(table)]
  s.wasm.gather(starts, columns, values, width, places.at, list.length, y.at)
  s.drop(places)
  return y
}

/** @type {Operator} */
const Gather = {
  prepare(s, node, table) {
    const { places, values } = table?.weight ?? {}
    if (!places || node.a.axis || table.dims.length !== 2 || table.dims[1] > 1 << 16) return
    const [rows, width] = table.dims
    const starts = new Int32Array(rows + 1)
    for (const place of places) starts[(place / width | 0) + 1]++
    for (let row = 0; row < rows; row++) starts[row + 1] += starts[row]
    node.table = [starts, Uint16Array.from(places, (/** @type {number} */ place) => place % width), values].map(array => s.place(array))
  },
  run(s, node, x, ids) {
    const axis = axisOf(node.a.axis ?? 0, x.dims)
    const before = x.dims.slice(0, axis)
    const after = x.dims.slice(axis + 1)
    if (!x.ints && !axis) return rowsOf(s, node, x, ids)
    const strides = stridesOf(x.dims)
    const picked = ids.ints.map((/** @type {number} */ id) => view(s, x, [...before, 1, ...after], strides, (id < 0 ? id + x.dims[axis] : id) * strides[axis]))
    const y = concat(s, picked, axis)
    if (!x.ints) picked.forEach((/** @type {Value} */ value) => s.drop(value))
    return reshaped(y, [...before, ...ids.dims, ...after])
  },
}

/** @type {Operator} */
const Slice = {
  run(s, { a }, x, starts, ends, axes, steps) {
    const from = a.starts ?? starts.ints
    const to = a.ends ?? ends.ints
    const dims = [...x.dims]
    const strides = stridesOf(x.dims)
    let first = 0;
    (a.axes ?? axes?.ints ?? from.map((/** @type {number} */ _, /** @type {number} */ i) => i)).forEach((/** @type {number} */ given, /** @type {number} */ i) => {
      const axis = axisOf(given, x.dims)
      const [size, step] = [x.dims[axis], steps?.ints[i] ?? 1]
      const place = (/** @type {number} */ at) => Math.min(Math.max(at < 0 ? at + size : at, step < 0 ? -1 : 0), step < 0 ? size - 1 : size)
      const begin = place(from[i])
      dims[axis] = Math.max(0, Math.ceil((place(Math.max(to[i], -size - 1)) - begin) / step))
      first += begin * strides[axis]
      strides[axis] *= step
    })
    return view(s, x, dims, strides, first)
  },
}

/** @param {number[]} axes @param {number[]} dims with ones put in */
function unsqueezed(axes, dims) {
  const found = [...dims]
  const rank = dims.length + axes.length
  for (const axis of axes.map(axis => axis < 0 ? axis + rank : axis).sort((a, b) => a - b)) found.splice(axis, 0, 1)
  return found
}

/** @type {Record<string, Operator>} */
export const OPERATORS = {
  MatMul: product(false),
  Linear: product(false),
  Gemm: product(true),
  Conv,
  Gather,
  Slice,
  MaxPool: pool(1),
  AveragePool: pool(0),
  GlobalAveragePool: { run: (s, _, x) => reduce(s, x, x.dims.slice(2).map((/** @type {number} */ _, /** @type {number} */ i) => i + 2), true, 0, true) },
  ReduceMean: reduction(0, true),
  ReduceSum: reduction(0, false),
  ReduceMax: reduction(1, false),
  Constant: { run: (_, { a: { value, ...a } }) => {
    if (!value) return { dims: (a.value_ints ?? a.value_floats) ? [(a.value_ints ?? a.value_floats).length] : [], ...a.value_int === undefined && !a.value_ints ? { weight: { values: Float32Array.from(a.value_floats ?? [a.value_float]) } } : { ints: a.value_ints ?? [a.value_int] } }
    return { dims: value.dims, ...value.type === 1 || value.type > 9 ? { weight: { values: Float32Array.from(value.data) } } : { ints: value.data } }
  } },
  ConstantOfShape: { run: (s, { a }, shape) => {
    const [value] = a.value?.data ?? [0]
    if (a.value && a.value.type !== 1) return { dims: shape.ints, ints: Array(sizeOf(shape.ints)).fill(value) }
    const y = s.room(shape.ints)
    s.floats(y).fill(value)
    return y
  } },
  Identity: reshape(x => x.dims),
  Dropout: reshape(x => x.dims),
  Cast: { run(s, { a }, x) {
    const wide = a.to === 1 || a.to === 10 || a.to === 11
    if (wide === !x.ints) return x
    if (!wide) return { dims: x.dims, ints: Array.from(s.floats(x), value => a.to === 9 ? Number(Boolean(value)) : Math.trunc(value)) }
    const y = s.room(x.dims)
    s.floats(y).set(x.ints)
    return y
  } },
  Shape: { run(_, { a }, x) {
    const ints = x.dims.slice(a.start ?? 0, a.end)
    return { dims: [ints.length], ints }
  } },
  Reshape: reshape((x, _, shape) => {
    const dims = shape.ints.map((/** @type {number} */ n, /** @type {number} */ i) => n || x.dims[i])
    const open = dims.indexOf(-1)
    if (open >= 0) dims[open] = -sizeOf(x.dims) / sizeOf(dims)
    return dims
  }),
  Flatten: reshape((x, { a }) => [sizeOf(x.dims.slice(0, axisOf(a.axis ?? 1, x.dims))), sizeOf(x.dims.slice(axisOf(a.axis ?? 1, x.dims)))]),
  Squeeze: reshape((x, { a }, axes) => {
    const gone = (a.axes ?? axes?.ints)?.map((/** @type {number} */ axis) => axisOf(axis, x.dims))
    return x.dims.filter((n, i) => gone ? !gone.includes(i) : n !== 1)
  }),
  Unsqueeze: reshape((x, { a }, axes) => unsqueezed(a.axes ?? axes.ints, x.dims)),
  Transpose: { run(s, { a }, x) {
    const order = a.perm ?? x.dims.map((/** @type {number} */ _, /** @type {number} */ i) => x.dims.length - 1 - i)
    const dims = order.map((/** @type {number} */ i) => x.dims[i])
    // Large constants stay as they are stored, for products that turn them.
    if (x.weight && dims.length === 2 && order[0] && x.at === undefined) return { dims, weight: turned(x.weight, x.dims) }
    return view(s, x, dims, order.map((/** @type {number} */ i) => stridesOf(x.dims)[i]))
  } },
  Expand: { run(s, _, x, shape) {
    const dims = broadcast(x.dims, shape.ints)
    return view(s, x, dims, repeated(x.dims, dims))
  } },
  Concat: { run: (s, { a }, ...parts) => concat(s, parts, a.axis) },
  Split: { run(s, { a, out }, x, sizes) {
    const axis = axisOf(a.axis ?? 0, x.dims)
    const part = Math.ceil(x.dims[axis] / out.length)
    const list = a.split ?? sizes?.ints ?? out.map((/** @type {string} */ _, /** @type {number} */ i) => Math.min(part, x.dims[axis] - i * part))
    const strides = stridesOf(x.dims)
    let at = 0
    return list.map((/** @type {number} */ n) => {
      const y = view(s, x, x.dims.with(axis, n), strides, at * strides[axis])
      at += n
      return y
    })
  } },
  Range: { run(_, __, from, to, step) {
    const ints = Array.from({ length: Math.max(0, Math.ceil((to.ints[0] - from.ints[0]) / step.ints[0])) }, (_, i) => from.ints[0] + i * step.ints[0])
    return { dims: [ints.length], ints }
  } },
  Where: { run(s, _, condition, x, y) {
    const dims = broadcast(condition.dims, broadcast(x.dims, y.dims))
    const [c, a, b] = [condition, x, y].map(value => pick(value.ints ?? Array.from(s.floats(value)), dims, repeated(value.dims, dims)))
    const chosen = c.map((use, i) => use ? a[i] : b[i])
    if (x.ints && y.ints) return { dims, ints: chosen }
    const found = s.room(dims)
    s.floats(found).set(chosen)
    return found
  } },
  Not: { run: (_, __, x) => ({ dims: x.dims, ints: x.ints.map((/** @type {number} */ value) => Number(!value)) }) },
  Pow: { run(s, _, x, power) {
    const [value] = power.ints ?? s.floats(power)
    if (sizeOf(power.dims) > 1 || ![0.5, 1, 2].includes(value)) refuse(`elsa-format/run has no Pow of ${value}`)
    return value === 1 ? x : unary(s, x, value === 2 ? 15 : 9)
  } },
  TopK: { run(s, { a }, x, k) {
    const n = x.dims.at(-1)
    if (axisOf(a.axis ?? -1, x.dims) !== x.dims.length - 1) refuse('elsa-format/run has TopK only along the last axis')
    const numbers = s.floats(x)
    const [count] = k.ints
    const dims = x.dims.with(-1, count)
    const places = Array.from({ length: sizeOf(x.dims) / n }, (_, row) => Array.from({ length: n }, (_, i) => row * n + i)
      .sort((i, j) => (a.largest === 0 ? numbers[i] - numbers[j] : numbers[j] - numbers[i]) || i - j).slice(0, count)).flat()
    const best = places.map(i => numbers[i])
    const y = s.room(dims)
    s.floats(y).set(best)
    return [y, { dims, ints: places.map(i => i % n) }]
  } },
  Softmax: { run(s, { a }, x) {
    const axis = axisOf(a.axis ?? (s.opset < 13 ? 1 : -1), x.dims)
    const n = s.opset < 13 ? sizeOf(x.dims.slice(axis)) : x.dims[axis]
    if (s.opset >= 13 && axis !== x.dims.length - 1) refuse('elsa-format/run has Softmax only along the last axis')
    const y = s.room(x.dims)
    if (n) s.wasm.softmax(s.at(x), y.at, sizeOf(x.dims) / n, n)
    return y
  } },
  LayerNormalization: { run(s, { a }, x, scale, bias) {
    const n = sizeOf(scale.dims)
    const y = s.room(x.dims)
    s.wasm.norm(s.at(x), s.at(scale), s.at(bias), y.at, sizeOf(x.dims) / n, n, a.epsilon ?? 1e-5)
    return y
  } },
  BatchNormalization: { run(s, { a }, x, ...constants) {
    const [scale, bias, mean, variance] = constants.map(value => Array.from(s.floats(value)))
    const by = scale.map((value, i) => value / Math.sqrt(variance[i] + (a.epsilon ?? 1e-5)))
    const dims = [by.length, ...x.dims.slice(2).map(() => 1)]
    const add = bias.map((value, i) => value - mean[i] * by[i])
    const [u, v] = [by, add].map(list => {
      const value = s.room(dims)
      s.floats(value).set(list)
      return value
    })
    const scaled = binary(s, 'Mul', x, u)
    const y = binary(s, 'Add', scaled, v)
    for (const value of [u, v, scaled]) s.drop(value)
    return y
  } },
  ...Object.fromEntries(Object.keys(BINARY).map(op => [op, /** @type {Operator} */ ({ run: (s, _, a, b) => binary(s, op, a, b) })])),
  ...Object.fromEntries(Object.entries(UNARY).map(([op, how]) => [op, /** @type {Operator} */ ({
    run: (s, { a, in: names }, x) => unary(s, x, .../** @type {[number, number, number]} */ (how(a, i => names[i] === undefined ? undefined : s.scalar(names[i])))),
  })])),
}

/** Weights with rows and columns exchanged. @param {Weight} weight @param {number[]} dims @returns {Weight} */
function turned({ values, places }, [rows, columns]) {
  const order = new Uint32Array(values.length)
  const counts = new Uint32Array(columns + 1)
  const placeOf = (/** @type {number} */ i) => places ? places[i] : i
  for (let i = 0; i < values.length; i++) counts[placeOf(i) % columns + 1]++
  for (let i = 0; i < columns; i++) counts[i + 1] += counts[i]
  for (let i = 0; i < values.length; i++) order[counts[placeOf(i) % columns]++] = i
  const places2 = places && Uint32Array.from(order, i => placeOf(i) % columns * rows + (placeOf(i) / columns | 0))
  return { values: Float32Array.from(order, i => values[i]), places: places2 }
}
