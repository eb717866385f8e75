"""Walking graphs: subgraphs of control flow, the names they define, who uses a value."""

from collections.abc import Container, Iterator
from typing import Any

from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, NodeProto

Arrays = dict[str, NDArray[Any]]
"""Tensors in memory, by the names that a graph has for them."""


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs in a node's attributes: branches and loop bodies."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and every graph inside it."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from all_graphs(inner)


def defined(graph: GraphProto) -> Iterator[str]:
    """The names a graph gives values itself, repeats included, without those of inner graphs."""
    names = [value.name for value in graph.input]
    yield from names
    inputs = set(names)
    yield from (tensor.name for tensor in graph.initializer if tensor.name not in inputs)
    yield from (sparse.values.name for sparse in graph.sparse_initializer)
    for node in graph.node:
        yield from (name for name in node.output if name)


def used(graph: GraphProto) -> set[str]:
    """Every name that some node or graph output reads, inner graphs included."""
    names: set[str] = set()
    for inner in all_graphs(graph):
        names.update(value.name for value in inner.output)
        for node in inner.node:
            names.update(node.input)
    return names


def reads(node: NodeProto) -> set[str]:
    """The outer values that a node needs, those of its inner graphs included."""
    names = {name for name in node.input if name}
    for inner in subgraphs(node):
        needed = {value.name for value in inner.output}.union(*map(reads, inner.node))
        names |= needed - set(defined(inner))
    return names


def rename_uses(graph: GraphProto, names: dict[str, str]) -> None:
    """Let nodes read other names; an inner graph that defines a name itself keeps its own."""
    if not names:
        return
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in names:
                node.input[index] = names[name]
        for inner in subgraphs(node):
            hidden = set(defined(inner))
            rename_uses(inner, {old: new for old, new in names.items() if old not in hidden})


class FreshNames:
    """Names for values that are added to a graph."""

    def __init__(self, graph: GraphProto) -> None:
        self.taken = {name for inner in all_graphs(graph) for name in defined(inner)}

    def __call__(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self.taken:
            number += 1
            name = f"{wanted}.{number}"
        self.taken.add(name)
        return name


def compute_first(graph: GraphProto, nodes: list[NodeProto]) -> None:
    """Put nodes before all others; what they compute cannot be an input of the graph any more."""
    if not nodes:
        return
    remove_named(graph.input, {name for node in nodes for name in node.output})
    old = [NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    del graph.node[:]
    graph.node.extend([*nodes, *old])


def remove_named(items: Any, names: Container[str]) -> None:
    """Delete the named messages from a repeated field."""
    for index in reversed(range(len(items))):
        if items[index].name in names:
            del items[index]
