"""Activations by the names that ONNX gives them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from lapilli.errors import CompileError

Tensor = torch.Tensor
Activation = Callable[[Tensor], Tensor]


def activation(name: str, alpha: float | None = None, beta: float | None = None) -> Activation:
    """A function by its name, with the parameters that it has."""
    a = {"leakyrelu": 0.01, "thresholdedrelu": 1.0, "elu": 1.0, "hardsigmoid": 0.2, "scaledtanh": 1.0, "affine": 1.0}
    b = {"hardsigmoid": 0.5, "scaledtanh": 1.0, "affine": 0.0}
    key = name.lower()
    p = a.get(key, 1.0) if alpha is None else alpha
    q = b.get(key, 0.0) if beta is None else beta
    functions: dict[str, Activation] = {
        "relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "softsign": F.softsign, "softplus": F.softplus,
        "leakyrelu": lambda x: F.leaky_relu(x, p), "elu": lambda x: F.elu(x, p), "affine": lambda x: p * x + q,
        "thresholdedrelu": lambda x: torch.where(x > p, x, 0), "scaledtanh": lambda x: p * torch.tanh(q * x),
        "hardsigmoid": lambda x: torch.clamp(p * x + q, 0, 1), "clip": lambda x: torch.clamp(x, p, q),
    }  # fmt: skip
    if key not in functions:
        raise CompileError(f"the activation {name!r} is not known; there are {', '.join(functions)}")
    return functions[key]
