"""Programs whose metadata says what it should not: scripts by hand, and a generator that damages good ones."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import flatbuffers
import numpy as np
import tiny

from lapilli.format.container import to_bytes
from lapilli.runtime.interface import METADATA_KEY
from lapilli.runtime.structure import LEAF, Spec, Structure

Json = Any
OPERATORS = ("aten.nonzero.default", "aten.select.int", "aten.div.Tensor_mode", "aten.sum.dim_IntList", "aten.unbind.int",
             "aten.full.default", "aten._fft_r2c.default", "aten._fft_c2r.default")  # fmt: skip


def call(op: str, args: Sequence[Json], *outs: str, **more: Json) -> Json:
    return {"op": op, "args": list(args), "outs": list(outs), "kwargs": {}, "method": -1, "scripts": []} | more


def script(inputs: Sequence[str], calls: Sequence[Json], outputs: Sequence[Json], **more: Json) -> Json:
    given = {"inputs": list(inputs), "outputs": list(outputs), "calls": list(calls)}
    return given | {"constants": {}, "symbols": {}, "states": {}} | more


def v(name: str) -> Json:
    return {"v": name}


def interface(node: Json, inputs: int = 1, outputs: int = 1) -> list[Json]:
    """The metadata of one method with this script, on float32 tensors [N, 3]."""
    names = Structure(Spec("tuple", (Spec("tuple", (LEAF,) * inputs), Spec("dict"))), Spec("tuple", (LEAF,) * outputs))
    spec = {"name": "x", "dtype": "float32", "shape": ["N", 3], "symbols": []}
    return [
        {"name": "forward", "structure": names.to_json(), "operators": [["n", "aten.f", "cpu", "no GPU lowering"]],
         "script": node, "inputs": [spec] * inputs, "outputs": [spec] * outputs}
    ]  # fmt: skip


def program(methods: Json, operators: Sequence[str] = OPERATORS, metadata: Mapping[str, str] | None = None) -> bytes:
    """The file: its one player's method scales [N, 3] twice; methods: the JSON of its metadata, or its text."""
    made = tiny.Tiny({METADATA_KEY: methods if isinstance(methods, str) else json.dumps(methods), **(metadata or {})})
    made.symbol("N", 1, 16, 0, 0)
    weights = np.array([1, 2, 3], np.float32)
    x, y = made.input("x", "float32", ("N", 3)), made.output("y", "float32", ("N", 3))
    w = made.constant("weights", weights)
    made.dispatch("scale", (x, w, y), made.product(("N", 3), 1), 3)
    made.program.hostOperators = list(operators)
    return made.bytes()


def renamed(name: bytes) -> bytes:
    """A program in which everything that has a name has this one."""
    made = tiny.Tiny({"note": "text"})
    x, y = made.input("x", "float32", (4,)), made.output("y", "float32", (4,))
    made.dispatch("copy", (x, y), made.number(4))
    root = made.program
    root.producer = made.method.name = made.plan.name = name
    for thing in (*made.method.inputs, *made.method.outputs, *made.plan.buffers, *root.kernels):
        thing.name = name
    for dispatch in made.plan.run:
        dispatch.label = name
    root.metadata[0].key = root.metadata[0].value = name
    root.hostOperators = [name]
    made.bytes()  # fills in what is known at the end
    builder = flatbuffers.Builder(1024)
    builder.Finish(root.Pack(builder), b"LAPI")
    return bytes(to_bytes(bytes(builder.Output()), made.data))


def everything() -> list[Json]:
    """A method that uses all that scripts have."""
    half = script(
        ["a"], [call("aten.div.Tensor_mode", [v("a"), 2.0], "h", kwargs={"rounding_mode": "floor"})], [v("h")]
    )
    same = script(["a"], [], [v("a")])
    more = script(["k", "a"], [call("number", ["lt", v("k"), 3], "more")], [v("more")])
    step = script(
        ["k", "a"],
        [call("number", ["add", v("k"), 1], "next"), call("gpu", [v("a")], "b", method=0)],
        [v("next"), v("b")],
    )
    add = script(["c", "row"], [call("aten.div.Tensor_mode", [v("row"), v("c")], "d", kwargs={"rounding_mode": None})],
                 [v("c"), v("d")])  # fmt: skip
    calls = [
        call("gpu", [v("x")], "y", method=0),
        call("aten.nonzero.default", [v("y")], "places"),
        call("aten.unbind.int", [v("places"), 1], "columns"),
        call("getitem", [v("columns"), 0], "rows"),
        call("aten.sum.dim_IntList", [v("y"), [0, 1], False], "total", kwargs={"dtype": {"dtype": "float64"}}),
        call("item", [v("total")], "number"),
        call("number", ["gt", v("number"), 0.5], "positive"),
        call("cond", [v("positive"), [v("y")]], "chosen", scripts=[half, same]),
        call("while", [[0, v("chosen")], []], "count", "grown", scripts=[more, step]),
        call("aten.full.default", [[{"size": ["+", "n", 1]}, 3], 2.0], "twos", kwargs={"device": {"device": "cpu"}}),
        call("scan", [[v("w")], [v("grown")], []], "carry", "stacked", scripts=[add]),
        call("aten._fft_r2c.default", [v("stacked"), [1], 0, True], "f"),
        call("aten._fft_c2r.default", [v("f"), [1], 2, 3], "g"),
    ]
    return interface(
        script(
            ["x"],
            calls,
            [v("g")],
            constants={"w": 0},
            symbols={"n": ["dim", "x", 0, 1, 0], "m": ["value", "number"]},
            states={"s": ["kept", 0, v("carry")]},
        )
    )


WORDS = ("", "x", "y", "rows", "gpu", "while", "scan", "cond", "item", "getitem", "number", "load_library", "os.system",
         "higher_order.wrap", "higher_order.wrap.default", "aten.from_file.default", "aten.save.default", "aten.fill_.Scalar",
         "aten.sum.out", "aten.add", "aten.add.Tensor.x", "aten._sparse_coo_tensor_unsafe.default", "builtins.eval.default",
         "prims.device_put.default", "__class__", "_import_dotted_name", "int64", "sparse_coo", "channels_last", "pow", "mul",
         "neg", "\x1b[2J", "\ud800", "é", "a" * 5000, "antigravity:Spam", "this:d", "N")  # fmt: skip
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    63,
    1 << 31,
    1 << 62,
    1 << 63,
    -(1 << 63),
    10**30,
    0.5,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
)
TAGS = (
    "v",
    "size",
    "complex",
    "dtype",
    "layout",
    "memory_format",
    "device",
    "any",
    "_C",
    "ops",
    "hub",
    "load",
)


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Room for the tests' own walks over what is nested deeply: the library keeps Python's limit."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@deep_recursion()
def damaged(node: Json, rng: random.Random) -> Json:
    """A copy with one to three changes."""
    copy = deepcopy(node)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = _places(copy)
        if not places:
            break
        holder, key = rng.choice(places)
        old = holder[key]
        kind = rng.randrange(8)
        if kind == 0:
            holder[key] = rng.choice(WORDS)
        elif kind == 1:
            holder[key] = rng.choice(NUMBERS)
        elif kind == 2:
            other, where = rng.choice(places)
            holder[key] = deepcopy(other[where])
        elif kind == 3:
            holder[key] = {rng.choice(TAGS): rng.choice((*WORDS, *NUMBERS, [], {}, None))}
        elif kind == 4:
            holder[key] = rng.choice((None, True, False, [], {}, [[]], [old], {"v": old}, _deep(rng.choice((20, 900)))))
        elif kind == 5:
            del holder[key]
        elif kind == 6 and isinstance(holder, list):
            holder.insert(key, deepcopy(old))
        elif kind == 7 and isinstance(old, dict) and old:
            old[rng.choice((*WORDS, *TAGS))] = old.pop(rng.choice(list(old)))
    return copy


def _places(node: Json) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    keys: Any = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        found.append((node, key))
        found += _places(node[key])
    return found


def _deep(levels: int) -> Json:
    node: Json = 1
    for _ in range(levels):
        node = ["+", node, 1]
    return node
