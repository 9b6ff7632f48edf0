"""Nested inputs and outputs: as torch has them, without torch."""

from __future__ import annotations

import collections
import dataclasses
import json
from typing import Any, NamedTuple

import pytest

from lapilli import InvalidFileError, InvalidInputError
from lapilli.runtime.structure import LEAF, Record, Spec, Structure, from_torch, paths


class Pair(NamedTuple):
    left: Any
    right: Any


def structure(inputs: Spec, names: tuple[str, ...] = (), outputs: Spec = LEAF) -> Structure:
    return Structure(inputs, outputs, names)


def call_spec(*args: Spec, **kwargs: Spec) -> Spec:
    return Spec("tuple", (Spec("tuple", args), Spec("dict", tuple(kwargs.values()), tuple(kwargs))))


def test_plain_call() -> None:
    flat = Structure.flat(2, 1)
    assert flat.flatten_call(("a", "b"), {}) == ["a", "b"]
    assert flat.unflatten_outputs(["y"]) == "y"
    assert Structure.flat(1, 2).unflatten_outputs(["y", "z"]) == ("y", "z")


def test_nested_call_and_keywords() -> None:
    spec = call_spec(LEAF, Spec("dict", (LEAF, Spec("list", (LEAF, LEAF))), ("x", "more")), scale=LEAF)
    nested = structure(spec, ("image", "options"))
    expected = [1, 2, 3, 4, 5]
    assert nested.flatten_call((1, {"more": [3, 4], "x": 2}), {"scale": 5}) == expected
    assert nested.flatten_call((1,), {"options": {"x": 2, "more": (3, 4)}, "scale": 5}) == expected
    assert nested.flatten_call((), {"image": 1, "options": {"x": 2, "more": [3, 4]}, "scale": 5}) == expected


def test_constants_and_none_may_be_left_out_but_not_changed() -> None:
    fixed = structure(call_spec(LEAF, Spec("none"), Spec("constant", value=2), flag=Spec("constant", value=True)))
    assert fixed.flatten_call(("x",), {}) == ["x"]
    assert fixed.flatten_call(("x", None, 2), {"flag": True}) == ["x"]
    for args, kwargs, message in (
        (("x", "mask"), {}, "was None when the model was compiled"),
        (("x", None, 3), {}, "was 2 when the model was compiled and cannot be 3"),
        (("x", None, 2.0), {}, "was 2"),
        (("x",), {"flag": 1}, "was True"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            fixed.flatten_call(args, kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"argument 0 \('image'\) is missing; the program takes \(image, pair, mask=\)"),
        (("x", ("l", "r"), "z"), {"mask": "m"}, "3 positional arguments were given"),
        (("x", ("l", "r")), {}, "keyword argument 'mask' is missing"),
        (("x", ("l", "r")), {"mask": "m", "maks": "n"}, "Unknown keyword argument 'maks'"),
        (("x", ("l",)), {"mask": "m"}, "pair must have 2 elements, but has 1"),
        (("x", "l"), {"mask": "m"}, "pair must be a namedtuple of 2, but is a str"),
        (("x", None), {"mask": "m"}, "pair must be a namedtuple of 2, but is None"),
        (("x", ("l", "r")), {"mask": "m", "image": "y"}, "Unknown keyword argument 'image'"),
    ],
)
def test_wrong_calls_say_what_is_wrong(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    pair = Spec("namedtuple", (LEAF, LEAF), ("left", "right"), type="nowhere:Pair")
    wrong = structure(call_spec(LEAF, pair, mask=LEAF), ("image", "pair"))
    with pytest.raises(InvalidInputError, match=message):
        wrong.flatten_call(args, kwargs)


def test_arguments_that_are_tensors_have_names() -> None:
    pair = Spec("tuple", (LEAF, LEAF))
    assert structure(call_spec(LEAF, pair, LEAF, mask=LEAF), ("image", "pair")).argument_names() == {
        0: "image",
        4: "mask",
    }
    assert Structure.flat(2, 1).argument_names() == {}


def test_dict_arguments() -> None:
    spec = structure(call_spec(Spec("dict", (LEAF, LEAF), ("a", "b"))), ("batch",))
    with pytest.raises(InvalidInputError, match=r"batch has no 'b'; it needs the keys 'a', 'b'"):
        spec.flatten_call(({"a": 1},), {})
    with pytest.raises(InvalidInputError, match=r"batch has the unknown keys \['c'\]"):
        spec.flatten_call(({"a": 1, "b": 2, "c": 3},), {})
    with pytest.raises(InvalidInputError, match="batch must be a dict"):
        spec.flatten_call(([1, 2],), {})


def test_outputs_of_every_kind() -> None:
    outputs = Spec(
        "tuple",
        (
            Spec("list", (LEAF, Spec("none"))),
            Spec("namedtuple", (LEAF, LEAF), ("left", "right"), type=f"{__name__}:Pair"),
            Spec("namedtuple", (LEAF, LEAF), ("values", "indices"), type=":max"),
            Spec("record", (LEAF, LEAF), ("logits", "hidden")),
            Spec("dict", (LEAF,), (3,)),
            Spec("constant", value="done"),
        ),
    )
    loaded = Structure.from_json(structure(call_spec(), outputs=outputs).to_json())
    listed, pair, top, record, numbered, constant = loaded.unflatten_outputs(range(8))
    assert listed == [0, None] and pair == Pair(1, 2) and type(pair) is Pair
    assert (top.values, top.indices) == (3, 4)
    assert isinstance(record, Record) and record.logits == record["logits"] == record[0] == 5 and record.hidden == 6
    assert numbered == {3: 7} and constant == "done"
    with pytest.raises(AttributeError, match="no output 'logit'; there are logits, hidden"):
        record.logit  # noqa: B018


def test_paths() -> None:
    spec = Spec("tuple", (LEAF, Spec("dict", (LEAF,), ("mask",)), Spec("record", (LEAF,), ("logits",))))
    assert paths(spec) == ["[0]", "[1]['mask']", "[2].logits"]


@pytest.mark.parametrize(
    "damage",
    [
        "null",
        "{}",
        "[]",
        '{"inputs": {"kind": "leaf"}, "outputs": {"kind": "leaf"}}',
        '{"inputs": {"kind": "tuple", "children": [{"kind": "tuple"}, {"kind": "dict"}]}, "outputs": {"kind": "x"}}',
        '{"inputs": {"kind": "tuple", "children": 3}, "outputs": {"kind": "leaf"}}',
        json.dumps({"inputs": Structure.flat(1, 1).inputs.to_json(), "outputs": {"kind": "dict", "keys": ["a"]}}),
        '{"inputs": ' + '{"kind": "tuple", "children": [' * 150 + "]}" * 150 + ', "outputs": {"kind": "leaf"}}',
    ],
)
def test_damaged_structure_is_refused(damage: str) -> None:
    with pytest.raises(InvalidFileError, match="structure in the program's metadata is damaged"):
        Structure.from_json(json.loads(damage))


def test_structure_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidFileError, match="does not fit"):
        Structure.flat(2, 1).check(1, 1)


def test_file_does_not_choose_what_is_imported() -> None:
    spec = Spec("namedtuple", (LEAF,), ("x",), type="antigravity:Point")
    point = Structure(call_spec(), spec).unflatten_outputs([1])
    import sys

    assert point.x == 1 and type(point).__name__ == "Point" and "antigravity" not in sys.modules


def test_from_torch_round_trips() -> None:
    pytree = pytest.importorskip("torch.utils._pytree")

    @dataclasses.dataclass
    class Output:
        logits: Any
        hidden: Any = None

    pytree.register_dataclass(Output)
    values = (1, [2, None], {"a": 3, "b": Pair(4, "s")}, collections.OrderedDict(z=5), Output(6))
    leaves, treespec = pytree.tree_flatten(values)
    constants = {i: leaf for i, leaf in enumerate(leaves) if leaf is None or isinstance(leaf, str)}
    spec = from_torch(treespec, constants)
    assert spec == Spec.from_json(json.loads(json.dumps(spec.to_json())))
    tensors = [leaf for i, leaf in enumerate(leaves) if i not in constants]
    flat = Structure(call_spec(spec), spec)
    assert flat.flatten_call((values,), {}) == tensors
    one, listed, nested, ordered, record = flat.unflatten_outputs(tensors)
    assert (one, listed, ordered, record.logits) == (1, [2, None], {"z": 5}, 6)
    assert nested["b"] == Pair(4, "s") and type(nested["b"]) is Pair


def test_from_torch_knows_torch_return_types() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils import _pytree

    treespec = _pytree.tree_flatten(torch.max(torch.rand(2, 3), 0))[1]
    result = Structure(call_spec(), from_torch(treespec)).unflatten_outputs([1, 2])
    assert (result.values, result.indices) == (1, 2)


def test_from_torch_refuses_other_constants() -> None:
    from torch.utils import _pytree

    with pytest.raises(InvalidInputError, match="type object cannot be"):
        from_torch(_pytree.tree_flatten([0])[1], {0: object()})  # type: ignore[dict-item]
