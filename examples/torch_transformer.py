"""Fine-tune a small language model into nested levels with Hugging Face's Trainer.

pip install '.[transformers]' accelerate
python examples/torch_transformer.py
"""

import pydoc_data.topics
import tempfile
from pathlib import Path

import torch
from elsa_converters.transformers import ElsaConfig, use_level
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from elsa_train.torch.trainer import NestingCallback

# Text that every Python has: its own help. A token is a byte.
text = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // 64 * 64].view(-1, 64)
data = [{"input_ids": row.long(), "labels": row.long()} for row in rows]
train, test = data[:-200], data[-200:]
folder = Path(tempfile.mkdtemp())


def trainer(model: LlamaForCausalLM, steps: int, callbacks: list[NestingCallback]) -> Trainer:
    arguments = TrainingArguments(
        str(folder / "run"),
        max_steps=steps,
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=50,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    made = Trainer(model, arguments, train_dataset=train, eval_dataset=test, callbacks=callbacks)
    made.remove_callback(PrinterCallback)
    return made


def evaluate(model: LlamaForCausalLM) -> dict[str, float]:
    """Nats a byte, on text that was not trained with."""
    return {"loss": trainer(model, 1, []).evaluate()["eval_loss"]}


# A pretrained model, in place of one from the hub.
torch.manual_seed(0)
sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
trainer(model, 120, []).train()
print(f"pretrained: {evaluate(model)['loss']:.2f}")

# Two levels: each tensor loses the same share, embeddings and the head lose none.
levels = NestingCallback(
    "80,50",
    sparsify_steps=60,
    densify_steps=20,
    scope="uniform",
    exclude="lm_head",
    evaluate=lambda: evaluate(model),
)
trainer(model, levels.steps, [levels]).train()
model.save_pretrained(folder / "nested")
levels.nesting.write(folder / "nested" / "model.safetensors", force=True)

# Any level of it, from the directory.
loaded = LlamaForCausalLM.from_pretrained(
    folder / "nested", quantization_config=ElsaConfig(level="80%")
)
for frozen in levels.nesting.frozen:
    use_level(loaded, frozen.level.name)
    found = evaluate(loaded)["loss"]
    print(
        f"level {frozen.level.name}: {frozen.metrics['loss']:.2f} when frozen, {found:.2f} loaded"
    )
