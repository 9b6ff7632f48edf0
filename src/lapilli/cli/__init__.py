"""The command `lapilli`, one file per subcommand. Needs the extra `cli`; torch only to compile, Pillow only
for photos.

Commands import their dependencies when they run, so help and wrong options need neither NumPy, the player, rich nor torch."""

from __future__ import annotations

from lapilli.runtime.extras import require

require("cli", "The command line", "click", "rich")

import click  # noqa: E402

from lapilli.cli.bench import bench  # noqa: E402
from lapilli.cli.cache import cache  # noqa: E402
from lapilli.cli.chat import chat  # noqa: E402
from lapilli.cli.common import Group, with_words  # noqa: E402
from lapilli.cli.compile import compile_  # noqa: E402
from lapilli.cli.devices import devices  # noqa: E402
from lapilli.cli.generate import generate  # noqa: E402
from lapilli.cli.inspect import inspect  # noqa: E402
from lapilli.cli.ops import ops  # noqa: E402
from lapilli.cli.perplexity import perplexity  # noqa: E402
from lapilli.cli.profile import profile  # noqa: E402
from lapilli.cli.report import report  # noqa: E402
from lapilli.cli.run import run  # noqa: E402
from lapilli.cli.serve import serve  # noqa: E402
from lapilli.cli.sign import keygen, sign, verify  # noqa: E402
from lapilli.cli.strip import strip  # noqa: E402
from lapilli.cli.transcribe import transcribe  # noqa: E402
from lapilli.cli.tune import tune  # noqa: E402
from lapilli.version import __version__  # noqa: E402


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lapilli")
def main() -> None:
    """Lapilli: PyTorch models on any device that speaks Vulkan."""


COMMANDS = (
    devices, compile_, tune, run, generate, chat, serve, perplexity, transcribe, bench, profile, inspect, strip, ops, verify, sign,
    keygen, cache, report,
)  # fmt: skip

for command in COMMANDS:
    main.add_command(with_words(command))
