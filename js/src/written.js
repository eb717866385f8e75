/**
 * JSON as Writers write it (elsa-1.0.md §3.5): without whitespace, Maps in their order, others with sorted keys.
 * @param {unknown} value
 * @returns {string}
 */
export function writeJson(value) {
  if (value instanceof Map) return object([...value])
  if (Array.isArray(value)) return `[${value.map(writeJson).join(',')}]`
  if (typeof value === 'number') return writeNumber(value)
  if (typeof value === 'bigint') return String(value)
  if (value && typeof value === 'object') {
    return object(Object.entries(value).filter(([, v]) => v !== undefined).sort(([a], [b]) => compareText(a, b)))
  }
  return JSON.stringify(value)
}

/** @param {[string, unknown][]} entries */
function object(entries) {
  return `{${entries.map(([key, value]) => `${JSON.stringify(key)}:${writeJson(value)}`).join(',')}}`
}

/** @param {number} value */
function writeNumber(value) {
  const text = String(value)
  // ECMAScript writes integers up to 10^21 with digits alone; from 2^53 on they need an exponent here.
  if (Math.abs(value) <= Number.MAX_SAFE_INTEGER || text.includes('e')) return text
  const digits = text.replace('-', '')
  const shortest = digits.replace(/0+$/, '')
  const rest = shortest.slice(1)
  return `${value < 0 ? '-' : ''}${shortest[0]}${rest && '.'}${rest}e+${digits.length - 1}`
}

/**
 * Order by code points, which is that of the UTF-8 bytes; `<` compares UTF-16 units.
 * @param {string} a
 * @param {string} b
 * @returns {number}
 */
export function compareText(a, b) {
  const length = Math.min(a.length, b.length)
  for (let i = 0; i < length; i++) {
    const x = a.charCodeAt(i)
    const y = b.charCodeAt(i)
    // Surrogates stand for characters above all that one unit can hold.
    if (x !== y) return (x & 0xf800) === 0xd800 === ((y & 0xf800) === 0xd800) ? x - y : (x & 0xf800) === 0xd800 ? 1 : -1
  }
  return a.length - b.length
}
