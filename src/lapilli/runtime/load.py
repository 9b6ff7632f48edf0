"""Loads a program from a file, on one device or several."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Literal, overload

from lapilli.errors import InvalidInputError, UnsupportedOperatorError
from lapilli.format import signature
from lapilli.format.signature import Key
from lapilli.runtime import validator
from lapilli.runtime.files import named, read_file
from lapilli.runtime.host import Permission
from lapilli.runtime.limits import Limits
from lapilli.runtime.pool import Pool
from lapilli.runtime.program import Program


@overload
def load(  # type: ignore[overload-overlap]
    path: str | os.PathLike[str],
    device: Literal["all"] | list[int] | list[str] | list[str | int] | tuple[str | int, ...],
    *,
    allow_host: bool | Collection[str] = True,
    limits: Limits | None = None,
    public_key: Key | None = None,
    verify: Literal["structure", "full", "first-run"] = "structure",
) -> Pool: ...


@overload
def load(
    path: str | os.PathLike[str],
    device: str | int | None = None,
    *,
    allow_host: bool | Collection[str] = True,
    limits: Limits | None = None,
    public_key: Key | None = None,
    verify: Literal["structure", "full", "first-run"] = "structure",
) -> Program: ...


def load(
    path: str | os.PathLike[str],
    device: str | int | list[int] | list[str] | list[str | int] | tuple[str | int, ...] | None = None,
    *,
    allow_host: bool | Collection[str] = True,
    limits: Limits | None = None,
    public_key: Key | None = None,
    verify: Literal["structure", "full", "first-run"] = "structure",
) -> Program | Pool:
    """Loads a program from a file, ready to run.

    Args:
        path: the file.
        device: index, part of a name, or UUID (see `devices`); None: the environment variable LAPILLI_DEVICE, else the best
            one. A list of those, or "all", gives a `Pool`. "all" is every device that satisfies a plan of the program; those of
            software only where there is no other.
        allow_host: whether the file may call operators of torch on the CPU, where there is no GPU kernel. True: those of a
            fixed list, which compute new tensors from tensors and numbers. False: none; a file that calls any is refused.
            Names of operators ("mylib.f.default") or of namespaces ("mylib"): these in addition to the list.
        limits: bounds on the resources of the file and its runs.
        public_key: the key that the file must be signed with (`lapilli sign`): the path of a PEM file, its content, or 32
            bytes. The file is then read into memory once, so that the verified bytes are the ones loaded. Needs the extra
            `sign`.
        verify: "full": SPIRV-Tools' validator also checks every kernel, in about 10 ms each. Needs the extra `validate`. The
            player's own check of structure and kernels ("structure") always runs. "first-run": unless it is known from before,
            random inputs are run by the plan that the device takes, and by the plainest one; where results differ, the latter is
            taken, with a warning (docs/phones.md). For one device.

    Raises:
        ReadError: the file cannot be read.
        InvalidFileError: it is damaged, no program, of another version, beyond the limits, or calls an operator that it may
            not.
        SignatureError: it is not signed with the key.
        UnsupportedOperatorError: it calls operators on the CPU (with allow_host=False).
        NoDriverError: there is no Vulkan driver.
        NoDeviceError: there is no such device, or it satisfies no plan of the program, or computes something else in each run (with
            verify="first-run").
        OutOfMemoryError: the device or the host has too little memory.
        InvalidInputError: verify or device is not one of the choices, or a program for a pool has states.
    """
    source: Path | bytes = Path(path)
    if verify not in ("structure", "full", "first-run"):
        raise InvalidInputError(f'verify is {verify!r}; it can be "structure", "full" or "first-run".')
    if verify == "first-run" and (device == "all" or isinstance(device, list | tuple)):
        raise InvalidInputError(
            'verify="first-run" is for one device: load the program once for each, then all of them.'
        )
    if public_key is not None or verify == "full":
        source = read_file(path)
        with named(path):
            if public_key is not None:
                signature.verify(source, public_key)
            if verify == "full":
                validator.validate(source, None if limits is None else limits.native)
    try:
        permission = Permission.of(allow_host)
        if device == "all" or isinstance(device, list | tuple):
            return Pool(source, device, permission=permission, limits=limits)
        return Program(source, device, permission=permission, limits=limits, first_run=verify == "first-run")
    except UnsupportedOperatorError as error:
        if allow_host is not False:
            raise
        raise UnsupportedOperatorError(
            f"{path}: the program calls operators of torch on the CPU, which allow_host=False refuses (`lapilli verify` names "
            'them). Load it without that, or compile it with fallback="error".'
        ) from error
