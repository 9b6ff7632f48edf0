"""The generator of random numbers on the devices.

Every call that draws random numbers has a key of two words: its number since the generator was seeded, and the seed. The numbers
themselves are computed by the kernels (`lapilli.lower.random`)."""

from __future__ import annotations

import secrets
from typing import Any

import torch

_seed = 0
_calls = 0


def manual_seed(seed: int) -> None:
    """Begins the sequence of random numbers of a seed, on all devices. The seed's lower 64 bits count."""
    global _seed, _calls
    _seed, _calls = seed & (2**64 - 1), 0


def seed() -> int:
    """Seeds with a number that nobody knows; returns it."""
    number = secrets.randbits(63)
    manual_seed(number)
    return number


def initial_seed() -> int:
    """The seed in use."""
    return _seed


def get_state() -> torch.Tensor:
    """Where the sequence is: int64 [2] on the CPU."""
    signed = _seed - (1 << 64) if _seed >> 63 else _seed
    return torch.tensor([signed, _calls], dtype=torch.int64, device="cpu")


def set_state(state: torch.Tensor) -> None:
    """Goes on from a state that `get_state` gave."""
    global _seed, _calls
    if state.dtype != torch.int64 or tuple(state.shape) != (2,):
        raise ValueError(f"A state of the vulkan generator is int64 of shape [2]; {state.dtype} {list(state.shape)} was given.")
    number, _calls = state.tolist()
    _seed = number & (2**64 - 1)


def next_key(generator: Any = None) -> tuple[int, int]:
    """The key of a call, 32 bits each. A generator of the CPU gives keys of its own."""
    global _calls
    if generator is not None:
        first, second = torch.randint(2**32, (2,), generator=generator, device="cpu").tolist()
        return first, second
    _calls += 1
    mixed = (_seed ^ (_seed >> 32)) & 0xFFFFFFFF if _seed >> 32 else _seed
    return _calls & 0xFFFFFFFF, mixed


manual_seed(torch.initial_seed())
