"""The command `daf`."""

from __future__ import annotations

import click

from daf_integrations.cli.allocator import run
from daf_integrations.cli.bench.command import bench
from daf_integrations.cli.doctor import doctor
from daf_integrations.cli.plan import plan
from daf_integrations.cli.profile.command import profile


@click.group()
@click.version_option(package_name="daf-training", message="%(version)s")
def main() -> None:
    """DAF stores the activations that autograd saves for backward in a few bits."""


for command in (bench, doctor, plan, profile, run):
    main.add_command(command)
