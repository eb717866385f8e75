"""Extract a level in one pass and constant memory (spec §8.3)."""

from collections.abc import Iterator
from dataclasses import replace

from elsa_format._blocks import BlockReader, Progress, Source, ignore, open_source, read_profile
from elsa_format._choose import choose_level
from elsa_format._errors import NoSuchLevel
from elsa_format._header import Header
from elsa_format._kernels import mask
from elsa_format._layouts import Layout, Piece, encoder
from elsa_format._output import Output, Target, open_output
from elsa_format._plan import Step, level_header, plain_names, plan
from elsa_format._profile import LevelLike, Profile, variant_name
from elsa_format._writer import LevelSpec, Writer


def extract(
    source: Source,
    target: Target,
    *,
    level: LevelLike | None = None,
    sparsity: float | None = None,
    max_size: int | None = None,
    layout: Layout = "dense",
    keep_levels: bool = False,
    verify: bool = True,
    force: bool = False,
    progress: Progress = ignore,
) -> LevelLike:
    """Write one level of an ELSA file as a checkpoint of its own; returns which.

    The level is given by number, or as the densest with at least a `sparsity` (a fraction), or as
    the densest whose file has at most `max_size` bytes. Source and target are paths or binary
    streams; neither needs to seek. With `keep_levels` the output stays an ELSA file that holds
    levels 1..level. Checksums are compared unless `verify` is false, and on any error a file target
    is left as it was.

    >>> extract("net.safetensors", "level2.safetensors", level=2)  # doctest: +SKIP
    """
    with open_source(source) as opened:
        header, profile = read_profile(opened)
        number = choose_level(
            header,
            profile,
            opened.name,
            level=level,
            sparsity=sparsity,
            max_size=max_size,
            layout=layout,
        )
        if number is None and (layout != "dense" or keep_levels):
            raise NoSuchLevel(
                f"{opened.name}: the dense network has no sparse layout and no levels to keep; "
                f"expected a level 1..{len(profile.levels)}"
            )
        reader = BlockReader(opened, header, profile if verify else None, progress=progress)
        if keep_levels and number is not None:
            _keep_levels(reader, header, profile, number, target, force=force)
        else:
            with open_output(target, force=force, in_order=layout == "dense") as output:
                _extract_level(reader, header, profile, number, layout, output)
        return "dense" if number is None else number


def _extract_level(
    reader: BlockReader,
    header: Header,
    profile: Profile,
    level: int | None,
    layout: Layout,
    output: Output,
) -> None:
    prefix, placed = level_header(header, profile, level, layout)
    output.write_at(0, prefix)
    positions = {name: len(prefix) + info.start for name, info in placed.items()}
    for step in plan(header, profile, level):
        for name, piece in _pieces(reader, profile, step, level, layout):
            output.write_at(positions[name], piece)
            positions[name] += piece.nbytes
    reader.finish()
    output.commit()


def _pieces(
    reader: BlockReader, profile: Profile, step: Step, level: int | None, layout: Layout
) -> Iterator[Piece]:
    """What one stored tensor contributes to the level file."""
    blocks = reader.blocks(step.info)
    if step.name is None:
        for _ in blocks:
            pass
    elif level is None or not step.nested:
        for block in blocks:
            yield step.name, block
    else:
        expected = profile.nested[step.name][level - 1]
        encode = encoder(layout, step.info, profile.bits, level, expected, reader.source.name)
        for block in blocks:
            yield from encode.encode(block.view(step.info.dtype.words))
        yield from encode.finish()


def _keep_levels(
    reader: BlockReader,
    header: Header,
    profile: Profile,
    level: int,
    target: Target,
    *,
    force: bool,
) -> None:
    """Cut the file down to its first levels; level `level` becomes the dense network."""
    copies: dict[str, list[str]] = {}
    for name in plain_names(header):
        copies[profile.stored_name(name, level)] = [name]
    for name in profile.per_level:
        for t in range(1, level + 1):
            copies.setdefault(variant_name(name, t), []).append(variant_name(name, t))
    infos = [
        replace(header.tensors[stored], name=name)
        for stored in header.tensors
        for name in copies.get(stored, ())
    ]
    metrics = profile.levels[level - 1].metrics
    with open_output(target, force=force) as output:
        writer = Writer(
            output,
            infos,
            bits=profile.bits,
            levels=[
                LevelSpec(entry.name, entry.target, entry.pattern, entry.metrics)
                for entry in profile.levels[:level]
            ],
            nested=profile.nested,
            per_level=profile.per_level,
            metadata=header.metadata,
            dense_metrics=metrics,
            digests=any(entry.digest for entry in profile.levels),
        )
        for stored, info in header.tensors.items():
            for block in reader.blocks(info):
                if stored in profile.nested:
                    words = block.view(info.dtype.words)
                    mask(words, words, profile.bits, level)
                for name in copies.get(stored, ()):
                    writer.append(name, block)
        reader.finish()
        writer.finish()
