import { fail, say, within } from './errors.js'

/**
 * A JSON value as restricted JSON has it (elsa-1.0.md §3.2). Objects are Maps, so that no name is special. Integers above
 * 2^53 − 1, which only headers hold, are bigints; a number that was written with a fraction or an exponent is a `Real`.
 * @typedef {null | boolean | number | bigint | string | Real | any[] | Map<string, any>} Json
 */

/** A number that is not an integer as it was written: 1.0, 1e3. */
export class Real extends Number {
  /** @param {string} written */
  constructor(written) {
    super(written)
    this.written = written
  }
}

const DEPTH = 32
const END = Symbol()

/**
 * The object that a document holds, or `InvalidJson`, or `DuplicateKey`. `JSON.parse` says whether it is JSON at all; it
 * hides equal keys, how numbers were written, and lone surrogates, so the text is gone through once more.
 * @param {Uint8Array | string} source
 * @param {string} what the document, for messages
 * @param {boolean} [header] whether the stricter rules of a header hold
 * @returns {Map<string, any>}
 */
export function parseJson(source, what, header) {
  /** @param {string} found @returns {never} */
  const invalid = found => fail('InvalidJson', `${what}: ${found}`)
  let text = ''
  try {
    // A byte order mark stays in the text, where it is no JSON.
    text = typeof source === 'string' ? source : new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(source)
    JSON.parse(text)
  } catch (error) {
    invalid(say`no JSON: ${/** @type {Error} */ (error).message}`)
  }
  // As it is JSON, commas and colons tell nothing that brackets and values do not.
  const token = /[\s,:]*(["{}[\]]|[^\s,}\]]+)/y

  /** The string behind a quote. @returns {string} */
  function string() {
    const begin = token.lastIndex
    let end = begin
    while (text[end] !== '"') end += text[end] === '\\' ? 2 : 1
    token.lastIndex = end + 1
    const value = JSON.parse(text.slice(begin - 1, end + 1))
    return /\p{Surrogate}/u.test(value) ? invalid('string has a lone surrogate, expected none') : value
  }

  /** @param {string} word @returns {Json} */
  function scalar(word) {
    const value = JSON.parse(word)
    if (typeof value !== 'number') return value
    const real = /[.e]/i.test(word)
    if (header && (real || word[0] === '-')) invalid(say`number is ${word}, expected digits alone`)
    if (real && Number.isFinite(value)) return new Real(word)
    if (Number.isSafeInteger(value)) return value + 0 // -0 is the integer 0
    const large = !real && header && word.length < 20 && BigInt(word)
    return large && !(large >> 63n) ? large : invalid(say`number is ${word}, expected less than 2^${header ? 63 : 53}`)
  }

  /** @param {number} depth @returns {any} */
  function value(depth) {
    const [, word] = /** @type {RegExpExecArray} */ (token.exec(text))
    if (word === '"') return string()
    if (word === '}' || word === ']') return END
    if (word !== '{' && word !== '[') return scalar(word)
    within('InvalidJson', `${what}: depth`, depth, 1, DEPTH)
    const map = new Map()
    const list = []
    for (let one; (one = value(depth + 1)) !== END;) {
      if (word === '[') list.push(one)
      else if (map.has(one)) fail('DuplicateKey', what + say`: ${one} is there twice, expected once`)
      else map.set(one, value(depth + 1))
    }
    return word === '[' ? list : map
  }

  if (!(header ? /^\{[^]*\} *$/ : /^\s*\{/).test(text)) invalid(say`text is ${text.slice(0, 9)} to ${text.slice(-9)}, expected an object`)
  return value(1)
}
