// Round constants and start: the fractions of the cube and square roots of the first primes.
const K = new Int32Array(64)
const START = new Int32Array(8)
for (let prime = 2, found = 0; found < 64; prime++) {
  let divisor = 2
  while (prime % divisor) divisor++
  if (divisor < prime) continue
  START[found] = prime ** (1 / 2) % 1 * 2 ** 32
  K[found++] = Math.cbrt(prime) % 1 * 2 ** 32
}

/** @param {number} x @param {number} n */
const rotate = (x, n) => x >>> n | x << 32 - n

/**
 * SHA-256 of bytes that come in pieces.
 * @typedef {{update: (bytes: Uint8Array) => unknown, hex: () => string}} Hash `hex` gives the hash; no more can be added
 */

/** @returns {Hash} */
export function plainSha256() {
  const state = START.slice()
  const block = new Uint8Array(64)
  const words = new Int32Array(64)
  let size = 0

  /** @param {DataView} view of 64 bytes */
  function rounds(view) {
    let [a, b, c, d, e, f, g, h] = state
    for (let i = 0; i < 64; i++) {
      const x = words[i - 15]
      const y = words[i - 2]
      words[i] = i < 16 ? view.getInt32(4 * i)
        : words[i - 16] + words[i - 7] + (rotate(x, 7) ^ rotate(x, 18) ^ x >>> 3) + (rotate(y, 17) ^ rotate(y, 19) ^ y >>> 10)
      const first = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + (e & f ^ ~e & g) + K[i] + words[i] | 0
      const second = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + (a & b ^ a & c ^ b & c)
      h = g
      g = f
      f = e
      e = d + first | 0
      d = c
      c = b
      b = a
      a = first + second | 0
    }
    for (const [i, x] of [a, b, c, d, e, f, g, h].entries()) state[i] += x
  }

  /** @param {Uint8Array} bytes */
  function update(bytes) {
    for (let at = 0; at < bytes.length;) {
      const used = size % 64
      const piece = bytes.subarray(at, at + 64 - used)
      at += piece.length
      size += piece.length
      if (piece.length === 64) rounds(new DataView(piece.buffer, piece.byteOffset))
      else {
        block.set(piece, used)
        if (size % 64 === 0) rounds(new DataView(block.buffer))
      }
    }
  }

  function hex() {
    const padding = new Uint8Array((size % 64 < 56 ? 64 : 128) - size % 64)
    padding[0] = 128
    new DataView(padding.buffer).setBigUint64(padding.length - 8, 8n * BigInt(size))
    update(padding)
    return [...state].map(x => (x >>> 0).toString(16).padStart(8, '0')).join('')
  }
  return { update, hex }
}

/**
 * A SHA-256 in progress: that of Node.js, Deno and Bun where it is at hand, which is many times faster. Not WebCrypto's,
 * which takes all bytes at once, and which pages without HTTPS do not have.
 * @returns {Hash}
 */
export function sha256() {
  const native = /** @type {any} */ (globalThis).process?.getBuiltinModule?.('node:crypto')?.createHash('sha256')
  return native ? { update: bytes => native.update(bytes), hex: () => native.digest('hex') } : plainSha256()
}
