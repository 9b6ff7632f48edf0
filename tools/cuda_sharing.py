"""Memory that the player and torch's CUDA share, without a copy: written by torch, read and written by a program, read by torch.

    python tools/cuda_sharing.py liblapilli.so MODEL.lap

MODEL has one float32 input and output. The player makes both tensors (`lapilli_buffer_create_shared`), and CUDA imports their
file descriptors (`cudaImportExternalMemory`). Needs an NVIDIA GPU, its Vulkan driver, and torch with CUDA. Prints the
milliseconds of a run, from tensor to tensor of torch: shared, and with copies through the host. MODEL.results is what torch
saves of two runs: `given`, `first` for it, `second` for 2 given - 1.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from ctypes import byref, c_char_p, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch

OPAQUE_FD, FLOAT32 = 1, 8


class DeviceTensor(ctypes.Structure):
    """lapilli_device_tensor."""

    _fields_ = (
        ("buffer", c_void_p),
        ("offset", c_uint64),
        ("shape", c_int64 * 16),
        ("rank", c_uint32),
        ("dtype", c_uint32),
    )


class SharedMemory(ctypes.Structure):
    """lapilli_shared_memory."""

    _fields_ = (("kind", c_uint32), ("handle", c_int64), ("memory_bytes", c_uint64), ("offset", c_uint64))


class Spec(ctypes.Structure):
    """lapilli_spec."""

    _fields_ = (
        ("name", c_char_p),
        ("dtype", c_uint32),
        ("rank", c_uint32),
        ("shape", c_int64 * 16),
        ("min", c_int64 * 16),
        ("max", c_int64 * 16),
    )


class ExternalMemory(ctypes.Structure):
    """cudaExternalMemoryHandleDesc with a file descriptor."""

    _fields_ = (
        ("type", c_uint64),  # 32 bits, and as many before the union
        ("fd", c_int64),  # of the union, whose first bytes it is
        ("more", c_uint64),
        ("size", c_uint64),
        ("flags", c_uint32),
        ("reserved", c_uint32 * 16),
    )


class ExternalBuffer(ctypes.Structure):
    """cudaExternalMemoryBufferDesc."""

    _fields_ = (("offset", c_uint64), ("size", c_uint64), ("flags", c_uint32), ("reserved", c_uint32 * 16))


class Shared:
    """A tensor of the player that torch sees, too."""

    def __init__(self, player: Any, cuda: Any, stream: c_void_p, shape: tuple[int, ...]) -> None:
        size = 4
        for n in shape:
            size *= n
        self.tensor = DeviceTensor(rank=len(shape), dtype=FLOAT32, shape=(c_int64 * 16)(*shape))
        buffer, memory = c_void_p(), SharedMemory()
        player(player.library.lapilli_buffer_create_shared(stream, OPAQUE_FD, c_uint64(size), byref(buffer)))
        player(player.library.lapilli_buffer_export(buffer, OPAQUE_FD, byref(memory)))
        self.tensor.buffer = buffer
        external, pointer = c_void_p(), c_void_p()
        cuda(
            cuda.library.cudaImportExternalMemory(
                byref(external), byref(ExternalMemory(type=1, fd=memory.handle, size=memory.memory_bytes))
            )
        )  # which closes the descriptor
        cuda(
            cuda.library.cudaExternalMemoryGetMappedBuffer(
                byref(pointer), external, byref(ExternalBuffer(offset=memory.offset, size=size))
            )
        )
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": (pointer.value, False), "version": 3}
        self.torch = torch.as_tensor(self, device="cuda")


class Calls:
    """A library whose calls return 0, or say why not."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)

    def __call__(self, status: int) -> None:
        if status:
            name = "lapilli_last_error" if hasattr(self.library, "lapilli_last_error") else "cudaGetErrorString"
            say = getattr(self.library, name)
            say.restype = c_char_p
            raise SystemExit((say() if name.startswith("lapilli") else say(status)).decode())


def median(run: Any, times: int = 30) -> float:
    """Milliseconds."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return 1e3 * statistics.median(found)


def main(library: str, model: str) -> None:
    """As the module says."""
    torch.zeros(1, device="cuda")
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtime = next(line.split()[-1] for line in maps if "libcudart" in line)  # that of torch
    player, cuda = Calls(library), Calls(runtime)
    c = player.library
    c.lapilli_destroy.argtypes = [c_void_p]
    program, stream, method = c_void_p(), c_void_p(), c_uint32(0)
    player(c.lapilli_load(model.encode(), None, byref(program)))
    player(c.lapilli_program_stream(program, byref(stream)))
    specs = Spec(), Spec()
    player(c.lapilli_input_spec(program, method, c_uint32(0), byref(specs[0])))
    player(c.lapilli_output_spec(program, method, c_uint32(0), byref(specs[1])))
    x, y = (Shared(player, cuda, stream, tuple(max(n, 1) for n in s.shape[: s.rank])) for s in specs)

    def run() -> None:
        torch.cuda.synchronize()
        player(
            c.lapilli_enqueue_tensors(
                stream, program, method, None, c_uint32(0), byref(x.tensor), c_uint32(1), byref(y.tensor), c_uint32(1)
            )
        )
        player(c.lapilli_synchronize(stream))

    given = torch.rand(x.torch.shape, device="cuda")
    x.torch.copy_(given)
    run()
    first = y.torch.clone()
    x.torch.mul_(2).sub_(1)  # torch changes it where it is
    run()
    second = y.torch.clone()
    shared = median(run)
    host_in, host_out = given.cpu(), torch.empty(y.torch.shape)
    write, read = c.lapilli_buffer_write, c.lapilli_buffer_read
    write.argtypes = read.argtypes = [c_void_p, c_uint64, c_void_p, c_uint64]

    def copied() -> None:
        host_in.copy_(given)
        player(write(x.tensor.buffer, 0, host_in.data_ptr(), 4 * host_in.numel()))
        run()
        player(read(y.tensor.buffer, 0, host_out.data_ptr(), 4 * host_out.numel()))
        host_out.cuda()

    torch.save({"given": given.cpu(), "first": first.cpu(), "second": second.cpu()}, model + ".results")
    print(f"shared {shared:.3f} ms, through the host {median(copied):.3f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
