// What elsa-format/run makes of levels: numbers, to be compared with Python's.

/** Each network at level 1 and upgraded; each run twice, once with other sizes between. @param {Function} open @param {string} base */
export async function runTasks(open, base) {
  const found = {}
  const ints = (list, dims) => ({ type: 'int64', data: BigInt64Array.from(list, BigInt), dims })
  const words = (list, dims) => ({ input_ids: ints(list, dims), attention_mask: ints(list.map(id => Number(id > 0)), dims), token_type_ids: ints(list.map(() => 0), dims) })
  const two = words([2, 5, 6, 7, 3, 2, 8, 9, 3, 0], [2, 5])
  const pixels = n => ({ pixel_values: { data: Float32Array.from({ length: 3 * n * n }, (_, i) => Math.sin(i)), dims: [1, 3, n, n] } })
  const first = async (net, feeds) => Array.from(Object.values(await net.run(feeds))[0].data)
  const tasks = {
    bert: [net => first(net, two), net => first(net, words([2, 5, 3, 2, 7, 3, 2, 9, 3], [3, 3]))],
    cls: [net => first(net, two), net => first(net, words([2, 5, 3], [1, 3]))],
    cnn: [net => first(net, pixels(32)), net => first(net, pixels(21))],
    dec: [net => generate(net, ints), async net => generate(net, ints, 2)],
  }
  for (const [name, [task, other]] of Object.entries(tasks)) {
    const net = await open(`${base}${name}/`, { cache: false })
    for (const level of [1, 2, 'dense']) {
      await net.upgrade(level)
      await task(net)
      await other(net)
      found[`${name} ${level}`] = await task(net)
    }
    await net.close()
  }
  return found
}

/** Tokens one after the other, with the keys and values of those before. */
async function generate(net, ints, steps = 6) {
  const ids = [5, 6, 7]
  let past = Object.fromEntries(net.inputs.filter(name => name.startsWith('past')).map(name => [name, { data: new Float32Array(0), dims: [1, 4, 0, 16] }]))
  for (let seen = 0; steps--;) {
    const given = ids.slice(seen)
    const places = given.map((_, i) => seen + i)
    seen = ids.length
    const { logits, ...present } = await net.run({
      input_ids: ints(given, [1, given.length]), attention_mask: ints(ids.map(() => 1), [1, ids.length]), position_ids: ints(places, [1, given.length]), ...past,
    })
    const last = Array.from(logits.data.slice(-logits.dims[2]))
    ids.push(last.indexOf(Math.max(...last)))
    past = Object.fromEntries(Object.entries(present).map(([name, value]) => [name.replace('present', 'past_key_values'), value]))
  }
  return ids
}
