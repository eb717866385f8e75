"""In what order a network computes: its blocks, what each needs of others, the layers in each."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from elsa_converters.torch._calibrate.calls import Call, Key, Matrices, call_of, tensors_in
from elsa_converters.torch._calibrate.decisions import decides

CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict


@dataclass
class Use:
    """What a run has shown of a layer."""

    call: Call
    """Its first."""
    block: int
    depth: int
    """How many layers of its block are before it, one after the other."""
    calls: int = 1
    answer: bool = False
    """Whether what it gives is what the network gives."""
    norm: "Norm | None" = None
    """The batch norm that takes all it gives, and nothing else."""


class Norm(NamedTuple):
    """The tensors of a batch norm."""

    mean: Tensor
    variance: Tensor
    weight: Tensor
    bias: Tensor


@dataclass
class Order:
    """What one run has shown of a network."""

    blocks: list[nn.Module]
    uses: dict[Key, Use] = field(default_factory=dict)
    others: set[int] = field(default_factory=set)
    """The `id` of each tensor that goes into anything but a layer."""
    biases: dict[int, int] = field(default_factory=dict)
    """How many layers have a bias, by its `id`."""
    needs: list[set[int]] = field(default_factory=list)
    """Which earlier blocks' outputs each block uses, and last what is after all of them."""

    def live(self, cut: int) -> set[int]:
        """The blocks before a cut whose outputs are used after it."""
        return {block for needed in self.needs[cut:] for block in needed if block < cut}


def order_of(model: nn.Module, run: Callable[[], Any]) -> Order:
    """Run a network twice to find its blocks and their layers."""
    blocks = _blocks(model, run)
    try:
        return _traced(model, blocks, run)
    except Hidden:
        return _traced(model, [model], run)


# --- Blocks ---------------------------------------------------------------------------------------


def _blocks(model: nn.Module, run: Callable[[], Any]) -> list[nn.Module]:
    """The modules that a run goes through once, one after the other, and that hold all layers.

    They hold all decisions by values, too: which modules run in a block may differ.

    Elements of lists, such as the layers of a transformer, and else the smallest such modules.
    """
    stack: list[nn.Module] = []
    entered: dict[nn.Module, list[int]] = {}
    within: list[frozenset[nn.Module]] = []

    class Layers(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if call_of(func, args, kwargs or {}) is not None or decides(func, args):
                within.append(frozenset(stack))
            return func(*args, **(kwargs or {}))

    def enter(module: nn.Module, _: Any) -> None:
        stack.append(module)
        entered.setdefault(module, []).append(len(entered))

    def leave(module: nn.Module, *_: Any) -> None:
        stack.pop()

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        with Layers():
            run()

    def split(module: nn.Module, element: bool = False) -> list[nn.Module] | None:
        container = isinstance(module, CONTAINERS)
        inside = [modules for modules in within if module in modules]
        once = len(entered.get(module, ())) == 1
        if (not element and module in entered and once) or container:
            parts = [split(child, container) for child in module.children()]
            if None not in parts:
                found = [block for part in parts for block in part or ()]
                if all(modules.intersection(found) for modules in inside):
                    return found
        if not inside:
            return [] if not container else None
        return [module] if once else None

    found = split(model)
    return sorted(found, key=lambda block: entered[block][0]) if found else [model]


# --- What needs what ------------------------------------------------------------------------------


class Hidden(Exception):
    """A tensor leaves a block in another way than as its output."""


class _Mark(NamedTuple):
    """What a tensor was made of."""

    blocks: frozenset[int] = frozenset()
    inside: int | None = None
    depth: int = 0


@dataclass
class _Made:
    """What a layer gave, as long as the network has it, and how often it was taken."""

    tensor: "ref[Tensor]"
    use: Use
    taken: int = 0


class _Trace(TorchFunctionMode):
    def __init__(self, model: nn.Module, order: Order) -> None:
        super().__init__()
        self.order = order
        self.own = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.marks: dict[int, _Mark] = {}
        self.block: int | None = None
        self.next = 0
        self.matrices = Matrices()
        self.made: list[_Made] = []
        self._made: dict[int, _Made] = {}
        """The last of each `id`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        result = func(*args, **kwargs)
        made = tensors_in(result)
        name = func.__name__
        writes = name in ("__setitem__", "__iadd__", "__imul__") or "out" in kwargs
        writes = writes or (name.endswith("_") and not name.endswith("__"))
        if writes:
            made += given[:1]
        if not made:
            return result
        mark = self._joined(given)
        call = call_of(func, args, kwargs)
        if call is not None:
            use = self._use(call, mark.depth)
            self.made.append(_Made(ref(result), use))
            self._made[id(result)] = self.made[-1]
            mark = mark._replace(depth=mark.depth + 1)
        layer = () if call is None else (call.weight, call.bias)
        if self.matrices.note(func, args, result):
            layer = (args[0], None)
        for tensor in given:
            if (of := self._of(tensor)) is not None:
                of.taken += 1
            if not any(tensor is one for one in layer):
                self.order.others.add(id(tensor))
        if func is functional.batch_norm:
            self._norm(*args, **kwargs)
        views = set() if writes else {_memory(tensor) for tensor in given}
        for memory in {_memory(tensor) for tensor in made} - views - self.own:
            self.marks[memory] = mark
        return result

    def _use(self, call: Call, depth: int) -> Use:
        uses, key = self.order.uses, self.matrices.key_of(call.weight)
        use = uses.get(key)
        if use is None:
            at = 0 if self.block is None else self.block
            use = uses[key] = Use(call, at, depth)
            if call.bias is not None:
                self.order.biases[id(call.bias)] = self.order.biases.get(id(call.bias), 0) + 1
        else:
            use.calls += 1
        return use

    def _norm(
        self,
        input: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        *_: Any,
        **__: Any,
    ) -> None:
        of = self._of(input)
        if of is None or training or mean is None or variance is None:
            return
        if weight is not None and bias is not None:
            of.use.norm = Norm(mean, variance, weight, bias)

    def _of(self, tensor: Tensor) -> "_Made | None":
        """What is known of a tensor if a layer gave it."""
        made = self._made.get(id(tensor))
        return made if made is not None and made.tensor() is tensor else None

    def _joined(self, tensors: Iterable[Tensor]) -> _Mark:
        """The mark of what is made of tensors, here."""
        found = _Mark(inside=self.block)
        for tensor in tensors:
            mark = self.marks.get(_memory(tensor))
            if mark is None:
                continue
            if mark.inside not in (None, self.block):
                raise Hidden
            if mark.inside is None and self.block is not None:
                self.order.needs[self.block] |= mark.blocks
            found = _union(found, mark)
        return found

    def enter(self, block: int) -> None:
        if self.block is not None or block != self.next:
            raise Hidden
        self.block = block

    def leave(self, block: int, output: Any) -> None:
        self.block, self.next = None, block + 1
        for tensor in tensors_in(output):
            self.marks[_memory(tensor)] = _Mark(frozenset([block]))

    def end(self, output: Any) -> None:
        found = tensors_in(output)
        self.order.needs[-1] |= self._joined(found).blocks
        for made in self.made:
            use = made.use
            use.answer = bool(found) and made.tensor() is found[0]
            use.call = replace(use.call, x=use.call.x.new_zeros(0))  # which would stay in memory
            if made.taken != 1 or use.calls != 1:
                use.norm = None


def _union(one: _Mark, other: _Mark) -> _Mark:
    inside = one.inside if one.inside is not None else other.inside
    return _Mark(one.blocks | other.blocks, inside, max(one.depth, other.depth))


def _memory(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else int(tensor.untyped_storage().data_ptr())


def _traced(model: nn.Module, blocks: Sequence[nn.Module], run: Callable[[], Any]) -> Order:
    order = Order(list(blocks), needs=[set() for _ in range(len(blocks) + 1)])
    trace = _Trace(model, order)
    with ExitStack() as hooks:
        for at, block in enumerate(blocks):
            enter = block.register_forward_pre_hook(lambda *_, at=at: trace.enter(at))
            leave = block.register_forward_hook(lambda _, __, out, at=at: trace.leave(at, out))
            hooks.callback(enter.remove)
            hooks.callback(leave.remove)
        with trace:
            output = run()
    trace.end(output)
    return order
