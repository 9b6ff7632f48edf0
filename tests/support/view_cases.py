"""View operators at fixed and at computed places, and the kinds of tensors that they are taken of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

View = Callable[[Tensor], Tensor]

FIXED: dict[str, View] = {
    "row": lambda x: x[2],
    "last_row": lambda x: x[-1],
    "rows": lambda x: x[1:4],
    "column": lambda x: x[:, 1],
    "columns": lambda x: x[:, 1:3],
    "last_columns": lambda x: x[..., -2:],
    "steps": lambda x: x[1::2, ::2],
    "narrow": lambda x: x.narrow(1, 2, 1),
    "select": lambda x: x.select(1, 2),
    "transposed": lambda x: x.t()[1:],
    "movedim": lambda x: x.unsqueeze(1).movedim(2, 0)[2, 1:],
    "permuted": lambda x: x.unsqueeze(0).permute(2, 0, 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "split": lambda x: x.split(2)[1],
    "split_sizes": lambda x: x.split([1, x.shape[1] - 1], 1)[1],
    "diagonal": lambda x: x.diagonal(1),
    "unfold": lambda x: x.unfold(0, 3, 2)[1],
    "unsqueezed": lambda x: x.unsqueeze(1)[2:],
    "squeezed": lambda x: x[2:3].squeeze(0)[1:],
    "expanded": lambda x: x[1:2].expand(3, -1)[1:],
    "strided": lambda x: x.as_strided((2, 2), (1, 1), 1),
    "strided_here": lambda x: x.as_strided((2, 2), (1, 1)),
    "as_integers": lambda x: x.view(torch.int32)[1:],
    "of_views": lambda x: x[1:][1:, 1:][:, 1:],
    "detached": lambda x: x.detach()[1:],
    "whole": lambda x: x[:],
    "flattened": lambda x: x.flatten()[5:],
    "column_at": lambda x: x[:, x.shape[1] - 1],
    "unfold_at": lambda x: x.unfold(1, x.shape[1] // 2, 1)[:, 1],
}
"""The last two are where torch.compile takes a size for fixed."""

COMPUTED: dict[str, View] = {
    "half": lambda x: x[x.shape[0] // 2 :],
    "half_of_columns": lambda x: x[:, x.shape[1] // 2 :],
    "row_at": lambda x: x[x.shape[0] // 2],
    "narrow_rows": lambda x: x.narrow(0, 1, x.shape[0] - 1),
    "narrow_columns": lambda x: x.narrow(1, x.shape[1] // 2, x.shape[1] - x.shape[1] // 2),
    "chunk": lambda x: torch.chunk(x, 2)[1],
    "chunk_of_columns": lambda x: torch.chunk(x, 2, 1)[1],
    "tensor_split": lambda x: x.tensor_split(2)[1],
    "transposed_half": lambda x: x.t()[x.shape[1] // 2 :, x.shape[0] // 3 :],
    "of_views_at": lambda x: x[x.shape[0] // 2 :][1:, x.shape[1] // 2 :],
    "flattened_at": lambda x: x.flatten()[x.shape[0] :],
    "expanded_at": lambda x: x[x.shape[0] // 2 :][:1].expand(x.shape[0], -1)[x.shape[0] // 3 :],
    "diagonal_at": lambda x: x[x.shape[0] // 3 :].diagonal(),
    "strided_at": lambda x: x.as_strided((2,), (1,), x.shape[1] // 2),
}

VIEWS = FIXED | COMPUTED

KINDS: dict[str, Callable[[int, int], Tensor]] = {
    "contiguous": torch.rand,
    "transposed": lambda n, m: torch.rand(m, n).t(),
    "expanded": lambda n, m: torch.rand(1, m).expand(n, m),
    "offset": lambda n, m: torch.rand(n * m + 5)[5:].view(n, m),
    "inner": lambda n, m: torch.rand(n + 3, m + 3)[2:-1, 1:-2],
}
"""Tensors [n, m]."""
