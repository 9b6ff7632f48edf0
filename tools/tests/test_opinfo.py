"""The entries, shards and samples of PyTorch's operator tests."""

from __future__ import annotations

import itertools
from argparse import ArgumentTypeError

import opinfo
import pytest
import torch
from torch.utils._pytree import tree_leaves


def test_shards_have_every_name_once() -> None:
    names = list(opinfo.entries())
    parts = [opinfo.shard(names, 7, k) for k in range(7)]
    assert sorted(itertools.chain(*parts)) == sorted(names) and opinfo.shard(names, 1) == names
    assert all(len(names) / 14 < len(part) < len(names) / 4 for part in parts)


def test_a_new_name_leaves_the_others_in_their_shards() -> None:
    names = ["add", "conv2d", "linalg.svd", "nn.functional.gelu", "softmax"]
    for k in range(3):
        with_another = opinfo.shard(["abs", *names[:2], "bmm", *names[2:]], 3, k)
        assert [name for name in with_another if name in names] == opinfo.shard(names, 3, k)


def test_shards_are_written_as_fractions() -> None:
    assert opinfo.parse_shard("0/25") == (25, 0) and opinfo.parse_shard("2/3") == (3, 2)
    for text in ("", "3", "3/3", "-1/3", "1/0", "a/b", "1/2/3"):
        with pytest.raises(ArgumentTypeError, match="a shard is written NUMBER/COUNT"):
            opinfo.parse_shard(text)
    with pytest.raises(ValueError, match="no shard 3 of 3"):
        opinfo.shard(["add"], 3, 3)


@pytest.mark.parametrize("name", ["add", "nn.functional.conv2d", "index_put", "softmax"])
def test_samples_are_torchs_own(name: str) -> None:
    entry = opinfo.entries()[name]
    for ours, theirs in zip(
        opinfo.samples(entry, torch.float32), entry.sample_inputs("cpu", torch.float32), strict=True
    ):
        leaves = [tree_leaves((sample.input, sample.args, sample.kwargs)) for sample in (ours, theirs)]
        for a, b in zip(*leaves, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
