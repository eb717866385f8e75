// The digits network in plain JavaScript. It walks over the weights that are not zero, so a level costs what it keeps.

const WIDTH = 8
const EPSILON = 1e-5 // of flax's batch norm
const MEAN = 4.88
const DEVIATION = 6.02

/**
 * @param {Map<string, {shape: number[], data: Float32Array}>} tensors of a level
 * @returns {(image: ArrayLike<number>) => Float32Array} gives the probability of each digit; pixels are 0…16
 */
export function makeNetwork(tensors) {
  const data = name => /** @type {Float32Array} */ (tensors.get(name).data)
  const layers = ['1', '2', '3'].map(i => ({
    weights: keptWeights(tensors.get(`conv${i}/kernel`)),
    norm: foldNorm(data(`norm${i}/scale`), data(`norm${i}/bias`), data(`norm${i}/mean`), data(`norm${i}/var`)),
  }))
  const head = data('head/kernel')
  const bias = data('head/bias')
  return image => {
    let values = Float32Array.from(image, pixel => (pixel - MEAN) / DEVIATION)
    let width = WIDTH
    layers.forEach(({ weights, norm }, i) => {
      values = normalise(convolve(values, width, weights, norm.scale.length), norm)
      if (i === 0) {
        values = pool(values, width, norm.scale.length)
        width /= 2
      }
    })
    return softmax(classify(values, width * width, head, bias))
  }
}

/** The weights of a 3×3 convolution that are not zero, and where each belongs: row, column, input, output. */
function keptWeights({ shape: [height, width, inputs, outputs], data }) {
  const values = data.filter(Boolean)
  const places = new Int16Array(4 * values.length)
  for (let i = 0, at = 0; i < data.length; i++) {
    if (!data[i]) continue
    const place = Math.floor(i / outputs / inputs)
    places.set([Math.floor(place / width) - (height >> 1), place % width - (width >> 1), Math.floor(i / outputs) % inputs, i % outputs], at)
    at += 4
  }
  return { values, places }
}

/** Planes of `width` × `width`, one for each channel; what lies outside is 0. */
function convolve(values, width, weights, outputs) {
  const size = width * width
  const result = new Float32Array(outputs * size)
  for (let i = 0; i < weights.values.length; i++) {
    const weight = weights.values[i]
    const dy = weights.places[4 * i]
    const dx = weights.places[4 * i + 1]
    const left = Math.max(0, -dx)
    const right = Math.min(width, width - dx)
    for (let y = Math.max(0, -dy); y < Math.min(width, width - dy); y++) {
      const from = weights.places[4 * i + 2] * size + (y + dy) * width + dx
      const to = weights.places[4 * i + 3] * size + y * width
      for (let x = left; x < right; x++) result[to + x] += weight * values[from + x]
    }
  }
  return result
}

function foldNorm(scale, bias, mean, variance) {
  const factor = scale.map((s, i) => s / Math.sqrt(variance[i] + EPSILON))
  return { scale: factor, shift: bias.map((b, i) => b - mean[i] * factor[i]) }
}

function normalise(values, { scale, shift }) {
  const size = values.length / scale.length
  return values.map((x, i) => {
    const channel = Math.floor(i / size)
    return Math.max(0, x * scale[channel] + shift[channel])
  })
}

function pool(values, width, channels) {
  const half = width / 2
  const result = new Float32Array(channels * half * half)
  for (let i = 0; i < result.length; i++) {
    const [x, y, channel] = [i % half, Math.floor(i / half) % half, Math.floor(i / half / half)]
    const at = channel * width * width + 2 * y * width + 2 * x
    result[i] = Math.max(values[at], values[at + 1], values[at + width], values[at + width + 1])
  }
  return result
}

function classify(values, size, head, bias) {
  const logits = Float32Array.from(bias)
  for (let channel = 0; channel < values.length / size; channel++) {
    let mean = 0
    for (let i = 0; i < size; i++) mean += values[channel * size + i] / size
    for (let digit = 0; digit < bias.length; digit++) logits[digit] += mean * head[channel * bias.length + digit]
  }
  return logits
}

export function softmax(logits) {
  const top = Math.max(...logits)
  const powers = logits.map(x => Math.exp(x - top))
  const sum = powers.reduce((a, b) => a + b)
  return powers.map(x => x / sum)
}
