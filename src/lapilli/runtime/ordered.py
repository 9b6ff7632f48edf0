"""Runs over many items, a few at a time, with the results in the items' order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

from lapilli.errors import InvalidInputError
from lapilli.runtime.futures import Future

OnError: TypeAlias = Literal["raise", "return"]


def ordered(submit: Callable[..., Future], items: Iterable[Any], in_flight: int, on_error: OnError) -> Iterator[Any]:
    """The results of runs, in the order of the items; see `Program.map`. Raises InvalidInputError for wrong options at once."""
    if in_flight < 1:
        raise InvalidInputError(f"in_flight is {in_flight}; give 1 or more.")
    if on_error not in ("raise", "return"):
        raise InvalidInputError(f'on_error is {on_error!r}; it can be "raise" or "return".')
    return _ordered(submit, iter(items), in_flight, on_error)


def _ordered(submit: Callable[..., Future], source: Iterator[Any], in_flight: int, on_error: OnError) -> Iterator[Any]:
    waiting: deque[Future | Exception] = deque()
    stopped: Exception | None = None  # why there are no more items
    while True:
        while stopped is None and len(waiting) < in_flight:
            try:
                item = next(source)
            except (
                Exception
            ) as error:  # StopIteration, or one of the source's own: after the results of what came before
                stopped = error
                break
            try:
                waiting.append(submit(*item) if isinstance(item, tuple) else submit(item))
            except Exception as error:
                waiting.append(error)
            del item
        if not waiting:
            if isinstance(stopped, StopIteration):
                return
            assert stopped is not None
            raise stopped
        first = waiting.popleft()
        failed = first if isinstance(first, Exception) else first.exception()
        if failed is not None and (on_error == "raise" or not isinstance(failed, Exception)):
            raise failed
        yield first.result() if isinstance(first, Future) and failed is None else failed
        del first, failed
