// Every vector of spec/vectors against the package, in any runtime: files come through `read`, nothing else is needed.

const hex = bytes => [...new Uint8Array(bytes)].map(b => b.toString(16).padStart(2, '0')).join('')
const sha256 = async bytes => hex(await crypto.subtle.digest('SHA-256', bytes))
const encode = text => new TextEncoder().encode(text)
const WIDTHS = { F32: 4, BF16: 2, F16: 2, F64: 8 }

function join(pieces) {
  const result = new Uint8Array(pieces.reduce((sum, piece) => sum + piece.length, 0))
  let at = 0
  for (const piece of pieces) {
    result.set(piece, at)
    at += piece.length
  }
  return result
}

async function collect(pieces) {
  const found = []
  for await (const piece of pieces) found.push(piece)
  return join(found)
}

async function* streamed(stream) {
  const reader = stream.getReader()
  for (let step; !(step = await reader.read()).done;) yield step.value
}

/** The digest of a level as ELSA-R-058 words it, without a line of the package. */
async function digestOf(tensors, nested) {
  const lines = []
  // UTF-8 bytes as a string of code units compare as bytes do.
  const raw = name => String.fromCharCode(...encode(name))
  for (const [name, { dtype, shape, data }] of [...tensors].sort(([a], [b]) => raw(a) < raw(b) ? -1 : 1)) {
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
    let parts = [bytes]
    if (nested.has(name)) {
      const width = WIDTHS[dtype]
      const mask = new Uint8Array(Math.ceil(bytes.length / width / 8))
      const values = []
      for (let i = 0; i < bytes.length / width; i++) {
        const word = bytes.subarray(i * width, (i + 1) * width)
        if (!word.some(Boolean)) continue
        mask[i >> 3] |= 1 << (i & 7)
        values.push(word)
      }
      parts = [mask, join(values)]
    }
    const hashes = await Promise.all(parts.map(sha256))
    lines.push(encode(`${encode(name).length}:${name} ${dtype} [${shape}] ${hashes.join(' ')}\n`))
  }
  return `sha256:${await sha256(join(lines))}`
}

/**
 * @param {object} elsa the package
 * @param {(path: string) => Promise<Uint8Array | undefined>} read a file below spec/vectors
 * @param {{sizes?: number[], first?: boolean, only?: (vector: object) => boolean}} options bytes of a chunk, 0 for all at
 *   once; whether to stop at the first failure
 */
export async function checkVectors(elsa, read, { sizes = [0, 1, 7, 4096], first = false, only = () => true } = {}) {
  const manifest = JSON.parse(new TextDecoder().decode(await read('manifest.json')))
  const failures = []
  let count = 0
  for (const vector of manifest.vectors.filter(only)) {
    for (const size of sizes) {
      count++
      try {
        await checkVector(elsa, read, vector, size)
      } catch (error) {
        failures.push(`${vector.file}, chunks of ${size || 'all'}: ${error.message}`)
        if (first) return { count, failures }
      }
    }
  }
  return { count, failures }
}

async function checkVector(elsa, read, vector, size) {
  const folder = vector.file.replace(/[^/]*$/, '')
  const bytes = await read(vector.file)
  if (await sha256(bytes) !== vector.sha256) throw Error('the file is not that of the manifest')
  const chunked = whole => size ? (function* () {
    for (let at = 0; at < whole.length; at += size) yield whole.subarray(at, at + size)
  })() : whole
  const shards = as => vector.kind.endsWith('index') ? async name => {
    const shard = await read(folder + name)
    return shard && as(shard)
  } : undefined
  const files = shards(chunked)
  const source = () => chunked(bytes)
  const kind = vector.kind.replace(/_?index$/, '') || 'elsa'
  if (kind === 'plain') return expect(await codeOf(elsa.validate(source(), { kind: 'elsa' })), 'NotElsa', 'validate')
  expect(await codeOf(elsa.validate(source(), { kind, files })), vector.error, 'validate')
  if (vector.verdict === 'invalid') return checkRefused(elsa, vector, kind, source, files, size)
  // A shard that is not read adds nothing to a digest, and has no fault.
  const [found, whole] = [await elsa.validate(source(), { kind, files }), await elsa.validate(bytes, { kind, files: shards(shard => shard) })]
  expect(found.digests, whole.digests, 'digests compared')
  if (kind === 'elsa') await checkElsa(elsa, vector, source, files)
  if (kind === 'level') await checkLevel(elsa, read, vector, source, files, bytes, chunked)
  if (kind === 'delivery') await checkDelivery(elsa, vector, source, files)
}

function expect(found, expected, what) {
  if (found !== expected) throw Error(`${what}: ${found ?? 'valid'}, expected ${expected ?? 'valid'}`)
}

async function codeOf(promise) {
  try {
    await promise
  } catch (error) {
    if (error.name !== 'ElsaError' || /\n/.test(error.message) || !error.message) throw error
    return error.code
  }
}

/** What a Reader sees, a Reader has to refuse; on opening, or on reading the level. */
async function checkRefused(elsa, vector, kind, source, files, size) {
  const { error, checked_by: by } = vector
  if (kind === 'elsa') {
    if (by === 'reader') expect(await codeOf(elsa.load(source(), { level: 'dense', files })), error, 'load')
    // Of a stream the size is not known.
    if (by === 'reader' && (!size || !['Truncated', 'TrailingData'].includes(error))) {
      expect(await codeOf(elsa.inspect(source(), { files })), error, 'inspect')
    }
    if (error === 'ChecksumMismatch') {
      expect(await codeOf(elsa.load(source(), { level: 1, files })), error, 'load')
      expect(await codeOf(drain(elsa.extract(source(), { level: 1 }))), error, 'extract')
    }
    if (error === 'CountMismatch' && by === 'full') {
      // Who extracts a level relies on the counts of that level.
      const { profile } = await elsa.inspect(source())
      const ways = Object.entries({
        load: level => elsa.load(source(), { level }),
        loadImage: level => elsa.loadImage(source(), { level }),
        ...Object.fromEntries(['dense', 'bitmask', 'csr'].map(layout => [layout, level => drain(elsa.extract(source(), { level, layout }))])),
      })
      for (const [way, read] of ways) {
        const codes = profile.levels.map(({ level }) => codeOf(read(level)))
        expect((await Promise.all(codes)).find(Boolean), error, way)
      }
    }
  }
  if (kind === 'level') expect(await codeOf(elsa.loadLevelFile(source(), { files })), error, 'loadLevelFile')
  if (kind === 'delivery' && by === 'full' && ['ChecksumMismatch', 'CountMismatch'].includes(error)) {
    const delivery = await elsa.openDelivery(source(), { files })
    expect(await codeOf(delivery.load('dense')), error, 'load')
  }
  if (kind === 'delivery' && by !== 'full') {
    if (by === 'reader' && size && error === 'TrailingData') return
    const opened = elsa.openDelivery(source(), { files })
    if (by === 'reader') expect(await codeOf(opened), error, 'openDelivery')
    else expect(await codeOf((await opened).load(vector.level)), error, `level ${vector.level}`)
  }
}

async function drain(stream) {
  for await (const _ of streamed(stream));
}

async function checkElsa(elsa, vector, source, files) {
  const { profile, metadata, tensors } = await elsa.inspect(source(), { files })
  const nested = new Set(profile.nested.keys())
  if (vector.bits) expect(profile.bits, vector.bits, 'bits')
  if (vector.levels) expect(profile.levels.length, vector.levels, 'levels')
  for (const [name, counts] of Object.entries(vector.counts ?? {})) expect(String(profile.nested.get(name)), String(counts), `counts of ${name}`)
  for (const [key, value] of Object.entries(vector.metadata ?? {})) expect(metadata.get(key), value, `metadata ${key}`)
  for (const [level, digest] of Object.entries(vector.digests ?? {})) {
    if (Number(level) > 4 && Number(level) < profile.levels.length) continue
    const loaded = await elsa.load(source(), { level: Number(level), files })
    expect(loaded.tensors.size, tensors.size, `tensors of level ${level}`)
    expect(await digestOf(loaded.tensors, nested), digest, `level ${level}`)
  }
  await elsa.load(source(), { level: 'dense', files })
}

async function checkLevel(elsa, read, vector, source, files, bytes, chunked) {
  const loaded = await elsa.loadLevelFile(source(), { files })
  if (vector.level) expect(loaded.level, vector.level, 'level')
  if (vector.layout) expect(loaded.layout, vector.layout, 'layout')
  if (!vector.source || vector.kind !== 'level') return
  const parent = await read(vector.source)
  const { profile } = await elsa.inspect(parent)
  expect(await digestOf(loaded.tensors, new Set(profile.nested.keys())), vector.digests[vector.level], 'digest')
  if (!vector.written) return
  const made = await collect(streamed(elsa.extract(chunked(parent), { level: vector.level, layout: loaded.layout })))
  expect(hex(made), hex(bytes), 'extract')
}

async function checkDelivery(elsa, vector, source, files) {
  const delivery = await elsa.openDelivery(source(), { files })
  const nested = new Set(delivery.profile.nested.keys())
  for await (const { level, tensors } of delivery.levels()) {
    const digest = vector.digests?.[level]
    if (digest) expect(await digestOf(tensors, nested), digest, `level ${level}`)
    if (vector.ends) expect(delivery.bytes(level), vector.ends[level === 'dense' ? vector.ends.length - 1 : level + 1], `bytes of ${level}`)
  }
  if (vector.whole) expect(await sha256(await collect(delivery.source())), vector.whole, 'source')
}
