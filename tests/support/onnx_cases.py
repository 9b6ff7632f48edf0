"""The ONNX standard's own tests of single operators (`onnx.backend.test`), run in three ways.

`torch`: Lapilli's interpreter on real tensors; `export`: captured by torch.export, and run by torch; `device`: compiled, and run on
the device. A case says right, refused (with the operators that Lapilli names) or wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import torch

import lapilli
from lapilli.capture import capture, prepared
from lapilli.capture.onnx import OnnxModule
from lapilli.capture.onnx.onnx_reading import from_numpy, model_of

RANDOM = ("test_bernoulli", "test_training_dropout")
"""Random results: the standard says no numbers, so shapes, dtypes and the values that there may be are compared."""
SUMS = ("test_dft", "test_stft")
"""Elements that are sums of large ones, which cancel: exact to rounding of the largest, not of themselves."""


@dataclass(frozen=True)
class Outcome:
    """what: "right", "refused" or "wrong". fixed: whether inputs had to be given as Python's numbers, which compiles them in.
    on_cpu: operators of the program that torch computes on the host."""

    what: str
    message: str = ""
    fixed: bool = False
    on_cpu: int = 0


@cache
def cases() -> dict[str, Any]:
    """All cases by name."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case for case in collect_testcases(None)}


def operators(case: Any) -> set[str]:
    return {f"{n.domain}.{n.op_type}" if n.domain else n.op_type for n in case.model.graph.node}


def elements(case: Any) -> int:
    """The elements of a case's inputs; few say little of an operator, and all cases are small."""
    return sum(np.asarray(v).size for inputs, _ in case.data_sets for v in inputs if isinstance(v, np.ndarray))


def uses_strings(case: Any) -> bool:
    """Whether an input or an output is a tensor of strings."""
    values = (*case.model.graph.input, *case.model.graph.output)
    return any(v.type.tensor_type.elem_type == onnx.TensorProto.STRING for v in values)


def value_of(value: Any) -> Any:
    """A value of a case as what a program takes and gives."""
    if value is None:
        return None
    if isinstance(value, list):
        return [value_of(v) for v in value]
    if isinstance(value, onnx.SequenceProto):
        return [value_of(v) for v in value.tensor_values]
    if isinstance(value, onnx.OptionalProto):
        return value_of(value.tensor_value) if value.HasField("tensor_value") else None
    if isinstance(value, onnx.TensorProto):
        value = onnx.numpy_helper.to_array(value)
    return from_numpy(np.asarray(value))


def module_of(case: Any) -> OnnxModule:
    proto = onnx.ModelProto()
    proto.CopyFrom(case.model)
    return OnnxModule(model_of(proto))


def run(case: Any, how: str) -> Outcome:
    """Runs a case. how: "torch", "export" or "device"."""
    try:
        module = module_of(case)
    except lapilli.UnsupportedOperatorError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    failure = Outcome("wrong", "no data")
    for fixed in (0, 1, 2):
        try:
            cpu = 0
            for inputs, outputs in case.data_sets:
                given = [value_of(v) for v in inputs]
                if fixed:
                    given = [_as_numbers(v, fixed) for v in given]
                results, cpu = _results(module, given, how)
                expected = [value_of(v) for v in outputs]
                if len(results) != len(expected):
                    raise AssertionError(f"{len(results)} results, not {len(expected)}")
                for result, wanted in zip(results, expected, strict=True):
                    compare(result, wanted, case)
            return Outcome("right", "", bool(fixed), cpu)
        except AssertionError as error:
            return Outcome("wrong", str(error)[:500], bool(fixed))
        except Exception as error:
            # Where an input decides sizes, the message says to give it as Python's numbers.
            failure = Outcome("wrong", f"{type(error).__name__}: {str(error)[:500]}", bool(fixed))
    return failure


def _as_numbers(value: Any, fixed: int) -> Any:
    """Integers, counts and flags as Python's numbers; in a second try floats as well, as scales of a Resize are."""
    if isinstance(value, torch.Tensor) and value.ndim <= 1 and value.numel() <= 16:
        return value.tolist() if fixed == 2 or not value.is_floating_point() else value
    return value


def _results(module: OnnxModule, given: Sequence[Any], how: str) -> tuple[list[Any], int]:
    """The outputs, and how many operators of the program run on the host."""
    count = len(module.model.graph.outputs)
    with torch.no_grad():
        if how == "torch":
            made, cpu = module(*given), 0
        else:
            program = capture(*prepared(module, given, ()))
            if how == "export":
                made, cpu = program.module()(*given), 0
            else:
                compiled = lapilli.compile(program)
                made, cpu = compiled(*given), len(compiled.report().on_cpu)
    results = [made] if count == 1 else list(made)
    return [_as_tensors(r) for r in results], cpu


def _as_tensors(result: Any) -> Any:
    """A result as tensors; a program that is given none gives arrays of NumPy."""
    if isinstance(result, list | tuple):
        return [_as_tensors(r) for r in result]
    return from_numpy(result) if isinstance(result, np.ndarray) else result


def compare(result: Any, wanted: Any, case: Any) -> None:
    """Raises AssertionError where a result is not the standard's.

    The bounds are the case's own, but a float of 16 bits may be off by two of its steps: numbers are rounded after each of numpy's
    steps there, and the standard does not say which ones an operator has.
    """
    if isinstance(wanted, list) or wanted is None:
        assert (wanted is None) == (result is None)
        for r, w in zip(result or [], wanted or [], strict=True):
            compare(r, w, case)
        return
    assert isinstance(result, torch.Tensor), f"{type(result)} is no tensor"
    assert result.dtype == wanted.dtype, f"{result.dtype}, not {wanted.dtype}"
    assert result.shape == wanted.shape, f"{list(result.shape)}, not {list(wanted.shape)}"
    if case.name.startswith(RANDOM):
        return
    if not wanted.is_floating_point():
        assert torch.equal(result, wanted), f"{result}, not {wanted}"
        return
    relative, absolute = case.rtol, case.atol
    if wanted.dtype in (torch.float16, torch.bfloat16):
        relative = max(relative, 2 * torch.finfo(wanted.dtype).eps)
    if case.name.startswith(SUMS) and wanted.numel():
        absolute = max(absolute, 4 * torch.finfo(wanted.dtype).eps * float(wanted.abs().max()))
    np.testing.assert_allclose(result.double().numpy(), wanted.double().numpy(), rtol=relative, atol=absolute)
