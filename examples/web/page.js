import { openDelivery } from './elsa-format/index.js'
import { makeNetwork } from './engine.js'
import { makeSession } from './ort.js'
import { makePad } from './pad.js'

const $ = id => document.getElementById(id)
const percent = x => x === undefined ? '–' : `${(100 * x).toFixed(1)} %`
const size = bytes => bytes < 1000 ? `${Math.round(bytes)} B` : `${(bytes / 1000).toFixed(bytes < 10_000 ? 1 : 0)} kB`
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()
const pause = ms => new Promise(resolve => setTimeout(resolve, ms))

/** What is on the pad, as the network sees it. */
let pixels
/** Bytes that are here, and all. */
let bytes = [0, 1]
/** The levels of the current delivery: {level, name, card, network?}. */
let levels = []
let delivery
let stopped = new AbortController()

const pad = makePad($('pad'), found => {
  pixels = found
  $('truth').textContent = ''
  show()
})

// --- Delivery ---------------------------------------------------------------------------------------------------------

async function deliver() {
  stopped.abort()
  const { signal } = stopped = new AbortController()
  levels = []
  $('cards').replaceChildren()
  $('track').querySelectorAll('.end').forEach(mark => mark.remove())
  $('status').textContent = 'Opening the file…'
  bytes = [0, 1]
  $('arrived').style.width = '0'
  drawWeights()
  show()
  try {
    // The server holds back: ?rate= is how many bytes it sends a second.
    delivery = await openDelivery(`net.ship.safetensors?rate=${$('speed').value}`, { signal })
    const total = delivery.bytes('dense')
    $('track').ariaValueMax = String(total)
    levels = [...delivery.profile.levels, { level: 'dense', name: 'dense', metrics: delivery.profile.dense.metrics }].map(makeCard)
    levels.forEach(({ level, mark }) => {
      const end = document.createElement('span')
      end.className = 'end'
      end.style.cssText = `left: ${100 * delivery.bytes(level) / total}%; --mark: ${mark}`
      $('track').append(end)
    })
    const onProgress = done => {
      if (!signal.aborted) progress(done, total)
    }
    for await (const { level, tensors } of delivery.levels({ signal, onProgress })) await arrive(level, tensors, signal)
  } catch (error) {
    if (signal.aborted) return
    const best = bestLevel()
    const here = best ? `What has arrived still answers, up to ${best.title}.` : 'There is no network yet.'
    $('status').textContent = `Stopped: ${error.problem ?? error.message}. ${here}`
  }
}

function progress(done = bytes[0], total = bytes[1]) {
  bytes = [done, total]
  $('arrived').style.width = `${100 * done / total}%`
  $('track').ariaValueNow = String(done)
  const best = bestLevel()
  const next = levels.find(({ network }) => !network)
  const here = !best ? 'no network yet' : next ? `${best.title} is here` : 'all levels are here'
  const wait = next ? `, ${next.title} at ${size(delivery.bytes(next.level))}` : ''
  $('status').textContent = `${size(done)} of ${size(total)}: ${here}${wait}.`
}

async function arrive(level, tensors, signal) {
  const one = levels.find(l => l.level === level)
  one.tensors = tensors
  await start(one)
  if (signal.aborted) return
  one.card.dataset.state = 'here'
  one.card.querySelector('.state').textContent = 'here'
  progress()
  drawWeights()
  show()
  measure(one, signal)
}

/** Make the level's network with the engine that is chosen. */
async function start(one) {
  one.network = $('engine').value === 'ort' ? await makeSession(await delivery.image(one.level)) : makeNetwork(one.tensors)
}

// --- Cards ------------------------------------------------------------------------------------------------------------

function makeCard({ level, name, nonzero, metrics }) {
  const card = $('card').content.firstElementChild.cloneNode(true)
  const mark = `var(--level-${level})`
  card.style.setProperty('--mark', mark)
  const title = level === 'dense' ? 'the dense network' : `level ${level}`
  card.querySelector('.name').textContent = level === 'dense' ? 'Dense' : `Level ${level}: ${name}`
  const fill = (field, text) => { card.querySelector(`.${field}`).textContent = text }
  const all = [...delivery.profile.nested.keys()].reduce((sum, tensor) => sum + elements(tensor), 0)
  const kept = nonzero ?? all
  fill('bytes', size(delivery.bytes(level)))
  fill('kept', `${kept.toLocaleString('en')} (${percent(kept / all)})`)
  fill('recorded', percent(metrics.accuracy))
  card.querySelector('.bars').append(...Array.from({ length: 10 }, () => document.createElement('i')))
  $('cards').append(card)
  return { level, title, card, mark, fill }
}

const elements = name => delivery.tensors.get(name).shape.reduce((a, b) => a * b, 1)

const bestLevel = () => levels.findLast(({ network }) => network)

/** What every level says of the drawing. */
async function show() {
  drawSeen()
  const drawn = pixels
  const best = bestLevel()
  if (!drawn) $('answer').textContent = '?'
  $('by').textContent = best ? drawn ? `says ${best.title}` : `${best.title} is ready` : 'no network yet'
  for (const one of levels) {
    if (!one.network) continue
    const odds = drawn && await one.network(drawn)
    if (drawn !== pixels) return // drawn on meanwhile
    const digit = odds ? String(odds.indexOf(Math.max(...odds))) : '–'
    one.card.querySelector('.digit').textContent = digit
    one.card.querySelectorAll('.bars i').forEach((bar, i) => { bar.style.height = `${odds ? 100 * odds[i] : 0}%` })
    if (one === best && odds) $('answer').textContent = digit
  }
}

/** The share of the test images that a level gets right, a few at a time so that the page stays quick. */
async function measure(one, signal) {
  const { images, labels } = await test
  const { network } = one
  let right = 0
  let time = 0
  for (let i = 0; i < labels.length; i++) {
    const before = performance.now()
    const odds = await network(images.subarray(64 * i, 64 * i + 64))
    time += performance.now() - before
    right += odds.indexOf(Math.max(...odds)) === labels[i] ? 1 : 0
    if (i % 8 === 7) await pause(0)
    if (signal.aborted || one.network !== network) return // another engine meanwhile
  }
  one.fill('measured', percent(right / labels.length))
  one.fill('time', `${(time / labels.length).toFixed(2)} ms`)
}

/** 360 images of the data set that were not trained on: 64 pixels of 0…16 each, and the digit that each is. */
const test = (async () => {
  const bytes = new Uint8Array(await (await fetch('digits.bin')).arrayBuffer())
  const count = bytes.length / 65
  return { images: bytes.subarray(0, 64 * count), labels: bytes.subarray(64 * count) }
})()

// --- Pictures ---------------------------------------------------------------------------------------------------------

function drawSeen() {
  const context = $('seen').getContext('2d')
  const [r, g, b] = rgb(colour('--ink'))
  const image = context.createImageData(8, 8)
  pixels?.forEach((value, i) => image.data.set([r, g, b, 255 * value / 16], 4 * i))
  context.putImageData(image, 0, 0)
}

/** Every weight as a dot, in the colour of the level it came with; strong ones are strong. */
function drawWeights() {
  const best = levels.findLast(({ tensors }) => tensors)
  const canvas = $('weights')
  const names = best ? [...delivery.profile.nested.keys()] : []
  const count = names.reduce((sum, name) => sum + elements(name), 0)
  canvas.width = matchMedia('(max-width: 40rem)').matches ? 240 : 480
  canvas.height = Math.ceil((count || 48_000) / canvas.width)
  const context = canvas.getContext('2d')
  const image = context.createImageData(canvas.width, canvas.height)
  const low = best ? 2 ** delivery.profile.bits - 1 : 0
  const colours = levels.map(({ level }) => rgb(colour(`--level-${level}`)))
  let at = 0
  for (const name of names) {
    const { data } = best.tensors.get(name)
    const words = new Uint32Array(data.buffer, data.byteOffset, data.length)
    const scale = Math.sqrt(data.reduce((sum, x) => sum + x * x, 0) / data.filter(Boolean).length)
    for (let i = 0; i < words.length; i++, at += 4) {
      if (!words[i]) continue
      const counter = words[i] & low
      const [r, g, b] = colours[counter ? counter - 1 : colours.length - 1]
      image.data.set([r, g, b, Math.min(255, 70 + 150 * Math.abs(data[i]) / scale)], at)
    }
  }
  context.putImageData(image, 0, 0)
  $('legend').replaceChildren(...levels.map(({ card, mark }) => {
    const item = document.createElement('span')
    item.style.setProperty('--mark', mark)
    item.innerHTML = '<i class="swatch"></i>'
    item.append(card.querySelector('.name').textContent)
    return item
  }))
}

function rgb(hex) {
  return [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16))
}

// --- Controls ---------------------------------------------------------------------------------------------------------

$('again').addEventListener('click', deliver)
$('speed').addEventListener('change', deliver)
$('clear').addEventListener('click', () => pad.clear())
$('example').addEventListener('click', async () => {
  const { images, labels } = await test
  const i = Math.floor(Math.random() * labels.length)
  pad.clear()
  pixels = images.subarray(64 * i, 64 * i + 64)
  $('truth').textContent = `a test image of a ${labels[i]}`
  show()
})
$('engine').addEventListener('change', async () => {
  const { signal } = stopped
  const before = $('status').textContent
  if ($('engine').value === 'ort') $('status').textContent = 'Starting ONNX Runtime Web (14 MB)…'
  try {
    for (const one of levels) if (one.tensors) await start(one)
    $('status').textContent = before
    await show()
    for (const one of levels) if (one.network && !signal.aborted) await measure(one, signal)
  } catch (error) {
    $('status').textContent = `ONNX Runtime Web does not start: ${error.message}`
    $('engine').value = 'plain'
  }
})
for (const change of ['(prefers-color-scheme: dark)', '(max-width: 40rem)']) {
  matchMedia(change).addEventListener('change', () => {
    pad.render()
    drawSeen()
    drawWeights()
  })
}

if ((await (await fetch('engines.json')).json()).ort) {
  const [, option] = $('engine').options
  option.disabled = false
  option.textContent = 'ONNX Runtime Web'
}
deliver()
