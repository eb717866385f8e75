import { fail, show } from './errors.js'

/**
 * A JSON value as restricted JSON has it (elsa-1.0.md §3.2). Objects are Maps, so that no name is special. Integers above
 * 2^53 − 1, which only headers hold, are bigints; a number that was written with a fraction or an exponent is a `Real`.
 * @typedef {null | boolean | number | bigint | string | Real | any[] | Map<string, any>} Json
 */

/** A number that is not an integer as it was written: 1.0, 1e3. */
export class Real extends Number {
  toString() {
    return `the real number ${super.toString()}`
  }
}

const DEPTH = 32
const WORD = /true|false|null|-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/y

/**
 * The object that a document holds, or `InvalidJson`, or `DuplicateKey`.
 * @param {Uint8Array | string} source
 * @param {string} what the document, for messages
 * @param {boolean} [header] whether the stricter rules of a header hold
 * @returns {Map<string, any>}
 */
export function parseJson(source, what, header) {
  const text = typeof source === 'string' ? source : decodeUtf8(source, what)
  let at = 0

  /** @param {string} expected @returns {never} */
  function invalid(expected) {
    fail('InvalidJson', `${what}: ${at < text.length ? show(text[at]) : 'its end'} at character ${at}, expected ${expected}`)
  }

  function space() {
    for (let c; (c = text.charCodeAt(at)) === 32 || c === 10 || c === 13 || c === 9;) at++
  }

  /** Whether the next character is this one, which is passed. @param {string} c */
  function next(c) {
    return text[at] === c && ++at
  }

  /** @returns {string} */
  function string() {
    if (text[at] !== '"') invalid('a string')
    let end = at + 1
    for (let c; (c = text.charCodeAt(end)) !== 34; end++) {
      if (c === 92) end++
      if (end >= text.length) invalid('a closing quote')
    }
    try {
      // Of strings alone JSON.parse hides nothing but lone surrogates.
      const value = JSON.parse(text.slice(at, end + 1))
      if (/\p{Surrogate}/u.test(value)) throw 0
      at = end + 1
      return value
    } catch {
      invalid('a string without control characters and lone surrogates')
    }
  }

  /** @returns {Json} */
  function word() {
    WORD.lastIndex = at
    const [all, fraction, exponent] = WORD.exec(text) ?? invalid('a value')
    /** @type {Json} */
    let value = JSON.parse(all)
    if (typeof value === 'number') {
      if (header && (all[0] === '-' || fraction || exponent)) invalid('an integer without sign')
      if (!Number.isFinite(value)) invalid('a finite number')
      if (fraction || exponent) value = new Real(value)
      else if (!Number.isSafeInteger(value)) {
        if (!header || all.length > 19 || (value = BigInt(all)) >> 63n) invalid(`an integer up to 2^${header ? 63 : 53} − 1`)
      } else value += 0 // -0 is the integer 0
    }
    at += all.length
    return value
  }

  /** @param {number} depth @returns {Json} */
  function value(depth) {
    space()
    const c = text[at]
    if (c === '"') return string()
    if (c !== '{' && c !== '[') return word()
    if (depth > DEPTH) invalid(`at most ${DEPTH} levels`)
    at++
    const map = new Map()
    const list = []
    const end = c === '{' ? '}' : ']'
    for (let first = true; space(), !next(end); first = false) {
      if (!first) {
        if (!next(',')) invalid(`"," or "${end}"`)
        space()
      }
      if (c === '{') {
        const key = string()
        space()
        if (!next(':')) invalid('":"')
        if (map.has(key)) fail('DuplicateKey', `${what}: an object holds ${show(key)} twice`)
        map.set(key, value(depth + 1))
      } else list.push(value(depth + 1))
    }
    return c === '{' ? map : list
  }

  if (!header) space()
  if (text[at] !== '{') invalid('an object')
  const result = /** @type {Map<string, any>} */ (value(1))
  if (header) while (next(' '));
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
