"""Operators of classical machine learning that need numbers alone."""

from __future__ import annotations

from typing import Any

import torch

from lapilli.capture.onnx.onnx_registry import OnnxCall, operator
from lapilli.errors import CompileError

Tensor = torch.Tensor
_ML = "ai.onnx.ml"


@operator("Binarizer", domain=_ML)
def binarizer(call: OnnxCall, x: Tensor) -> Tensor:
    return (x > call.get("threshold", 0.0)).to(x.dtype)


@operator("TfIdfVectorizer")
def tf_idf_vectorizer(call: OnnxCall, x: Tensor) -> Tensor:
    """How often each n-gram comes in each row, with the same distance between its elements for each distance that is allowed."""
    pool = call.get("pool_int64s")
    if pool is None:
        raise CompileError("n-grams of strings are not supported, those of integers are")
    begins, places = call.get("ngram_counts"), call.get("ngram_indexes")
    least, most, skips = call.get("min_gram_length"), call.get("max_gram_length"), call.get("max_skip_count")
    rows = x if x.ndim == 2 else x.reshape(1, -1)
    size = rows.shape[1]
    columns: list[Any] = [None] * (max(places) + 1)
    number = 0
    for length, begin in enumerate(begins, 1):
        end = begins[length] if length < len(begins) else len(pool)
        for first in range(begin, end, length):
            gram, place = pool[first : first + length], places[number]
            number += 1
            if not least <= length <= most:
                continue
            total: Any = columns[place]
            for skip in range(1 if length == 1 else skips + 1):
                distance = skip + 1
                count = size - (length - 1) * distance
                if count <= 0:
                    continue
                hit: Any = None
                for k, value in enumerate(gram):
                    same = rows.narrow(1, k * distance, count) == value
                    hit = same if hit is None else hit & same
                found = hit.to(torch.float32).sum(1)
                total = found if total is None else total + found
            columns[place] = total
    zero = torch.zeros([rows.shape[0]], dtype=torch.float32)
    result = torch.stack([zero if c is None else c for c in columns], 1)
    weights = call.get("weights")
    mode = call.get("mode")
    if mode in ("IDF", "TFIDF"):
        each = [1.0] * len(columns)
        for place, weight in zip(places, weights or [1.0] * len(places), strict=True):
            each[place] = weight
        by = torch.tensor(each)
        result = (result > 0).to(torch.float32) * by if mode == "IDF" else result * by
    return result if x.ndim == 2 else result.reshape(-1)


@operator("TreeEnsemble", domain=_ML)
def tree_ensemble(call: OnnxCall, x: Tensor) -> Tensor:
    """Every row goes down every tree at once, one level a step."""
    get = call.get
    truth, falsehood = get("nodes_truenodeids"), get("nodes_falsenodeids")
    true_leaf, false_leaf = get("nodes_trueleafs"), get("nodes_falseleafs")
    count, roots = len(truth), get("tree_roots")
    if get("post_transform", 0) != 0:
        raise CompileError("post_transform is not supported")
    modes = get("nodes_modes").tolist()
    splits = get("nodes_splits").to(x.dtype)
    missing = torch.tensor(get("nodes_missing_value_tracks_true") or [0] * count, dtype=torch.bool)
    # Nodes have the places 0 to count - 1, leaves those after them, which lead to themselves.
    leaves = len(get("leaf_targetids"))
    each = torch.arange(count, count + leaves)
    go_true = torch.cat(
        [torch.tensor([t + count if leaf else t for t, leaf in zip(truth, true_leaf, strict=True)]), each]
    )
    go_false = torch.cat(
        [torch.tensor([t + count if leaf else t for t, leaf in zip(falsehood, false_leaf, strict=True)]), each]
    )
    features = torch.cat([torch.tensor(get("nodes_featureids")), torch.zeros(leaves, dtype=torch.int64)])
    answers = _answers(x, modes, splits, missing, get("nodes_featureids"), get("membership_values"))
    answers = torch.cat([answers, torch.zeros([x.shape[0], leaves], dtype=torch.bool)], 1)
    start = [r + count if _is_leaf_root(r, true_leaf, false_leaf) else r for r in roots]
    at = torch.tensor(start).unsqueeze(0).expand(x.shape[0], len(roots))
    for _ in range(_depth(truth, falsehood, true_leaf, false_leaf, roots)):
        yes = answers.gather(1, at)
        at = torch.where(yes, go_true[at], go_false[at])
    leaf = at - count
    targets, weights = torch.tensor(get("leaf_targetids"))[leaf], get("leaf_weights").to(x.dtype)[leaf]
    width = get("n_targets") or int(max(get("leaf_targetids"))) + 1
    hit = targets.unsqueeze(2) == torch.arange(width)
    how = get("aggregate_function", 1)
    shown = torch.where(hit, weights.unsqueeze(2), {2: torch.inf, 3: -torch.inf}.get(how, 0.0))
    _ = features
    if how == 2:
        return shown.amin(1)
    if how == 3:
        return shown.amax(1)
    total = shown.sum(1)
    return total / len(roots) if how == 0 else total


def _is_leaf_root(root: int, true_leaf: list[int], false_leaf: list[int]) -> bool:
    return False


def _answers(
    x: Tensor, modes: list[int], splits: Tensor, missing: Tensor, features: list[int], members: Tensor | None
) -> Tensor:
    """What each node says of each row: [rows, nodes]."""
    compare = {0: torch.le, 1: torch.lt, 2: torch.ge, 3: torch.gt, 4: torch.eq, 5: torch.ne}
    groups: list[list[float]] = [[]]
    for value in [] if members is None else members.tolist():
        if value != value:
            groups.append([])
        else:
            groups[-1].append(value)
    member = iter(groups)
    columns = []
    for k, (mode, feature) in enumerate(zip(modes, features, strict=True)):
        value = x[:, feature]
        if mode == 6:
            allowed = next(member)
            yes: Tensor = (value.unsqueeze(1) == torch.tensor(allowed, dtype=x.dtype)).any(1)
        else:
            yes = compare[mode](value, splits[k])
        columns.append(yes | (torch.isnan(value) & missing[k]))
    return torch.stack(columns, 1)


def _depth(
    truth: list[int], falsehood: list[int], true_leaf: list[int], false_leaf: list[int], roots: list[int]
) -> int:
    """The most steps from a root to a leaf."""
    level, depth = set(roots), 0
    while level:
        depth += 1
        if depth > len(truth):
            raise CompileError("the nodes of a tree lead in a circle")
        inner = {truth[n] for n in level if not true_leaf[n]} | {falsehood[n] for n in level if not false_leaf[n]}
        level = inner
    return depth
