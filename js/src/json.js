import { fail, show } from './errors.js'

/**
 * A JSON value as restricted JSON has it (elsa-1.0.md §3.2). Objects are Maps, so that no name is special. Integers above
 * 2^53 − 1, which only headers hold, are bigints; a number that was written with a fraction or an exponent is a `Real`.
 * @typedef {null | boolean | number | bigint | string | Real | any[] | Map<string, any>} Json
 */

/** A number that is not an integer as it was written: 1.0, 1e3. */
export class Real {
  /** @param {number} value */
  constructor(value) {
    this.value = value
  }

  toString() {
    return `the real number ${this.value}`
  }
}

const DEPTH = 32
const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/y
/** @type {Record<string, string>} */
const ESCAPES = { '"': '"', '\\': '\\', '/': '/', b: '\b', f: '\f', n: '\n', r: '\r', t: '\t' }

/**
 * The object that a document holds, or `InvalidJson`, or `DuplicateKey`.
 * @param {Uint8Array | string} source
 * @param {string} what the document, for messages
 * @param {boolean} [header] whether the stricter rules of a header hold
 * @returns {Map<string, any>}
 */
export function parseJson(source, what, header = false) {
  const text = typeof source === 'string' ? source : decodeUtf8(source, what)
  let at = 0

  /** @returns {never} */
  function invalid(expected = 'valid JSON') {
    const found = at < text.length ? `U+${text.charCodeAt(at).toString(16).toUpperCase().padStart(4, '0')}` : 'its end'
    fail('InvalidJson', `${what}: ${found} at character ${at}, expected ${expected}`)
  }

  function space() {
    for (let c; (c = text.charCodeAt(at)) === 32 || c === 10 || c === 13 || c === 9;) at++
  }

  /** @returns {string} */
  function string() {
    if (text[at] !== '"') invalid('a string')
    let start = ++at
    let result = ''
    for (;;) {
      const c = text.charCodeAt(at)
      if (c === 34) return result + text.slice(start, at++)
      if (!(c >= 32)) invalid('no control character')
      if (c === 92) {
        result += text.slice(start, at++)
        result += escape()
        start = at
      } else at++
    }
  }

  /** @returns {string} */
  function escape() {
    const simple = ESCAPES[text[at]]
    if (simple) {
      at++
      return simple
    }
    const unit = hex()
    if (unit < 0xd800 || unit > 0xdfff) return String.fromCharCode(unit)
    // Raw text has whole characters only, so the other half must be an escape too.
    const low = unit < 0xdc00 && text[at] === '\\' ? (at++, hex()) : 0
    if (low < 0xdc00 || low > 0xdfff) invalid('no lone surrogate')
    return String.fromCharCode(unit, low)
  }

  /** @returns {number} */
  function hex() {
    const digits = text.slice(at + 1, at + 5)
    if (text[at] !== 'u' || !/^[0-9a-fA-F]{4}$/.test(digits)) invalid('an escape')
    at += 5
    return parseInt(digits, 16)
  }

  /** @returns {Json} */
  function number() {
    NUMBER.lastIndex = at
    const found = NUMBER.exec(text)
    if (!found) invalid('a value')
    const [all, fraction, exponent] = found
    if (header && (all[0] === '-' || fraction || exponent)) invalid('an integer without sign')
    let value
    if (fraction || exponent) {
      value = new Real(Number(all))
      if (!Number.isFinite(value.value)) invalid('a number in the range of doubles')
    } else if (Number.isSafeInteger(Number(all))) {
      value = Number(all) + 0 // -0 is the integer 0
    } else {
      if (!header || all.length > 19 || BigInt(all) >> 63n) invalid(`an integer up to 2^${header ? 63 : 53} − 1`)
      value = BigInt(all)
    }
    at += all.length
    return value
  }

  /** @param {number} depth @returns {Json} */
  function value(depth) {
    space()
    const c = text[at]
    if (c === '{' || c === '[') {
      if (depth > DEPTH) invalid(`at most ${DEPTH} levels`)
      at++
      return c === '{' ? object(depth) : array(depth)
    }
    if (c === '"') return string()
    if (text.startsWith('true', at)) return (at += 4, true)
    if (text.startsWith('false', at)) return (at += 5, false)
    if (text.startsWith('null', at)) return (at += 4, null)
    return number()
  }

  /** @param {number} depth @returns {Map<string, Json>} */
  function object(depth) {
    const result = new Map()
    for (let first = true; more('}', first); first = false) {
      const key = string()
      space()
      if (text[at++] !== ':') invalid('":"')
      if (result.has(key)) fail('DuplicateKey', `${what}: an object holds ${show(key)} twice`)
      result.set(key, value(depth + 1))
    }
    return result
  }

  /** @param {number} depth @returns {Json[]} */
  function array(depth) {
    const result = []
    for (let first = true; more(']', first); first = false) result.push(value(depth + 1))
    return result
  }

  /** Whether another element follows. @param {string} end @param {boolean} first */
  function more(end, first) {
    space()
    if (text[at] === end) return at++, false
    if (!first) {
      if (text[at] !== ',') invalid(`"," or "${end}"`)
      at++
      space()
    }
    return true
  }

  if (!header) space()
  if (text[at] !== '{') invalid('an object')
  const result = /** @type {Map<string, any>} */ (value(1))
  if (header) while (text[at] === ' ') at++
  else space()
  if (at < text.length) invalid('the end')
  return result
}

/**
 * @param {Uint8Array} bytes
 * @param {string} what
 * @returns {string}
 */
function decodeUtf8(bytes, what) {
  try {
    // A byte order mark stays in the text, where it is no JSON.
    return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes)
  } catch {
    fail('InvalidJson', `${what}: not UTF-8`)
  }
}
