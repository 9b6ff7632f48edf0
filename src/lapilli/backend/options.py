"""The options of `torch.compile(..., backend="vulkan", options={...})`."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lapilli.errors import CompileError

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Options:
    """The options of the backend.

    Attributes:
        precision: "fp32", or "fp16" for 16-bit storage with 32-bit accumulation.
        fallback: "cpu" runs operators that have no GPU kernel in torch on the CPU; "error" refuses them.
        device: index, part of a name, or UUID of the device that runs models whose tensors are on the CPU; None: the environment
            variable LAPILLI_DEVICE, else the best one.
    """

    precision: str = "fp32"
    fallback: str = "cpu"
    device: str | int | None = None

    @staticmethod
    def of(given: Mapping[str, Any] | None, mode: str | None) -> Options:
        """Checks the options that were given to torch.compile.

        Raises:
            CompileError: an option or its value is unknown; the message lists the possible ones.
        """
        names = [f.name for f in fields(Options)]
        for name in given or {}:
            if name not in names:
                raise CompileError(
                    f"the backend vulkan has no option {name!r}{suggestion(str(name), names)}; there are {', '.join(names)}"
                )
        options = Options(**(given or {}))
        _check("precision", options.precision, ("fp32", "fp16"))
        _check("fallback", options.fallback, ("cpu", "error"))
        if not isinstance(options.device, str | int | None):
            raise CompileError(f"the option device is {options.device!r}: give an index, or a part of a name as text")
        if mode is not None:
            _check("mode", mode, _MODES)
            if mode != "default":
                warnings.warn(
                    f'the backend vulkan has one way to compile: mode="{mode}" changes nothing',
                    UserWarning,
                    stacklevel=2,
                )
        return options


def suggestion(name: str, known: list[str]) -> str:
    """The text " (did you mean ...?)" if a known name is similar, else nothing."""
    close = difflib.get_close_matches(name, known, 1, 0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _check(name: str, value: Any, possible: tuple[str, ...]) -> None:
    if value not in possible:
        listed = ", ".join(f'"{p}"' for p in possible)
        raise CompileError(
            f"the option {name} is {value!r}{suggestion(str(value), list(possible))}: choose one of {listed}"
        )
