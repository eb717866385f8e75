"""The commands: one group `elsa`, and each command as a script of its own."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from elsa_format.cli import SETTINGS, VERSION

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

OWN = ("pack", "extract", "inspect", "verify", "ship", "fetch", "record")


def find_command(name: str) -> click.Command | None:
    """A command by its name; those of other packages are entry points `elsa.commands`.

    Without a name it is the group of all.
    """
    if not name:
        return main
    if name in OWN:
        module: Any = import_module(f"elsa_format._cli.{name}")
        return module.command  # type: ignore[no-any-return]
    for entry in _others():
        if entry.name == name:
            return entry.load()  # type: ignore[no-any-return]
    return None


def _others() -> "EntryPoints":
    from importlib.metadata import entry_points  # only here, as it takes long to import

    return entry_points(group="elsa.commands")


class _Commands(click.Group):
    """Loads a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*OWN, *sorted({entry.name for entry in _others()})]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return find_command(cmd_name)


@click.group(cls=_Commands, context_settings=SETTINGS)
@VERSION
def main() -> None:
    """One checkpoint file, several fully trained sparse networks nested inside it.

    \b
    elsa pack dense.safetensors --sparsities 95,90,80 -o net.safetensors
    elsa inspect net.safetensors
    elsa extract net.safetensors --level 2 -o level2.safetensors
    elsa verify net.safetensors
    elsa ship net.safetensors -o net.ship.safetensors
    elsa fetch https://host/net.ship.safetensors --level 1 -o net.ship.safetensors
    elsa record net.safetensors --level 2 accuracy=0.93
    """
