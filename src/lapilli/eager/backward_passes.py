"""Backward passes on the device: they run in the thread that calls them, and raise what their hooks raised.

Autograd has a thread for each device. Kernels of this one take Python's lock, which costs more in another thread: the passes of
ResNet18 and of a small GPT took 6 to 10 ms longer there, of 15 to 20 (H200). It also starts its threads at the first pass of all,
and none for a device that is used later. So the engine (`patch`) needs none. (Passes started by C++, such as TorchScript's, use
autograd's threads, unless the calling thread has called `backward` before.)

Autograd's engine lets a Python error pend in its thread while it unwinds, and fetches it at the end. In between it leaves the
guard of the device's stream, which asks Python for the type of the device. A call that returns something while an error pends is
a SystemError to Python, and an exception to the guard, which must not throw: std::terminate would end the process. So the
guard's answer puts a pending error aside (`keep`), and the engine raises it where PyTorch finds none.
"""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import Any

import torch

from lapilli.torch_compat import replace

_KEY = "lapilli_errors_of_hooks"
"""PyTorch hands the objects of the thread that calls `backward` on to what runs for it, by such names."""

_KEEPS = hasattr(torch._C, "_remove_obj_from_tls")
"""PyTorch before 2.13 does not count the references of such objects; an error in a hook ends the process there."""


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
    """Autograd's engine without threads, which raises what was put aside in its passes."""

    def run_backward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        torch._C._set_multithreading_enabled(False)  # of the calling thread
        if not _KEEPS:
            return super().run_backward(*args, **kwargs)
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
    """Replaces autograd's engine."""
    replace(torch.autograd.Variable, "_execution_engine", _Engine())
