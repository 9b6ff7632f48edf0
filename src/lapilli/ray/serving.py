"""Programs behind Ray Serve: requests become batches."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
from ray import serve

from lapilli.errors import InvalidInputError
from lapilli.ray.claims import RESOURCE
from lapilli.ray.predictor import Predictor
from lapilli.ray.shipping import Shipped, ship


def deployment(
    model: Shipped | str | os.PathLike[str],
    *,
    method: str | None = None,
    max_batch_size: int = 32,
    batch_wait: float = 0.005,
    share: int = 1,
    **options: Any,
) -> Any:
    """A deployment for `serve.run`: each replica has a device, and requests that wait together are one run.

    Over HTTP a request is a JSON object with an entry for each input, one row; so is the answer, for each output. Through a handle
    both are dicts of NumPy arrays. A row that fails is answered with its error (HTTP: 400), and the others of its batch are not.

    Args:
        model: what `ship` gave, or the path of a file of this machine, which is shipped.
        method: the program's method; None: its first.
        max_batch_size: requests of a run.
        batch_wait: seconds that the first of them waits for others.
        share: how many replicas may have one device.
        **options: of `serve.deployment`: num_replicas, autoscaling_config, max_ongoing_requests, …

    Raises:
        ReadError: the file cannot be read.
        InvalidFileError: it is no program.
    """
    shipped = model if isinstance(model, Shipped) else ship(model)

    class Served:
        def __init__(self) -> None:
            self.predictor = Predictor(shipped, method=method, on_error="return", share=share)
            self.method = self.predictor.method

        async def __call__(self, request: Any) -> Any:
            if isinstance(request, dict):
                return await self._answer(request)
            from starlette.responses import JSONResponse

            try:
                answer = await self._answer(_parsed(await request.body()))
            except InvalidInputError as error:
                return JSONResponse({"error": str(error)}, status_code=400)
            return JSONResponse({name: value.tolist() for name, value in answer.items()})

        async def _answer(self, given: dict[str, Any]) -> dict[str, Any]:
            row = _row(given, self.method.inputs)
            result: dict[str, Any] | str = await self.batched(row)
            if isinstance(result, str):
                raise InvalidInputError(result)
            return result

        @serve.batch(  # type: ignore[untyped-decorator]
            max_batch_size=max_batch_size, batch_wait_timeout_s=batch_wait
        )
        async def batched(self, rows: list[list[Any]]) -> list[Any]:
            return await asyncio.to_thread(self._run, rows)

        def _run(self, rows: list[list[Any]]) -> list[Any]:
            """Rows of equal shapes run together; each result is a dict, or the text of an error."""
            answers: list[Any] = [None] * len(rows)
            groups: dict[Any, list[int]] = {}
            for number, row in enumerate(rows):
                groups.setdefault(tuple((a.shape, a.dtype) for a in row), []).append(number)
            for numbers in groups.values():
                arrays = [np.stack([rows[n][k] for n in numbers]) for k in range(len(rows[0]))]
                results, errors = self.predictor.run(arrays)
                for place, n in enumerate(numbers):
                    error = errors[place] if errors else ""
                    names = [spec.name for spec in self.method.outputs]
                    answers[n] = error or {name: r[place] for name, r in zip(names, results, strict=True)}
            return answers

        async def check_health(self) -> None:
            await asyncio.to_thread(self.predictor.check)

    actor = {"num_cpus": 0, "resources": {RESOURCE: 1 / share}, **options.pop("ray_actor_options", {})}
    options = {"name": "lapilli", "max_ongoing_requests": 4 * max_batch_size, **options}
    return serve.deployment(Served, ray_actor_options=actor, **options).bind()


def _parsed(body: bytes) -> dict[str, Any]:
    import json

    try:
        given = json.loads(body)
    except ValueError as error:
        raise InvalidInputError(f"The request is no JSON: {error}.") from None
    if not isinstance(given, dict):
        raise InvalidInputError("The request is no JSON object; give an entry for each input.")
    return given


def _row(given: dict[str, Any], specs: Any) -> list[Any]:
    """The arrays of one row. Lists become arrays of the input's dtype. Raises InvalidInputError."""
    names = [spec.name for spec in specs]
    if set(given) != set(names):
        raise InvalidInputError(f"The request has the entries {sorted(given)}; the program takes {names}.")
    arrays = []
    for spec in specs:
        value = given[spec.name]
        try:
            arrays.append(value if isinstance(value, np.ndarray) else np.array(value, spec.numpy_dtype()))
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidInputError(f"The entry for {spec} is no array of it: {error}.") from None
    return arrays
