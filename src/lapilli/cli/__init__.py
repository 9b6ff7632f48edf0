"""The command `lapilli`, one file per subcommand. Needs NumPy, cffi, click, rich and Pillow; torch only to compile.

Commands import their dependencies when they run, so help and wrong options need neither NumPy, the player, rich nor torch."""

from __future__ import annotations

import click

from lapilli.cli.bench import bench
from lapilli.cli.cache import cache
from lapilli.cli.chat import chat
from lapilli.cli.common import Group
from lapilli.cli.compile import compile_
from lapilli.cli.devices import devices
from lapilli.cli.generate import generate
from lapilli.cli.inspect import inspect
from lapilli.cli.ops import ops
from lapilli.cli.profile import profile
from lapilli.cli.run import run
from lapilli.cli.serve import serve
from lapilli.cli.sign import keygen, sign, verify
from lapilli.cli.strip import strip
from lapilli.cli.tune import tune
from lapilli.version import __version__


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lapilli")
def main() -> None:
    """Lapilli: PyTorch models on any device that speaks Vulkan."""


COMMANDS = (
    devices, compile_, tune, run, generate, chat, serve, bench, profile, inspect, strip, ops, verify, sign, keygen, cache,
)  # fmt: skip

for command in COMMANDS:
    main.add_command(command)
