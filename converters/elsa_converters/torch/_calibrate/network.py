"""A module that runs from any of its blocks on, with other tensors, and is not touched."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from elsa_converters.torch._calibrate.calls import Call, Replaced, call_of, replace
from elsa_converters.torch._calibrate.order import Order, order_of
from elsa_format import InvalidOption


class Stop(Exception):
    """Ends a run that has shown what it was to show."""


@dataclass
class Run:
    """One run of a network, or a part of it."""

    before: Sequence[Any] = ()
    """The outputs of the blocks that are not computed."""
    replaced: Replaced = field(default_factory=dict)
    until: int | None = None
    """The block before which it ends."""
    seen: Callable[[Call], None] | None = None
    """Called with each call of a layer."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """What each computed block gave."""


class Network:
    """A module's twin on the same tensors, and what one run has shown of it."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.twin = _twin(model)
        self._accepts = signature(model.forward).parameters
        self._run: Run | None = None
        self.order = self._ordered(example)
        for at, block in enumerate(self.order.blocks):
            block.forward = wraps(block.forward)(partial(self._through, at, block.forward))

    def _ordered(self, example: Any) -> Order:
        with torch.no_grad(), _determined():
            return order_of(self.twin, lambda: self._call(example))

    def run(self, batch: Any, run: Run) -> Any:
        """The output for a batch; None if it ends earlier."""
        self._run = run
        try:
            with torch.no_grad(), _determined(), _Layers(run):
                return self._call(batch)
        except Stop:
            return None
        finally:
            self._run = None

    def _call(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            given = dict(batch)
            if "use_cache" in self._accepts:
                given.setdefault("use_cache", False)
            return self.twin(**given)
        return self.twin(*batch) if isinstance(batch, tuple | list) else self.twin(batch)

    def _through(self, at: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._run
        assert run is not None
        if at < len(run.before):
            return run.before[at]
        if at == run.until:
            raise Stop
        output = run.outputs[at] = forward(*args, **kwargs)
        return output


class _Layers(TorchFunctionMode):
    """Replaces tensors where they are used, and tells of layers that are called."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.run.seen is not None:
            call = call_of(func, args, kwargs)
            if call is not None:
                self.run.seen(call)
        if self.run.replaced:
            args, kwargs = replace(self.run.replaced, args, kwargs)
        return func(*args, **kwargs)


def _twin(model: nn.Module) -> nn.Module:
    """A copy that shares all tensors, in evaluation mode."""
    tensors = (*model.parameters(), *model.buffers())
    try:
        twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    except Exception as error:  # whatever a module's own copying raises
        raise InvalidOption(f"the model cannot be copied: {error}") from None
    return twin.eval()


class _determined(ExitStack):  # noqa: N801
    """Random numbers that are the same every time, and those of others as they were."""

    def __enter__(self) -> "_determined":
        super().__enter__()
        self.enter_context(torch.random.fork_rng())
        torch.manual_seed(0)
        return self


def blank(tree: Any) -> Any:
    """A tree of tensors of the same shapes, without content or memory."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)

    return tree_map(one, tree)
