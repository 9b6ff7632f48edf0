"""LSTM and GRU cells and their gradients as compositions of other operators. PyTorch calls these operators on devices other
than the CPU.

The formulas are those of torch.nn.LSTMCell and torch.nn.GRUCell. The workspace that is passed to the backward operator has
a layout of our own: nothing else reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapilli.lower.registry import decomposition

aten = torch.ops.aten


@decomposition(aten._thnn_fused_lstm_cell.default)
def lstm_cell(
    from_input: Tensor,
    from_hidden: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """from_input and from_hidden [N, 4H] (gates in the order i, f, g, o), cell [N, H] -> hidden state [N, H], cell state
    [N, H], and the workspace [N, 4H].

    c' = f * c + i * g and h' = o * tanh(c'), where i, f and o are sigmoids and g is a hyperbolic tangent of their sums.
    """
    gates = _biased(from_input, input_bias) + _biased(from_hidden, hidden_bias)
    i, f, g, o = _parts(gates, cell)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def _parts(x: Tensor, like: Tensor, count: int = 4) -> list[Tensor]:
    """x split into `count` parts with as many columns as `like`. (torch.chunk needs sizes known at compile time.)"""
    size = like.shape[1]
    return [x.narrow(1, k * size, size) for k in range(count)]


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


@decomposition(aten._thnn_fused_lstm_cell_backward_impl.default)
def lstm_cell_backward(
    grad_hidden: Tensor | None, grad_cell: Tensor | None, cell: Tensor, new: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """grad_hidden, grad_cell, cell, new [N, H], gates [N, 4H] -> gradients of the gates [N, 4H], of the old cell state [N,
    H], and of a bias [4H] or None.
    """
    i, f, g, o = _parts(gates, cell)
    squashed = new.tanh()
    along = torch.zeros_like(cell) if grad_cell is None else grad_cell
    grad_o = torch.zeros_like(o)
    if grad_hidden is not None:
        along = along + grad_hidden * o * (1 - squashed * squashed)
        grad_o = grad_hidden * squashed * o * (1 - o)
    grad = torch.cat([along * g * i * (1 - i), along * cell * f * (1 - f), along * i * (1 - g * g), grad_o], 1)
    return grad, along * f, grad.sum(0) if has_bias else None


@decomposition(aten._thnn_fused_gru_cell.default)
def gru_cell(
    from_input: Tensor,
    from_hidden: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """from_input and from_hidden [N, 3H] (gates in the order r, z, n), hidden [N, H] -> the new hidden state [N, H] and the
    workspace [N, 5H].

    h' = n + z * (h - n) with r, z = sigmoid(x + h) of their gates and n = tanh(x_n + r * h_n).
    """
    xr, xz, xn = _parts(_biased(from_input, input_bias), hidden, 3)
    hr, hz, hn = _parts(_biased(from_hidden, hidden_bias), hidden, 3)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    return n + z * (hidden - n), torch.cat([r, z, n, hidden, hn], 1)


@decomposition(aten._thnn_fused_gru_cell_backward.default)
def gru_cell_backward(
    grad: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """grad [N, H], workspace [N, 5H] -> gradients of the gates from the input and from the hidden state (both [N, 3H]), of
    the old hidden state [N, H], and of both biases ([3H] or None).
    """
    r, z, n, hidden, hn = _parts(workspace, grad, 5)
    grad_z = grad * (hidden - n) * z * (1 - z)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r = grad_n * hn * r * (1 - r)
    of_input, of_hidden = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    return of_input, of_hidden, grad * z, of_input.sum(0) if has_bias else None, of_hidden.sum(0) if has_bias else None
