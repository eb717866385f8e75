/** @import { Node } from './graph.js' */

/** What is known of constants: one number, if a value is one; else nothing. @typedef {(name: string) => number | undefined} Scalar */

/** The same up to rounding. @param {number | undefined} a @param {number} b */
const near = (a, b) => a !== undefined && Math.abs(a - b) < 1e-3 * Math.abs(b)

/**
 * Join operators that are one: activations and normalizations that were taken apart, additions behind products.
 * @param {Node[]} nodes
 * @param {string[]} outputs of the graph
 * @param {Scalar} scalar
 * @param {(name: string) => number[] | undefined} constant its dimensions, if it is one
 * @returns {Node[]}
 */
export function simplify(nodes, outputs, scalar, constant) {
  /** @type {Map<string, Node>} */
  const makers = new Map()
  /** @type {Map<string, number>} */
  const uses = new Map(outputs.map(name => [name, 2]))
  /** @type {Set<Node>} */
  const gone = new Set()
  for (const node of nodes) {
    for (const name of node.out) makers.set(name, node)
    for (const name of node.in) uses.set(name, (uses.get(name) ?? 0) + 1)
  }

  /** The operator that makes a value. @param {string} name @param {string} op @returns {Node | undefined} */
  const made = (name, op) => makers.get(name)?.op === op ? makers.get(name) : undefined
  /** The same, if the value has no other use. @param {string} name @param {string} op */
  const sole = (name, op) => uses.get(name) === 1 ? made(name, op) : undefined

  /** Put a node in place of others. @param {Node} node @param {Partial<Node>} change @param {(Node | undefined)[]} others */
  function become(node, change, others) {
    for (const other of others) {
      if (other && other.out.every(name => (uses.get(name) ?? 0) <= 1)) gone.add(other)
    }
    Object.assign(node, change)
    return true
  }

  /** The number beside another input, and that. @param {Node | undefined} node @returns {[x: string, number: number] | undefined} */
  function withNumber(node) {
    for (const i of [0, 1]) {
      const number = node && scalar(node.in[i])
      if (node && number !== undefined) return [node.in[1 - i], number]
    }
    return undefined
  }

  /** Factors of a product, numbers apart. @param {Node} node @returns {{scale: number, factors: string[], inner: Node[]}} */
  function product(node) {
    const found = { scale: 1, factors: /** @type {string[]} */ ([]), inner: /** @type {Node[]} */ ([]) }
    const [a, b] = node.in
    for (const [name, divides] of /** @type {[string, boolean][]} */ ([[a, false], [b, node.op === 'Div']])) {
      const number = scalar(name)
      const below = divides ? undefined : sole(name, 'Mul') ?? (scalar(makers.get(name)?.in[1] ?? '') === undefined ? undefined : sole(name, 'Div'))
      if (number !== undefined) found.scale *= divides ? 1 / number : number
      else if (!below) found.factors.push(divides ? '' : name)
      else {
        const { scale, factors, inner } = product(below)
        found.scale *= scale
        found.factors.push(...factors)
        found.inner.push(below, ...inner)
      }
    }
    return found
  }

  /** @param {Node} node */
  function activation(node) {
    const { scale, factors, inner } = product(node)
    if (factors.length !== 2) return false
    for (const [x, gate] of [factors, [factors[1], factors[0]]]) {
      const [hard, soft, clip, sum] = [made(gate, 'HardSigmoid'), made(gate, 'Sigmoid'), made(gate, 'Clip'), made(gate, 'Add')]
      const is = (/** @type {Partial<Node>} */ change, /** @type {(Node | undefined)[]} */ others) => become(node, { in: [x], ...change }, [...inner, ...others])
      if (hard?.in[0] === x && near(scale, 1)) return is({ op: 'HardSwish', a: { alpha: 0.2, beta: 0.5, ...hard.a } }, [hard])
      if (soft?.in[0] === x && near(scale, 1)) return is({ op: 'Silu' }, [soft])
      const shift = clip && made(clip.in[0], 'Add')
      const [from, by] = withNumber(shift) ?? []
      const [least, most] = clip ? [clip.a.min ?? scalar(clip.in[1]), clip.a.max ?? scalar(clip.in[2])] : []
      if (from === x && near(by, 3) && least === 0 && near(most, 6) && near(scale, 1 / 6)) return is({ op: 'HardSwish', a: { alpha: 1 / 6, beta: 0.5 } }, [clip, shift])
      const [inside, one] = withNumber(sum) ?? []
      const erf = inside && made(inside, 'Erf')
      const part = erf && (made(erf.in[0], 'Mul') ?? made(erf.in[0], 'Div'))
      if (part && product(part).factors.join() === x && near(product(part).scale, Math.SQRT1_2) && near(one, 1) && near(scale, 0.5)) return is({ op: 'Gelu', a: {} }, [sum, erf, part])
    }
    return false
  }

  /** @param {Node} node the sum with the bias of a normalization */
  function normalization(node) {
    for (const i of [0, 1]) {
      const scaled = sole(node.in[i], 'Mul')
      for (const j of [0, 1]) {
        const quotient = scaled && sole(scaled.in[j], 'Div')
        const [from, root] = quotient?.in ?? []
        const centred = made(from, 'Sub')
        const sum = made(made(root, 'Sqrt')?.in[0] ?? '', 'Add')
        const [variance, epsilon] = withNumber(sum) ?? []
        const square = made(made(variance ?? '', 'ReduceMean')?.in[0] ?? '', 'Pow')
        const mean = made(centred?.in[1] ?? '', 'ReduceMean')
        const axes = mean?.a.axes ?? []
        if (!scaled || !centred || square?.in[0] !== from || scalar(square.in[1]) !== 2 || mean?.in[0] !== centred.in[0] || axes.length !== 1) continue
        // Only of the last axis are scales and biases vectors.
        const [weight, bias] = [scaled.in[1 - j], node.in[1 - i]]
        if (constant(weight)?.length !== 1 || constant(bias)?.length !== 1) continue
        const below = [scaled, quotient, makers.get(root), sum, makers.get(variance ?? ''), square]
        uses.set(from, 1)
        return become(node, { op: 'LayerNormalization', in: [centred.in[0], weight, bias], a: { axis: axes[0], epsilon } }, [...below, centred, mean])
      }
    }
    return false
  }

  /** Sums, scales and rectifiers behind a product with constant weights. @param {Node} node */
  function behind(node) {
    for (const i of [0, 1]) {
      const before = ['Conv', 'MatMul', 'Linear', 'Gemm'].map(op => sole(node.in[i], op)).find(Boolean)
      if (!before || !constant(before.in[1]) || before.a.relu) continue
      if (node.op === 'Relu') return become(node, { ...before, out: node.out, a: { ...before.a, relu: true } }, [before])
      if (i && node.op === 'BatchNormalization') continue
      const other = constant(node.in[1 - i])
      const { op, a } = before
      const plain = !a.sum && !a.scale?.length
      if (op === 'Conv') {
        // Each channel has a number: [C, 1, 1].
        const [outputs] = constant(before.in[1]) ?? []
        const channels = other && other.length > 2 && other.length < 5 && other.every((size, axis) => size === (axis === other.length - 3 ? outputs : 1))
        const is = node.op === 'BatchNormalization' ? !i : channels && (node.op === 'Add' || node.op === 'Mul')
        if (is && !a.sum) return become(node, { ...before, out: node.out, a: { ...a, scale: [...a.scale ?? [], { op: node.op, in: node.in.filter((_, j) => j !== i), a: node.a }] } }, [before])
      }
      if (node.op === 'Add' && op === 'MatMul' && other?.length === 1 && other[0] === constant(before.in[1])?.at(-1) && plain) {
        return become(node, { op: 'Linear', in: [...before.in, node.in[1 - i]], a }, [before])
      }
      if (node.op === 'Add' && !other && !a.sum) return become(node, { ...before, out: node.out, a: { ...a, sum: node.in[1 - i] } }, [before])
    }
    return false
  }

  for (const node of [...nodes].reverse()) {
    if (gone.has(node)) continue
    if (node.op === 'Mul' || node.op === 'Div') activation(node)
    else if (node.op === 'Add') normalization(node)
  }
  for (const node of nodes) {
    if (!gone.has(node) && ['Add', 'Mul', 'Relu', 'BatchNormalization'].includes(node.op) && behind(node)) {
      for (const name of node.out) makers.set(name, node)
    }
  }
  return nodes.filter(node => !gone.has(node))
}
