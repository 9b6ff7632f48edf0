"""Registers the operator `lapilli::run`, so that exported programs with calls of it can be loaded. `import torch` imports
this module; the implementation is imported with the first call.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from lapilli.errors import InvalidInputError

_library: Any = torch.library.Library("lapilli", "DEF")  # type: ignore[no-untyped-call]
_library.define("run(Tensor program, Tensor[] inputs, SymInt[] sizes, str interface) -> Tensor[]")


def _run(*args: Any) -> Any:
    # Imports NumPy and the player with the first call, not with `import torch`.
    from lapilli.runtime.operator import run

    return run(*args)


def _fake(*args: Any) -> Any:
    # As in `_run`.
    from lapilli.runtime.operator import fake

    return fake(*args)


def _backward(ctx: Any, *gradients: Any) -> Any:
    raise InvalidInputError("a lowered module has no gradients: train the module that it was lowered from")


@cache
def _differentiable() -> Any:
    made: Any = torch._library.autograd
    return made.make_autograd_impl(torch.ops.lapilli.run.default, made.Info(_backward, None))


def _autograd(keyset: Any, *args: Any) -> Any:
    # As torch.library.register_autograd has it; what that makes takes a millisecond, and most processes never need it.
    return _differentiable()(keyset, *args)


_library.impl("run", _run, "CompositeExplicitAutograd")
_library.impl("run", _autograd, "Autograd", with_keyset=True)
# As torch.library.register_fake does, without reading this file and searching all modules for the function's location.
_entry: Any = torch._library.simple_registry.singleton.find("lapilli::run")
_registration = _entry.fake_impl.register(_fake, __name__, _library)
