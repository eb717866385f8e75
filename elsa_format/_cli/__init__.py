"""The commands: one group `elsa`, and each command as a script of its own."""

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import click

from elsa_format._cli._terminal import SETTINGS, version_option

OWN = ("pack", "extract", "inspect", "verify")


class _Commands(click.Group):
    """Loads a command when it is asked for; others join by the entry points `elsa.commands`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*OWN, *sorted({entry.name for entry in entry_points(group="elsa.commands")})]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in OWN:
            command: Any = import_module(f"elsa_format._cli.{cmd_name}")
            return command.command  # type: ignore[no-any-return]
        for entry in entry_points(group="elsa.commands", name=cmd_name):
            return entry.load()  # type: ignore[no-any-return]
        return None


@click.group(cls=_Commands, context_settings=SETTINGS)
@version_option
def main() -> None:
    """One checkpoint file, several fully trained sparse networks nested inside it.

    \b
    elsa pack dense.safetensors --sparsities 95,90,80 -o net.safetensors
    elsa inspect net.safetensors
    elsa extract net.safetensors --level 2 -o level2.safetensors
    elsa verify net.safetensors
    """
