// A pad to draw a digit on, with a pointer or with the keyboard, and the 8×8 picture that the network sees of it.

const FINE = 32
const PEN = 0.075 // radius, as a part of the pad
const STEP = 1 / 16

/**
 * @param {HTMLCanvasElement} canvas
 * @param {(pixels: Uint8Array | undefined) => void} changed gets 64 pixels of 0…16, or nothing of an empty pad
 */
export function makePad(canvas, changed) {
  const context = canvas.getContext('2d', { willReadFrequently: true })
  const { width } = canvas
  let strokes = []
  let cursor
  let pressed = false

  const place = event => {
    const box = canvas.getBoundingClientRect()
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height]
  }

  function render() {
    const style = getComputedStyle(canvas)
    context.clearRect(0, 0, width, width)
    context.lineCap = context.lineJoin = 'round'
    context.lineWidth = 2 * PEN * width
    context.strokeStyle = context.fillStyle = style.color
    for (const stroke of strokes) {
      context.beginPath()
      stroke.forEach(([x, y], i) => context[i ? 'lineTo' : 'moveTo'](x * width, y * width))
      const [[x, y]] = stroke
      if (stroke.length === 1) context.lineTo(x * width + 0.1, y * width)
      context.stroke()
    }
    if (cursor && document.activeElement === canvas && canvas.matches(':focus-visible')) {
      context.lineWidth = 2
      context.strokeStyle = style.getPropertyValue('--accent')
      context.beginPath()
      context.arc(cursor[0] * width, cursor[1] * width, PEN * width, 0, 7)
      context.stroke()
    }
  }

  function update() {
    render()
    changed(strokes.length ? shrink(strokes) : undefined)
  }

  canvas.addEventListener('pointerdown', event => {
    canvas.setPointerCapture(event.pointerId)
    pressed = true
    strokes.push([place(event)])
    update()
    event.preventDefault()
    canvas.focus({ preventScroll: true })
  })
  canvas.addEventListener('pointermove', event => {
    if (!pressed) return
    strokes[strokes.length - 1].push(place(event))
    update()
  })
  for (const end of ['pointerup', 'pointercancel']) canvas.addEventListener(end, () => { pressed = false })

  const moves = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] }
  let down = false
  canvas.addEventListener('keydown', event => {
    cursor ??= [0.5, 0.25]
    const move = moves[event.key]
    if (move) {
      cursor = cursor.map((c, i) => Math.min(1 - PEN, Math.max(PEN, c + move[i])))
      if (down) strokes[strokes.length - 1].push(cursor)
    } else if (event.key === ' ') {
      down = !down
      if (down) strokes.push([cursor])
    } else if (event.key === 'Escape' || event.key === 'Delete' || event.key === 'Backspace') clear()
    else return
    event.preventDefault()
    update()
  })
  for (const type of ['focus', 'blur']) canvas.addEventListener(type, () => { down = false; render() })

  function clear() {
    strokes = []
    down = false
    update()
  }

  return { clear, render }
}

/**
 * As the data set was made: the digit fills 32×32 dots, and each pixel counts the dots of its 4×4.
 * @param {[number, number][][]} strokes
 */
function shrink(strokes) {
  const points = strokes.flat()
  const xs = points.map(([x]) => x)
  const ys = points.map(([, y]) => y)
  const [left, right, top, bottom] = [Math.min(...xs) - PEN, Math.max(...xs) + PEN, Math.min(...ys) - PEN, Math.max(...ys) + PEN]
  const size = Math.max(right - left, bottom - top)
  const canvas = new OffscreenCanvas(FINE, FINE)
  const context = canvas.getContext('2d', { willReadFrequently: true })
  context.scale(FINE / size, FINE / size)
  context.translate(-left + (size - right + left) / 2, -top + (size - bottom + top) / 2)
  context.lineCap = context.lineJoin = 'round'
  // Strokes of the data set are about 4 dots wide whatever the size of the digit was.
  context.lineWidth = Math.min(2 * PEN, 4.5 * size / FINE)
  for (const stroke of strokes) {
    context.beginPath()
    stroke.forEach(([x, y], i) => context[i ? 'lineTo' : 'moveTo'](x, y))
    if (stroke.length === 1) context.lineTo(stroke[0][0] + 0.001, stroke[0][1])
    context.stroke()
  }
  const { data } = context.getImageData(0, 0, FINE, FINE)
  const pixels = new Uint8Array(64)
  for (let i = 0; i < FINE * FINE; i++) {
    if (data[4 * i + 3] > 127) pixels[(i / FINE >> 2) * 8 + (i % FINE >> 2)]++
  }
  return pixels
}
