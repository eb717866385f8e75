/**
 * A zlib stream (RFC 1950) that is exactly these bytes and gives exactly so many, or nothing.
 * @param {Uint8Array} bytes
 * @param {number} size
 * @returns {Promise<Uint8Array | undefined>}
 */
export async function inflate(bytes, size) {
  const out = await decompress([bytes], size)
  // Some runtimes let bytes behind the end pass, others let the end be missing, none both. So of a stream that is whole
  // either the one without its last byte is refused, or the one with a byte too many, which is what would come next
  // were it cut in its checksum.
  const loose = out && await decompress([bytes.subarray(0, -1)], size) && await decompress([bytes, Uint8Array.of(adler32(out))], size)
  return loose ? undefined : out
}

/**
 * @param {Uint8Array[]} pieces
 * @param {number} size
 * @returns {Promise<Uint8Array | undefined>}
 */
async function decompress(pieces, size) {
  const blob = new Blob(/** @type {BlobPart[]} */ (pieces))
  const reader = blob.stream().pipeThrough(new DecompressionStream('deflate')).getReader()
  const out = new Uint8Array(size)
  let at = 0
  try {
    for (let step; !(step = await reader.read()).done; at += step.value.length) out.set(step.value, at)
    return at === size ? out : undefined
  } catch {
    // Not zlib, or more than there is room for.
    await reader.cancel().catch(() => {})
    return undefined
  }
}

/** The lowest bits of Adler-32. @param {Uint8Array} bytes */
function adler32(bytes) {
  let sum = 1
  for (const byte of bytes) sum = (sum + byte) % 65521
  return sum
}
