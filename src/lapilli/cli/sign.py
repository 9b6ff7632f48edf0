"""`lapilli keygen`, `lapilli sign`, `lapilli verify`: the origin of a program, and what it may do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lapilli.cli.common import OUTPUT, PROGRAM, console, json_option, make_folder, output_file, print_json, rows, size
from lapilli.errors import InvalidInputError, LapilliError

if TYPE_CHECKING:
    from lapilli.runtime.description import Description
    from lapilli.runtime.interface import Interface

KEY = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("path", type=OUTPUT)
@click.option("--password", is_flag=True, help="Prompt for a password to encrypt the private key.")
def keygen(path: Path, password: bool) -> None:
    """Generate a key pair for `lapilli sign`: the private key in PATH, the public key in PATH.pub.

    Needs `pip install lapilli[sign]`."""
    from lapilli.format import signature

    for file in (path, path.with_name(path.name + ".pub")):
        if file.exists() or file.is_symlink():
            raise InvalidInputError(f"{file} is there already; name another file.")
    given = click.prompt("Password", hide_input=True, confirmation_prompt=True).encode() if password else None
    make_folder(path)
    fingerprint = signature.generate(path, given)
    console().print(f"{path}: keep it to yourself. {path}.pub: for users of your programs. Key {fingerprint}")


@click.command()
@click.argument("program", type=PROGRAM)
@click.option("--key", required=True, type=KEY, help="Private key from `lapilli keygen`.")
@click.option("-o", "--output", type=OUTPUT, help="Default: PROGRAM itself.")
def sign(program: Path, key: Path, output: Path | None) -> None:
    """Sign PROGRAM, so that anyone with the public key can verify that it is unchanged. Signed programs load everywhere.

    Needs `pip install lapilli[sign]`."""
    from lapilli.format import signature
    from lapilli.runtime.description import Description
    from lapilli.runtime.files import named, read_file

    data = read_file(program)
    with named(program):
        Description.of(data)  # refuses to sign a file that does not load
    try:
        private = signature.private_key(key)
    except signature.PasswordNeeded:
        private = signature.private_key(key, click.prompt("Password", hide_input=True, err=True).encode())
    signed = signature.sign(data, private)
    with output_file(output or program) as file:
        file.write(signed)
    found = signature.of(signed)
    assert found is not None
    console().print(f"{output or program}: signed with the key {found.fingerprint}")


@click.command()
@click.argument("program", type=PROGRAM)
@click.option("--key", type=KEY, help="Public key with which it must be signed.")
@json_option
def verify(program: Path, key: Path | None, as_json: bool) -> None:
    """Check PROGRAM without running any of it, and show what it may do. Needs no device.

    With --key, it must be signed with that key; this needs `pip install lapilli[sign]`. Exit code 1 if a check fails."""
    from lapilli.format import signature
    from lapilli.runtime.description import Description
    from lapilli.runtime.files import named, read_file
    from lapilli.runtime.interface import interfaces

    data = read_file(program)
    with named(program):
        description = Description.of(data)
        methods = interfaces(description)
        signed = signature.of(data)
        if key is not None:
            signed = signature.verify(data, key)
        elif signed is not None:
            signed = signature.check_digest(data)
        operators = _operators(description, methods)
    state = _signed(signed, key)
    if as_json:
        node = {"program": str(program), "bytes": len(data), "signed_by": signed.fingerprint if signed else None}
        trusted = {"trusted": key is not None, "host_operators": operators}
        print_json(
            node
            | trusted
            | {"methods": [_shown(m) for m in methods], "states": [asdict(s) for s in description.states]}
        )
        return
    rows(
        [
            ("file", f"{program}, {size(len(data))}, by {description.producer}"),
            ("checksum", "matches: the file is not damaged"),
            ("structure", "every index, size and kernel interface is valid"),
            ("signature", state),
            *(("method", text) for text in map(_line, methods)),
            (
                "calls in torch",
                "\n".join(f"{name}: {what}" for name, what in operators.items()) or "none: only kernels run",
            ),
            ("kernels", f"{len(description.kernels)}, {size(sum(k.code_size for k in description.kernels))} of SPIR-V"),
            ("constants", f"{len(description.constants)}, {size(sum(c.size for c in description.constants))}"),
            ("states", f"{len(description.states)}, {size(sum(s.size for s in description.states))}"),
            ("metadata", ", ".join(f"{k} ({len(v)} characters)" for k, v in description.metadata.items()) or "none"),
        ]
    )


def _signed(signed: Any, key: Path | None) -> str:
    if signed is None:
        return "none"
    if key is not None:
        return f"of the key {signed.fingerprint}, as it must be"
    return (
        f"names the key {signed.fingerprint}; give --key to check it against a key that you trust. The SHA-256 matches"
    )


def _operators(description: Description, methods: Sequence[Interface]) -> dict[str, str]:
    """The operators that a file calls, and whether any file may call them. Raises InvalidFileError if its scripts are invalid."""
    from lapilli.runtime import check, host

    names = dict.fromkeys(description.host_operators)
    if find_spec("torch") is None:
        known: dict[str, str] = dict.fromkeys(names, "not checked, because torch is not installed")
    else:
        import torch

        known = {}
        for name in names:
            try:
                host.overload(name, torch, host.Permission())
                known[name] = "on the list"
            except LapilliError as error:
                known[name] = str(error)
    allowed = host.Permission(frozenset(names))
    check.admit([(m.script, m.inputs, len(m.outputs)) for m in methods if m.script is not None], description, allowed)
    return known


def _shown(method: Interface) -> dict[str, Any]:
    return {"name": method.name, "inputs": list(map(str, method.inputs)), "outputs": list(map(str, method.outputs))}


def _line(method: Interface) -> str:
    return f"{method.name}: {', '.join(map(str, method.inputs)) or 'nothing'} → {', '.join(map(str, method.outputs)) or 'nothing'}"
