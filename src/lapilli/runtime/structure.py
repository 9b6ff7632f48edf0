"""The nested structure of a model's inputs and outputs, without torch.

A program's inputs and outputs are flat lists of tensors. The model's nesting, `(args, kwargs)` in and any nesting of
tuples, lists, dicts and records out, is stored as JSON in the program's metadata:

    {"inputs": SPEC of (args, kwargs), "outputs": SPEC, "names": ["image", ...], "updates": [0, ...]}

A SPEC is a tree of `{"kind": ..., ...}`; its leaves, left to right, are the program's tensors in order.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any, Literal, cast, get_args

from lapilli.errors import InvalidFileError, InvalidInputError

Kind = Literal["leaf", "none", "constant", "tuple", "list", "dict", "namedtuple", "record"]
Key = str | int | float | bool
Constant = str | int | float | bool


class Record(dict[Any, Any]):
    """A dict whose values are attributes, too; it represents dataclass outputs (transformers' `ModelOutput`)."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no output {name!r}; there are {', '.join(map(str, self))}") from None

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)


@dataclass(frozen=True, slots=True)
class Spec:
    """A node of the tree. `children` are in the order of `keys` if the kind has keys.

    `value` is that of a constant when the model was compiled; `type` names a namedtuple as `module:qualified name`.
    """

    kind: Kind
    children: tuple[Spec, ...] = ()
    keys: tuple[Key, ...] = ()
    value: Constant | None = None
    type: str = ""

    @property
    def leaves(self) -> int:
        """Number of tensors below this node."""
        return 1 if self.kind == "leaf" else sum(child.leaves for child in self.children)

    @property
    def optional(self) -> bool:
        """Whether a call may omit the value, because it has no tensors and is fixed."""
        return self.kind in ("none", "constant")

    def to_json(self) -> dict[str, object]:
        """The node as JSON values."""
        node: dict[str, object] = {"kind": self.kind}
        if self.kind == "constant":
            node["value"] = self.value
        if self.keys:
            node["keys"] = list(self.keys)
        if self.type:
            node["type"] = self.type
        if self.children:
            node["children"] = [child.to_json() for child in self.children]
        return node

    @staticmethod
    def from_json(node: object, depth: int = 0) -> Spec:
        """A node from JSON values. Raises InvalidFileError if they are not a spec."""
        if not isinstance(node, dict) or node.get("kind") not in get_args(Kind) or depth > 100:
            raise InvalidFileError(
                f"The structure in the program's metadata is damaged: {str(node)[:80]!r} is not a node."
            )
        children, keys = node.get("children", []), node.get("keys", [])
        kind, value, type_ = cast(Kind, node["kind"]), node.get("value"), node.get("type", "")
        keyed = kind in ("dict", "namedtuple", "record")
        if (
            not (isinstance(children, list) and isinstance(keys, list) and isinstance(type_, str))
            or len(keys) != (len(children) if keyed else 0)
            or not all(isinstance(key, str | int | float) for key in keys)
            or len(set(keys)) != len(keys)
            or (kind == "namedtuple" and not _is_type(type_, keys))
            or not (value is None or isinstance(value, str | int | float))
            or (children and kind in ("leaf", "none", "constant"))
            or (kind == "constant" and value is None)
        ):
            raise InvalidFileError(f"The structure in the program's metadata is damaged at a node of kind {kind!r}.")
        return Spec(kind, tuple(Spec.from_json(child, depth + 1) for child in children), tuple(keys), value, type_)


LEAF = Spec("leaf")


@dataclass(frozen=True, slots=True)
class Structure:
    """Inputs and outputs of a model.

    inputs: a tuple of (args, kwargs). names: those of the positional parameters, so that they may be given as keywords.
    updates: the input tensors that the model changes, by index; their new values are the program's last outputs, after
    those of `outputs`. inputs_last, outputs_last: the tensors, by index, that callers see as [batch, channels, height,
    width] in channels-last memory format, and the program as [batch, height, width, channels].
    """

    inputs: Spec
    outputs: Spec
    names: tuple[str, ...] = ()
    updates: tuple[int, ...] = ()
    inputs_last: tuple[int, ...] = ()
    outputs_last: tuple[int, ...] = ()

    @staticmethod
    def flat(n_inputs: int, n_outputs: int) -> Structure:
        """The structure of a program without one: positional tensors in, one tensor or a tuple of tensors out."""
        args = Spec("tuple", (LEAF,) * n_inputs)
        outputs = LEAF if n_outputs == 1 else Spec("tuple", (LEAF,) * n_outputs)
        return Structure(Spec("tuple", (args, Spec("dict"))), outputs)

    def check(self, n_inputs: int, n_outputs: int) -> None:
        """Raises InvalidFileError if the number of leaves differs from the program's number of inputs or outputs."""
        fits = (self.inputs.leaves, self.outputs.leaves + len(self.updates)) == (n_inputs, n_outputs)
        numbers = ((*self.updates, *self.inputs_last), n_inputs), (self.outputs_last, n_outputs)
        if not fits or not all(0 <= number < count for given, count in numbers for number in given):
            raise InvalidFileError("The structure in the program's metadata does not fit its inputs and outputs.")

    def to_json(self) -> dict[str, object]:
        """The structure as JSON values."""
        node: dict[str, object] = {"inputs": self.inputs.to_json(), "outputs": self.outputs.to_json()}
        node |= {"names": list(self.names), "updates": list(self.updates)}
        return node | {"inputs_last": list(self.inputs_last), "outputs_last": list(self.outputs_last)}

    @staticmethod
    def from_json(node: Any) -> Structure:
        """The structure from JSON values. Raises InvalidFileError if they are not one."""
        try:
            inputs, outputs = Spec.from_json(node["inputs"]), Spec.from_json(node["outputs"])
            names = _all(node.get("names", []), str)
            updates, inputs_last, outputs_last = (
                _all(node.get(key, []), int) for key in ("updates", "inputs_last", "outputs_last")
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidFileError("The structure in the program's metadata is damaged.") from error
        if [child.kind for child in inputs.children] != ["tuple", "dict"]:
            raise InvalidFileError("The structure in the program's metadata is damaged: inputs are not (args, kwargs).")
        return Structure(inputs, outputs, names, updates, inputs_last, outputs_last)

    def flatten_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The tensors of a call in the program's order.

        Raises InvalidInputError, which says which argument is missing, superfluous, wrongly nested, or differs from the
        value that the model was compiled with.
        """
        positional, keyword = self.inputs.children
        plain = all(child.kind == "leaf" for child in positional.children)
        if plain and len(args) == len(positional.children) and not kwargs and not keyword.children:
            return list(args)  # the common case
        given = dict(kwargs)
        values = list(args)
        if len(values) > len(positional.children):
            raise InvalidInputError(f"{len(values)} positional arguments were given; {self.signature()}.")
        for i in range(len(values), len(positional.children)):
            name = self.names[i] if i < len(self.names) else ""
            if name in given:
                values.append(given.pop(name))
            elif positional.children[i].optional:
                values.append(positional.children[i].value)
            else:
                what = f"argument {i}" + (f" ({name!r})" if name else "")
                raise InvalidInputError(f"The {what} is missing; {self.signature()}.")
        leaves: list[Any] = []
        for i, (spec, value) in enumerate(zip(positional.children, values, strict=True)):
            _flatten(spec, value, self.names[i] if i < len(self.names) else f"argument {i}", leaves)
        for key, spec in zip(keyword.keys, keyword.children, strict=True):
            if key not in given and not spec.optional:
                raise InvalidInputError(f"The keyword argument {key!r} is missing; {self.signature()}.")
            _flatten(spec, given.pop(str(key), spec.value), str(key), leaves)
        if given:
            unknown = ", ".join(repr(name) for name in given)
            raise InvalidInputError(f"Unknown keyword argument {unknown}; {self.signature()}.")
        return leaves

    def argument_names(self) -> dict[int, str]:
        """The names of the arguments that are a tensor each, by the index of the input."""
        positional, keyword = self.inputs.children
        found: dict[int, str] = {}
        leaf = 0
        names = [*self.names[: len(positional.children)], *[""] * (len(positional.children) - len(self.names))]
        for name, spec in zip(
            [*names, *map(str, keyword.keys)], [*positional.children, *keyword.children], strict=True
        ):
            if name and spec.kind == "leaf":
                found[leaf] = name
            leaf += spec.leaves
        return found

    def unflatten_outputs(self, tensors: Sequence[Any]) -> Any:
        """The model's result, made of the program's output tensors."""
        if self.outputs.kind == "leaf":
            return tensors[0]
        return _unflatten(self.outputs, iter(tensors))

    def flatten_outputs(self, value: Any) -> list[Any]:
        """The tensors of a value that nests like the model's result. Raises InvalidInputError if it does not."""
        leaves: list[Any] = []
        _flatten(self.outputs, value, "outputs", leaves)
        return leaves

    def signature(self) -> str:
        """The accepted arguments, for error messages."""
        positional, keyword = self.inputs.children
        names = [self.names[i] if i < len(self.names) else f"arg{i}" for i in range(len(positional.children))]
        parts = [*names, *(f"{key}=" for key in keyword.keys)]
        return f"the program takes ({', '.join(parts)})"


def paths(spec: Spec, prefix: str = "") -> list[str]:
    """The path of each leaf: `[0]['mask']`, `.logits`."""
    if spec.kind == "leaf":
        return [prefix]
    found: list[str] = []
    for i, child in enumerate(spec.children):
        dotted = spec.kind in ("namedtuple", "record")
        step = f".{spec.keys[i]}" if dotted else f"[{spec.keys[i]!r}]" if spec.kind == "dict" else f"[{i}]"
        found += paths(child, prefix + step)
    return found


def _flatten(spec: Spec, value: Any, where: str, leaves: list[Any]) -> None:
    """Appends the leaves of `value` to `leaves`."""
    if spec.kind == "leaf":
        leaves.append(value)
    elif spec.kind == "none":
        if value is not None:
            raise InvalidInputError(f"{where} was None when the model was compiled and cannot be {_kind(value)} now.")
    elif spec.kind == "constant":
        if type(value) is not type(spec.value) or value != spec.value:
            raise InvalidInputError(
                f"{where} was {spec.value!r} when the model was compiled and cannot be {_shown(value)} now: compile "
                "another program for another value."
            )
    elif spec.kind in ("dict", "record"):
        items = _items(value)
        if items is None:
            raise InvalidInputError(f"{where} must be a dict with the keys {_keys(spec)}, but is {_kind(value)}.")
        for key, child in zip(spec.keys, spec.children, strict=True):
            if key not in items and not child.optional:
                raise InvalidInputError(f"{where} has no {key!r}; it needs the keys {_keys(spec)}.")
            _flatten(child, items.get(key, child.value), f"{where}[{key!r}]", leaves)
        absent = spec.kind == "record"  # torch omits fields of a dataclass that are None
        unknown = [key for key in items if key not in spec.keys and not (absent and items[key] is None)]
        if unknown:
            raise InvalidInputError(f"{where} has the unknown keys {unknown}; it needs the keys {_keys(spec)}.")
    else:
        if not isinstance(value, list | tuple):
            raise InvalidInputError(f"{where} must be a {spec.kind} of {len(spec.children)}, but is {_kind(value)}.")
        if len(value) != len(spec.children):
            raise InvalidInputError(f"{where} must have {len(spec.children)} elements, but has {len(value)}.")
        for i, (child, element) in enumerate(zip(spec.children, value, strict=True)):
            _flatten(child, element, f"{where}[{i}]", leaves)


def _unflatten(spec: Spec, leaves: Iterator[Any]) -> Any:
    if spec.kind == "leaf":
        return next(leaves)
    if spec.kind in ("none", "constant"):
        return spec.value
    values = [_unflatten(child, leaves) for child in spec.children]
    if spec.kind == "list":
        return values
    if spec.kind == "tuple":
        return tuple(values)
    if spec.kind == "namedtuple":
        return _namedtuple(spec, values)
    return (Record if spec.kind == "record" else dict)(zip(spec.keys, values, strict=True))


def _all(values: Any, kind: type) -> tuple[Any, ...]:
    """A list of values of one type. Raises TypeError if it is not one."""
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise TypeError(f"{str(values)[:80]!r} is not a list of {kind.__name__}")
    return tuple(values)


def _is_type(name: str, fields: Sequence[object]) -> bool:
    """Whether this can be a namedtuple's `module:qualified name` and field names."""
    module, colon, qualified = name.partition(":")
    parts = [*(module.split(".") if module else []), *qualified.replace(".<locals>.", ".").split(".")]
    words = (isinstance(field, str) and field.isidentifier() for field in fields)
    return bool(colon) and len(name) < 1024 and all(part.isidentifier() for part in parts) and all(words)


def _namedtuple(spec: Spec, values: Sequence[Any]) -> Any:
    """An instance of the class itself if its module is already loaded, otherwise of an equivalent one.

    A file must not choose what is imported or called. The class is therefore looked up in the dictionaries of modules and
    classes, without attribute access, and the instance is created as a plain tuple would be.
    """
    module, _, name = spec.type.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        holds = isinstance(found, ModuleType | type)
        found = vars(found).get(part) if holds else None
    if isinstance(found, type) and any(
        vars(base).get("_fields") == spec.keys for base in found.__mro__ if base is not object
    ):
        return tuple.__new__(found, values)
    return namedtuple(name.split(".")[-1], [str(key) for key in spec.keys], rename=True)(*values)


def _items(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def _keys(spec: Spec) -> str:
    return ", ".join(repr(key) for key in spec.keys)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str | int | float | bool | None) else _kind(value)


def from_torch(treespec: Any, constants: Mapping[int, Constant | None] | None = None) -> Spec:
    """A spec from `torch.utils._pytree.TreeSpec`. Needs torch only in so far as the treespec comes from it.

    constants: leaf position in the treespec -> value, for leaves that are not tensors (None, int, float, bool, str). Raises
    InvalidInputError for a constant of another type.
    """
    counter = iter(range(treespec.num_leaves))
    return _from_torch(treespec, constants or {}, counter)


def _from_torch(node: Any, constants: Mapping[int, Constant | None], counter: Iterator[int]) -> Spec:
    if node.is_leaf():
        position = next(counter)
        if position not in constants:
            return LEAF
        value = constants[position]
        if value is not None and not isinstance(value, str | int | float | bool):
            raise InvalidInputError(
                f"A value of the type {type(value).__name__} cannot be an input or output of a program."
            )
        return Spec("none") if value is None else Spec("constant", value=value)
    children = tuple(_from_torch(child, constants, counter) for child in _children(node))
    type_, context = node.type, node.context
    if type_ is namedtuple:
        return Spec("namedtuple", children, tuple(context._fields), type=f"{context.__module__}:{context.__qualname__}")
    if issubclass(type_, tuple):
        names = getattr(type_, "__match_args__", ())  # torch.return_types.* have their field names here
        return Spec("namedtuple", children, names, type=f":{type_.__name__}") if names else Spec("tuple", children)
    if type_ is dict or type_.__name__ in ("OrderedDict", "defaultdict", "immutable_dict"):
        keys = context[1] if type_.__name__ == "defaultdict" else context
        return Spec("dict", children, tuple(keys))
    if isinstance(context, list | tuple) and context and len(_keys_of(context, len(children))) == len(children):
        return Spec("record", children, _keys_of(context, len(children)))
    return Spec("list", children)


def _children(node: Any) -> list[Any]:
    """The children of a TreeSpec, which is a method since torch 2.10."""
    children = node.children
    return list(children() if callable(children) else children)


def _keys_of(context: Sequence[Any], n: int) -> tuple[Key, ...]:
    """Field names of a registered dataclass: its context is the names, or a pair or list that begins with them."""
    for candidate in (context, *(part for part in context if isinstance(part, list | tuple))):
        if len(candidate) == n and all(isinstance(key, str) for key in candidate):
            return tuple(candidate)
    return ()
