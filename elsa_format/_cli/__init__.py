"""The commands: one group `elsa`, and each command as a script of its own."""

import click

from elsa_format._start import GROUP, OWN, find_command
from elsa_format.cli import SETTINGS, VERSION


class _Commands(click.Group):
    """Loads a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from importlib.metadata import entry_points  # only here, as it takes long to import

        return [*OWN, *sorted({entry.name for entry in entry_points(group=GROUP)})]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return find_command(cmd_name) if cmd_name else None


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
