"""Recipes: the paper's values, and files that careless or hostile people write."""

import dataclasses
import os
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner
from internals import (
    CHOICES,
    FIELDS,
    RULES,
    BadRecipe,
    InvalidRecipe,
    TrainError,
    make_optimizer,
    make_recipe,
    train,
)

from elsa_train import Recipe, read_recipe


def test_appendix_hyperparameters():
    cifar10, cifar100, imagenet = map(
        read_recipe, ("cifar10-speedyresnet", "cifar100-wrn28-10", "imagenet-resnet50")
    )
    assert [r.batch_size for r in (cifar10, cifar100, imagenet)] == [512, 256, 1024]
    assert [r.learning_rate for r in (cifar10, cifar100, imagenet)] == [0.2, 0.1, 0.1]
    assert [r.epochs for r in (cifar10, cifar100, imagenet)] == [30, 100, 100]
    assert [r.warmup_epochs for r in (cifar10, cifar100, imagenet)] == [3, 3, 5]
    assert [r.weight_decay for r in (cifar10, cifar100, imagenet)] == [0.0005, 0.0005, 0.0001]
    assert [r.dropout for r in (cifar10, cifar100, imagenet)] == [0, 0, 0.3]
    assert [r.dtype for r in (cifar10, cifar100, imagenet)] == ["float32", "bfloat16", "bfloat16"]
    assert [r.decay for r in (cifar10, cifar100, imagenet)] == ["", "", "kernel$"]
    for recipe in (cifar10, cifar100, imagenet):
        assert (recipe.momentum, recipe.nesterov, recipe.label_smoothing) == (0.9, True, 0.1)
        assert recipe.densify_factor == recipe.densify_between_factor == 0.01


def test_the_papers_commands_train_on_all_images():
    page = (Path(__file__).parents[2] / "docs" / "paper.md").read_text("utf-8")
    commands = re.findall(r"`elsa-train (\S+) (--[^`]+)`", page)
    assert {name for name, _ in commands} == {
        "cifar10-stress", "cifar100-wrn28-10", "imagenet-resnet50"
    }  # fmt: skip
    for name, options in commands:
        values = train.get_command(None, name).make_context(name, shlex.split(options)).params
        given = {k: v for k, v in values.items() if k in FIELDS and v is not None}
        assert read_recipe(name, given).validation == 0
    assert read_recipe("imagenet-resnet50").validation > 0


def test_weights_decay_by_name():
    params = {"norm": {"scale": jnp.ones(3)}, "conv": {"kernel": jnp.ones((2, 3))}}
    for name, decayed in (
        ("imagenet-resnet50", {"kernel"}),
        ("cifar10-stress", {"kernel", "scale"}),
    ):
        recipe = read_recipe(name)
        optimizer = make_optimizer(recipe)
        zero = jax.tree.map(jnp.zeros_like, params)
        updates, _ = optimizer.update(zero, optimizer.init(params), params)
        found = {k: float(v.max()) for layer in updates.values() for k, v in layer.items()}
        expected = -(1 + recipe.momentum) * recipe.weight_decay  # Nesterov's first step
        for kind in ("kernel", "scale"):
            assert found[kind] == pytest.approx(expected if kind in decayed else 0.0)


BAD = [
    ('dataset = "os:system"\ndata_dir = "touch stolen"', "would run code"),
    ('[nm]\nlevels = "1:8"\ndataset = "os:system"', "would run code"),
    ('scope = "nm"\nlevels = "1:8"\n[global]\nlevels = "90"\ndataset = "a.b:c"', "would run code"),
    ('dataset = "os.system"', "expected one of"),
    ('model = "os:system"', "would run code"),
    ('augment = "os:system"', "expected one of"),
    ('score = "os:system"', "expected one of"),
    ('optimizer = "lion"', "expected one of sgd"),
    ("momentun = 0.9", "unknown value 'momentun'"),
    ("[unform]\nlevels = '90'", "unknown table"),
    ("[[global]]\nlevels = '90'", "unknown value 'global'"),
    ('[nm]\nlevels = "1:8"\nscope = "global"', "above the tables"),
    ("[nm]\nlevels = '1:8'\nmomentun = 1", "unknown value 'momentun'"),
    ('scope = ["nm"]', "expected one of"),
    ('epochs = "many"', "expected float"),
    ("nesterov = 1", "expected bool"),
    ("width = true", "expected int"),
    ("width = 8.0", "expected int"),
    ("dataset = 1979-05-27", "expected str"),
    ("epochs = inf", "finite"),
    ("learning_rate = inf", "finite"),
    ("weight_decay = nan", "finite"),
    ("densify_factor = -nan", "finite"),
    ("epochs = 1e9", "at most"),
    ("epochs = -1", "at least 0"),
    ("sparsify_epochs = 0", "above 0"),
    (f"epochs = {'9' * 400}", "too large"),
    (f"epochs = {'9' * 5000}", "digits"),
    ("width = -1", "at least 0"),
    ("width = 10000000000", "at most"),
    ("dropout = 7", "below 1"),
    ("dropout = 1", "below 1"),
    ("momentum = 1", "below 1"),
    ("label_smoothing = -0.1", "at least 0"),
    ("batch_size = 0", "at least 1"),
    ("mask_every = 0", "at least 1"),
    ("train_images = -5", "at least 0"),
    ("bits = 9", "at most 8"),
    ("axis = 64", "at most 63"),
    ("prune_end = 2.0", "prune_end"),
    ("prune_start = 0.9\nprune_end = 0.5", "prune_start <= prune_end"),
    ('prune = "("', "no regular expression"),
    ('exclude = "a{99999999999}"', "no regular expression"),
    ('decay = "["', "no regular expression"),
    (f'prune = "{"(" * 9000}{")" * 9000}"', "no regular expression"),
    ('data_dir = "a\\u0000b"\ndataset = "mnist"', "NUL"),
    ('levels = ""', "expected percent"),
    ('levels = "80,90"', "must fall"),
    ('levels = "1e999999999"', "expected percent"),
    ('levels = "1:8"', "takes sparsities"),
    ('levels = "2:999999999999,3:999999999998"\nscope = "nm"', "may be frozen"),
    ('levels = "99.9,99.8,99.7,99.6"\nbits = 2', "counter bits"),
    ("x = " + "[" * 50_000 + "]" * 50_000, "nested too deep"),
    ("x = {a." + "b." * 5000 + "c = 1}", "unknown table"),
    ("x =", "Invalid"),
    (b"\xff\xfe", "utf-8"),
    (b"\0", "Invalid"),
    (b"#" * (1 << 20) + b"\n", "no recipe is"),
]


@pytest.mark.parametrize(("content", "reason"), BAD, ids=range(len(BAD)))
def test_a_bad_file_is_one_line_and_exit_code_3(content, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InvalidRecipe, match=reason):
        read_recipe("bad.toml")
    found = CliRunner().invoke(train, ["bad.toml", "--epochs", "1", "--dataset", "digits"])
    assert found.exit_code == 3
    assert found.output.startswith("error: bad.toml: ")
    assert found.output.count("\n") == 1
    assert os.listdir() == ["bad.toml"]


def test_files_that_cannot_be_read_are_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    for name, reason in (
        ("folder.toml", "Is a directory"),
        ("loop.toml", "Too many levels"),
        ("nowhere.toml", "No such file"),
    ):
        found = CliRunner().invoke(train, [name, "--help"])
        assert found.exit_code == 1
        assert found.output.startswith(f"error: {name}: {reason}")


def test_a_recipe_cannot_steer_the_terminal(tmp_path):
    path = tmp_path / "loud.toml"
    path.write_text('summary = "\\u001b[2J"\nexclude = "\\u001b]31m"')
    found = CliRunner().invoke(train, [str(path), "--help"])
    assert found.exit_code == 0
    assert "\x1b" not in found.output


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"momentun": 0.9}, "unknown value 'momentun'"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": "8"}, "expected int"),
        ({"dataset": "imaginary"}, "module:name"),
        ({"scope": "nm", "levels": "90"}, "N:M"),
        ({"scope": "both"}, "has no scope 'both'"),
    ],
)
def test_bad_overrides_are_exit_code_2(values, reason):
    with pytest.raises(TrainError, match=reason) as found:
        read_recipe("digits", values)
    assert found.value.exit_code == 2


def test_only_the_command_line_and_python_name_code():
    assert read_recipe("digits", {"dataset": "mydata:Load"}).dataset == "mydata:Load"
    assert Recipe(dataset="my.data:Load").dataset == "my.data:Load"
    for value in ("mydata:", ":Load", "my data:Load", "a:b(c)"):
        with pytest.raises(BadRecipe, match="module:name"):
            Recipe(dataset=value)


def test_a_scope_without_a_table_takes_what_stands_above():
    found = {"levels": "90", "exclude": "head"}
    assert make_recipe(found, {"scope": "uniform"}).levels == "90"
    assert make_recipe(found, {"scope": "nm", "levels": "1:8"}).exclude == "head"
    tables = {"scope": "uniform", "nm": {"levels": "1:8"}}
    assert make_recipe(tables).scope == "uniform"
    assert make_recipe(tables, {"scope": "nm"}).levels == "1:8"
    with pytest.raises(BadRecipe, match="has no scope 'global', only nm, uniform"):
        make_recipe(tables, {"scope": "global"})


def test_every_number_has_limits_and_every_choice_is_there():
    for name, field in FIELDS.items():
        if type(field.default) is int:
            assert {"at_least", "at_most"} <= field.metadata.keys(), name
        if type(field.default) is float:
            assert {"at_least", "above"} & field.metadata.keys(), name
    from internals import SCORES

    from elsa_train import models
    from elsa_train.data.augment import AUGMENTS

    assert sorted(CHOICES["augment"]) == sorted(AUGMENTS)
    assert sorted(CHOICES["model"]) == sorted(models._MODELS)
    assert sorted(CHOICES["score"]) == sorted(SCORES)
    assert sorted(CHOICES["sparsify"]) == sorted(RULES)
    assert dataclasses.replace(Recipe(epochs=3)).epochs == 3.0
