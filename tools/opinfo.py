"""PyTorch's operator tests (op_db): the entries, shards and samples that every walk over them takes."""

from __future__ import annotations

import random
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any
from zlib import crc32

import numpy as np
import torch


@cache
def database() -> list[Any]:
    """All entries. From now on, those that draw random numbers draw others at every call, as their operators do."""
    from torch.testing._internal import common_methods_invocations as torchs

    torchs.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # type: ignore[attr-defined]
    return list(torchs.op_db)


@cache
def entries() -> dict[str, Any]:
    """The entries that take float32, by name; a variant's is behind a dot."""
    floats = (e for e in database() if torch.float32 in e.dtypes)
    return {e.name + (f".{e.variant_test_name}" if e.variant_test_name else ""): e for e in floats}


@cache
def by_operator() -> dict[str, list[Any]]:
    """The entries by their names and by those of their operators in ATen."""
    found: dict[str, list[Any]] = {}
    for entry in database():
        for name in {entry.name, entry.aten_name}:
            found.setdefault(name, []).append(entry)
    return found


def samples(entry: Any, dtype: torch.dtype, requires_grad: bool = False) -> Iterator[Any]:
    """As `entry.sample_inputs` gives them on the CPU, with the same seed for each; but torch seeds the generators of all devices
    that there might be, and looks at the stack, which takes longer than the samples."""
    from torch.testing._internal.common_utils import SEED

    def seed() -> None:
        torch.default_generator.manual_seed(SEED)
        np.random.seed(SEED)
        random.seed(SEED)

    seed()
    found = iter(entry.sample_inputs_func(entry, "cpu", dtype, requires_grad))
    while True:
        seed()
        try:
            yield next(found)
        except StopIteration:
            return


def shard(names: Iterable[str], count: int, number: int = 0) -> list[str]:
    """Those names that belong to one of so many shards. A name says itself which: others may come and go."""
    if not 0 <= number < count:
        raise ValueError(f"There is no shard {number} of {count}: they are numbered from 0 to {count - 1}.")
    return [name for name in names if crc32(name.encode()) % count == number]


def parse_shard(text: str) -> tuple[int, int]:
    """The count and the number of a shard that is written as NUMBER/COUNT, for argparse."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ArgumentTypeError(
            f"a shard is written NUMBER/COUNT, such as 0/25, with a number below the count; this is {text!r}."
        )
    return int(count), int(number)
