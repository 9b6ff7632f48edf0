"""Errors that hooks raise in a backward pass, kept while C++ leaves the guard of the device's stream.

Autograd's engine lets a Python error pend in its thread while it unwinds, and fetches it at the end. In between it leaves the
guard of the device's stream, which asks Python for the type of the device. A call that returns something while an error pends is
a SystemError to Python, and an exception to the guard, which must not throw: std::terminate would end the process. So the
guard's answer puts a pending error aside (`keep`), and the engine (`patch`) raises it where PyTorch finds none.
"""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import Any

import torch

from lapilli.torch_compat import replace

_KEY = "lapilli_errors_of_hooks"
"""PyTorch hands the objects of the thread that calls `backward` on to the engine's threads, by such names."""


_call = partial(get_ident)
"""Python checks what a function of C returns, unless the code that calls it is specialized; calls by `partial` never are."""


def keep() -> None:
    """Puts the error that pends in this thread aside, if there is one."""
    try:
        _call()
    except SystemError as error:
        kept = _kept()
        if error.__cause__ is None or kept is None:
            raise
        kept.append(error.__cause__)


def _kept() -> list[BaseException] | None:
    """What is put aside in the pass that this thread works for; None: it works for none of ours."""
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None


class _Engine(torch._C._ImperativeEngine):
    """Autograd's engine, which raises what was put aside in its passes."""

    def run_backward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        kept: list[BaseException] = []
        outer = _kept()  # a hook may call a pass of its own
        torch._C._stash_obj_in_tls(_KEY, kept)
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:
            if not kept:
                raise
        finally:
            if outer is None:
                torch._C._remove_obj_from_tls(_KEY)
            else:
                torch._C._stash_obj_in_tls(_KEY, outer)
        raise kept.pop(0)  # not named: its traceback holds this frame


def patch() -> None:
    """Replaces the engine by one that works alike, and raises these errors. Not in PyTorch before 2.13, which does not count the
    references of such objects, and where an error in a hook ends the process."""
    if hasattr(torch._C, "_remove_obj_from_tls"):
        replace(torch.autograd.Variable, "_execution_engine", _Engine())
