"""The command `daf`."""

from __future__ import annotations

import importlib

import click
from typing_extensions import override

from daf_integrations.cli.allocator import run
from daf_integrations.cli.doctor import doctor

_WITH_TORCH = {
    "bench": "daf_integrations.cli.bench.command",
    "plan": "daf_integrations.cli.plan",
    "profile": "daf_integrations.cli.profile.command",
}


class _Commands(click.Group):
    """Commands of which those that need torch are loaded when they are asked for: the others say what it lacks."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*self.commands, *_WITH_TORCH])

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _WITH_TORCH:
            return getattr(importlib.import_module(_WITH_TORCH[cmd_name]), cmd_name)
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Commands)
@click.version_option(package_name="daf-training", message="%(version)s")
def main() -> None:
    """DAF stores the activations that autograd saves for backward in a few bits."""


for command in (doctor, run):
    main.add_command(command)
