// What transformers.js makes of levels: numbers, to be compared with Python's.

/**
 * Each network at level 1 and upgraded, by a pipeline where it has a tokenizer, or by its model alone.
 * @param {any} library transformers.js
 * @param {Function} elsa
 * @param {string} base
 * @param {object} [more] options of elsa
 */
export async function tasks(library, elsa, base, more = {}) {
  const { AutoModel, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSequenceClassification, Tensor, pipeline } = library
  const ids = () => new Tensor('int64', BigInt64Array.from([2n, 5n, 6n, 7n, 3n, 2n, 8n, 9n, 3n, 0n]), [2, 5])
  const mask = () => new Tensor('int64', BigInt64Array.from([1n, 1n, 1n, 1n, 1n, 1n, 1n, 1n, 1n, 0n]), [2, 5])
  const words = async model => (await model({ input_ids: ids(), attention_mask: mask(), token_type_ids: ids().mul(0n) }))
  const wanted = {
    bert: [AutoModel, async model => (await words(model)).last_hidden_state],
    cls: [AutoModelForSequenceClassification, async model => (await words(model)).logits],
    cnn: [AutoModelForImageClassification, async model => {
      const pixels = Float32Array.from({ length: 3 * 32 * 32 }, (_, i) => Math.sin(i))
      return (await model({ pixel_values: new Tensor('float32', pixels, [1, 3, 32, 32]) })).logits
    }],
    dec: [AutoModelForCausalLM, async model => {
      const start = new Tensor('int64', BigInt64Array.from([5n, 6n, 7n]), [1, 3])
      const attention = new Tensor('int64', BigInt64Array.from([1n, 1n, 1n]), [1, 3])
      return model.generate({ inputs: start, attention_mask: attention, max_new_tokens: 6, do_sample: false })
    }],
  }
  const found = {}
  for (const [name, [kind, run]] of Object.entries(wanted)) {
    const net = await elsa(`${base}${name}/`, { level: 1, cache: false, ...more })
    for (const level of [1, 2, 'dense']) {
      await net.upgrade(level)
      const model = await kind.from_pretrained(name, net.options)
      const { data } = await run(model)
      found[`${name} ${level}`] = Array.from(data, Number)
      await model.dispose()
    }
    if (name === 'cls') {
      const classify = await pipeline('text-classification', name, net.options)
      found.pipeline = (await classify('the cat sat'))[0].label
      await classify.dispose()
    }
    await net.close()
  }
  return found
}
