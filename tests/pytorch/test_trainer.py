"""Levels that Hugging Face's Trainer trains."""

from pathlib import Path
from typing import Any

import pytest
import torch
from decoder import content, decode
from elsa_converters.transformers import ElsaConfig
from internals import TrainError
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import elsa_format
from elsa_train.torch import FinetuneOptions, Nesting
from elsa_train.torch.trainer import FinetuneCallback, NestingCallback

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


class Words(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sequences that are to be told apart by their first word."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        words = torch.randint(2, 32, (8,), generator=torch.Generator().manual_seed(i))
        words[0] = i % 2
        return {"input_ids": words, "labels": i % 2}


def trainer(folder: Path, callback: NestingCallback, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES, intermediate_size=32))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=options.pop("max_steps", callback.steps),
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
        save_strategy="steps",
        save_steps=options.pop("save_steps", 1000),
        **options,
    )
    return Trainer(model, arguments, train_dataset=Words(), callbacks=[callback])


def make(**options: Any) -> NestingCallback:
    return NestingCallback("90,50", sparsify_steps=8, densify_steps=3, **options)


def test_a_trainer_trains_levels(tmp_path: Path) -> None:
    states = []
    callback = make(scope="uniform")

    def evaluate() -> dict[str, float]:
        states.append({n: content(t) for n, t in work.model.state_dict().items()})
        return {"frozen": len(states)}

    callback.evaluate = evaluate
    work = trainer(tmp_path / "run", callback)
    with pytest.raises(TrainError, match="has not trained yet"):
        callback.nesting.write(tmp_path / "net.safetensors")
    work.train()
    assert [frozen.metrics for frozen in callback.nesting.frozen] == [{"frozen": 1}, {"frozen": 2}]
    folder = tmp_path / "model"
    work.model.save_pretrained(folder)
    callback.nesting.write(folder / "model.safetensors", force=True)
    for t in (1, 2):
        assert decode(folder / "model.safetensors", t) == states[t - 1]
    model = BertForSequenceClassification.from_pretrained(
        folder, quantization_config=ElsaConfig(level="90%")
    )
    assert {n: content(t) for n, t in model.state_dict().items()} == states[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run that is not interrupted writes."""
    folder, callback = tmp_path_factory.mktemp("whole"), make()
    trainer(folder, callback).train()
    callback.nesting.write(folder / "net.safetensors")
    return folder / "net.safetensors"


@pytest.mark.parametrize("at", [3, 8, 11])  # while it prunes, when it has frozen, at the next level
def test_resuming_gives_the_same_bytes(at: int, whole: Path, tmp_path: Path) -> None:
    trainer(tmp_path / "parts", make(), max_steps=at, save_steps=at).train()
    rest = make()
    trainer(tmp_path / "parts", rest).train(resume_from_checkpoint=True)
    rest.nesting.write(tmp_path / "net.safetensors")
    assert (tmp_path / "net.safetensors").read_bytes() == whole.read_bytes()


def test_a_schedule_longer_than_a_level() -> None:
    from elsa_train.torch import Schedule

    with pytest.raises(TrainError, match="ends at step 8 of 8 steps"):
        make(schedule=Schedule(0, 8, 1))


def finetuned(folder: Path, out: Path, steps: int, resume: bool | None = None) -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES, intermediate_size=32))
    with torch.no_grad():
        model.classifier.weight.mul_(500)  # so that it is sure of some answers
    net = out.parent / "net.safetensors"
    if not net.exists():
        elsa_format.pack(model.state_dict(), net, sparsities=[90, 50], exclude=["*embeddings*"])
    student = Nesting.from_file(model, net, FinetuneOptions(each="one"))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
        save_strategy="steps",
        save_steps=8,
        remove_unused_columns=False,
    )
    callback = FinetuneCallback(student, out, force=True)
    some = [{"input_ids": torch.stack([Words()[i]["input_ids"] for i in range(8)])}]
    before = student.measure(some)
    work = Trainer(student, arguments, train_dataset=Words(), callbacks=[callback])
    work.train(resume_from_checkpoint=resume)
    after = student.measure(some)
    if steps == 24:
        assert after[1]["loss"] < before[1]["loss"]


def test_a_trainer_fine_tunes_a_packed_file(tmp_path: Path) -> None:
    """And resumes: the file has the same bytes."""
    finetuned(tmp_path / "whole", tmp_path / "whole.safetensors", 24)
    with elsa_format.open(tmp_path / "whole.safetensors") as file:
        assert [level.name for level in file.levels] == ["90%", "50%"]
        assert "classifier.bias" in file.per_level
    finetuned(tmp_path / "parts", tmp_path / "parts.safetensors", 8)
    finetuned(tmp_path / "parts", tmp_path / "parts.safetensors", 24, resume=True)
    one, other = (tmp_path / f"{name}.safetensors" for name in ("whole", "parts"))
    assert one.read_bytes() == other.read_bytes()
