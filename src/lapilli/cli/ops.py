"""`lapilli ops`: which operators run on the GPU."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict

import click

from lapilli.cli.common import console, json_option, print_json, print_table, progress_bar
from lapilli.errors import InvalidInputError
from lapilli.runtime.compiler_packages import require_compiler


def short(dtype: str) -> str:
    """float32 as f32."""
    return re.sub(r"^(b?)(float|int|uint)(?=\d)", lambda m: m[1] + m[2][0], dtype)


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "--all", "everything", is_flag=True, help="List all ATen overloads, not only core ATen and those with a lowering."
)
@json_option
def ops(names: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """List ATen operators: lowered to GPU kernels, decomposed, or run by torch on the CPU; with the dtypes that can be lowered,
    and whether sizes may be dynamic. NAMES are parts of operator names ("softmax"). Needs `pip install lapilli[compile]`."""
    require_compiler()
    from lapilli.catalog import entry, is_core, overloads
    from lapilli.lower import lowerings

    known = overloads()
    if names:
        chosen = [o for o in known if any(name in str(o) for name in names)]
        if not chosen:
            raise InvalidInputError(f"No ATen operator has {' or '.join(map(repr, names))} in its name.")
    else:
        chosen = [o for o in known if everything or is_core(o) or o in lowerings]
    entries = []
    with progress_bar() as bar:
        for overload in bar.track(chosen, description="testing operators"):
            entries.append(entry(overload))
    if as_json:
        print_json([asdict(e) for e in entries])
        return
    rows = []
    for e in entries:
        dtypes = "not tested" if e.dtypes is None and e.where != "cpu" else " ".join(map(short, e.dtypes or ()))
        dynamic = {True: "yes", False: "no", None: ""}[e.dynamic]
        rows.append((e.name.removeprefix("aten."), "●" if e.core else "", e.where, e.by, dtypes, dynamic))
    print_table(console(), ("operator", "core", "runs", "by", "dtypes", "dynamic sizes"), rows)
    counted = Counter(e.where for e in entries)
    console().print(", ".join(f"{counted[where]} {where}" for where in ("gpu", "decomposed", "cpu")))
