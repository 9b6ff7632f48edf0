"""Autograd's threads. It creates one for every device at its first backward pass, and none later: a device that is first
used after a backward pass on the CPU would have none.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path

import torch

_ENGINE = "_ZN5torch8autograd6Engine18get_default_engineEv"
_START = "_ZN5torch8autograd6Engine20start_device_threadsEv"


def start() -> None:
    """Makes autograd create its threads again, if it started without one for the device."""
    if _run_backward():
        return
    try:
        library = ctypes.CDLL(str(_library()))
        engine, make = getattr(library, _ENGINE), getattr(library, _START)
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            "Autograd was used on the CPU before the first use of the device 'vulkan', and cannot be restarted here. Call "
            "torch.vulkan.init() before the first backward pass."
        ) from error
    engine.restype, make.restype, make.argtypes = ctypes.c_void_p, None, [ctypes.c_void_p]
    make(engine())


def _library() -> Path:
    name = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(sys.platform, "libtorch_cpu.so")
    return Path(torch.__file__).parent / "lib" / name


def _run_backward() -> bool:
    """Whether a backward pass of a tensor on the device works. It runs in a new thread, because modes may be active in the
    caller's.
    """
    failed: list[Exception] = []

    def attempt() -> None:
        try:
            leaf = torch.empty(0, device="vulkan", requires_grad=True)
            torch.autograd.backward([leaf], [torch.empty(0, device="vulkan")])
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    if failed and "device_ready_queues_" not in str(failed[0]):
        raise failed[0]
    return not failed
