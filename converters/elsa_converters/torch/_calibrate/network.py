"""A module that runs from any of its blocks on, with other tensors, and is not touched."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import signature
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elsa_converters._errors import InvalidData
from elsa_converters.torch._calibrate.calls import Call, Key, Matrices, Replaced, call_of, replace
from elsa_converters.torch._calibrate.decisions import Decisions
from elsa_converters.torch._calibrate.order import Hidden, Order, order_of
from elsa_format import ElsaError, InvalidOption


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
    seen: Callable[[Key, Call], None] | None = None
    """Called with each call of a layer."""
    decisions: Decisions | None = None
    """Where choices that depend on values are kept, or come from."""
    keep: Callable[[int, Any], None] | None = None
    """Called with what each computed block gave, before anything can write to it."""
    block: int | None = None
    """The block that is being computed."""


class Network:
    """A module's twin on the same tensors, and what one run has shown of it."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.twin = _twin(model)
        self._accepts = signature(model.forward).parameters
        self._now = local()
        before = torch.get_rng_state()
        with torch.no_grad(), _determined():
            self.order: Order = order_of(self.twin, lambda: self._call(example))
            torch.manual_seed(0)
            before = torch.get_rng_state()
            self._call(example)
            self.random = not torch.equal(before, torch.get_rng_state())
        """Whether it draws random numbers, of which there is one sequence for all threads."""
        for at, block in enumerate(self.order.blocks):
            block.forward = wraps(block.forward)(partial(self._through, at, block.forward))

    def run(self, batch: Any, run: Run) -> Any:
        """The output for a batch; None if it ends earlier. Threads may do so at the same time."""
        self._now.run = run
        try:
            with torch.no_grad(), _determined(self.random), _Layers(run):
                return self._call(batch)
        except Stop:
            return None
        finally:
            self._now.run = None

    def _call(self, batch: Any) -> Any:
        try:
            return self._called(batch)
        except (Stop, Hidden, ElsaError, MemoryError):
            raise
        except Exception as error:  # whatever a module raises for what does not fit
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if isinstance(error, TypeError):
                reason += "; a batch holds its arguments, and no labels"
            raise InvalidData(f"the model cannot be called with a batch: {reason}") from error

    def _called(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            given = dict(batch)
            if "use_cache" in self._accepts:
                given.setdefault("use_cache", False)
            return self.twin(**given)
        return self.twin(*batch) if isinstance(batch, tuple | list) else self.twin(batch)

    def _through(self, at: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run: Run = self._now.run
        if at < len(run.before):
            return run.before[at]
        if at == run.until:
            raise Stop
        run.block = at
        output = forward(*args, **kwargs)
        run.block = None
        if run.keep is not None:
            run.keep(at, output)
        return output


class _Layers(TorchFunctionMode):
    """Replaces tensors where they are used, and tells of layers that are called."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.matrices = run, Matrices()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run, kwargs = self.run, kwargs or {}
        if run.seen is not None:
            call = call_of(func, args, kwargs)
            if call is not None:
                run.seen(self.matrices.key_of(call.weight), call)
        given, named = args, kwargs
        if run.replaced:
            given, named = replace(run.replaced, args, kwargs)
        result = func(*given, **named)
        if run.decisions is not None:
            result = run.decisions.of(run.block, func, given, named, result)
        self.matrices.note(func, args, result)
        return result


def _twin(model: nn.Module) -> nn.Module:
    """A copy that shares all tensors, in evaluation mode; experts run one by one."""
    if isinstance(model, torch.jit.ScriptModule):
        raise InvalidOption("the model is TorchScript, which hides its layers; give the module")
    tensors = (*model.parameters(), *model.buffers())
    try:
        twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    except Exception as error:  # whatever a module's own copying raises
        raise InvalidOption(f"the model cannot be copied: {error}") from None
    for module in twin.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"
    return twin.eval()


@contextmanager
def _determined(wanted: bool = True) -> Iterator[None]:
    """Random numbers that are the same every time, and those of others as they were."""
    if not wanted:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch computes with one thread: with others, sums can have other last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers."""
    yield from module.parameters()
    yield from module.buffers()
