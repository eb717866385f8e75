/**
 * JSON as Writers write it (elsa-1.0.md §3.5): without whitespace, Maps and objects in their order and without what is
 * undefined. There are no numbers but integers.
 * @param {any} value
 * @returns {string}
 */
export function writeJson(value) {
  if (Array.isArray(value)) return `[${value}]`
  if (typeof value !== 'object') return JSON.stringify(value)
  const fields = [...value instanceof Map ? value : Object.entries(value)].filter(([, one]) => one !== undefined)
  return `{${fields.map(([key, one]) => `${JSON.stringify(key)}:${writeJson(one)}`)}}`
}

/**
 * Order by code points, which is that of the UTF-8 bytes; `<` compares UTF-16 units.
 * @param {string} a
 * @param {string} b
 * @returns {number}
 */
export function compareText(a, b) {
  // Surrogates stand for characters above all that one unit can hold: they change places with those behind them.
  const [x, y] = [a, b].map(text => text.replace(/[\ud800-\uffff]/g, c =>
    String.fromCharCode(c.charCodeAt(0) + (c < '\ue000' ? 0x2000 : -0x800))))
  return x < y ? -1 : x > y ? 1 : 0
}
