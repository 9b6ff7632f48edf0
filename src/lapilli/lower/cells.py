"""The cells of LSTM and GRU, and their gradients, in terms of other operators: what PyTorch calls on devices other than the CPU.

The workspace holds what the backward pass needs: its columns are ours to choose, for nobody else reads them."""

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
    """Gates [N, 4H] from the input and from the hidden state, cell [N, H]. Results: hidden and cell state, and the gates."""
    gates = _biased(from_input, input_bias) + _biased(from_hidden, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


@decomposition(aten._thnn_fused_lstm_cell_backward_impl.default)
def lstm_cell_backward(
    grad_hidden: Tensor | None, grad_cell: Tensor | None, cell: Tensor, new: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the gates, of the old cell state, and of a bias."""
    i, f, g, o = gates.chunk(4, 1)
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
    """Gates [N, 3H] from the input and from the hidden state [N, H]. Results: the new hidden state, and what backward needs."""
    xr, xz, xn = _biased(from_input, input_bias).chunk(3, 1)
    hr, hz, hn = _biased(from_hidden, hidden_bias).chunk(3, 1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    return n + z * (hidden - n), torch.cat([r, z, n, hidden, hn], 1)


@decomposition(aten._thnn_fused_gru_cell_backward.default)
def gru_cell_backward(
    grad: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of both kinds of gates, of the old hidden state, and of both biases."""
    r, z, n, hidden, hn = workspace.chunk(5, 1)
    grad_z = grad * (hidden - n) * z * (1 - z)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r = grad_n * hn * r * (1 - r)
    of_input, of_hidden = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    return of_input, of_hidden, grad * z, of_input.sum(0) if has_bias else None, of_hidden.sum(0) if has_bias else None
