"""Runs in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

from lapilli.errors import RunTimeoutError
from lapilli.player import NativeRun
from lapilli.runtime.dispatcher import Job


class ScriptRun:
    """A host script running in a thread, with the interface of a `NativeRun`."""

    def __init__(self, run: Any) -> None:
        executor = futures.ThreadPoolExecutor(1)
        self._future: futures.Future[list[Any]] = executor.submit(run)
        executor.shutdown(wait=False)

    def done(self) -> bool:
        """Whether the run is finished."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Waits at most `timeout` seconds; None: without limit.

        Raises:
            RunTimeoutError: the run is not finished by then.
        """
        try:
            self._future.result(timeout)
        except futures.TimeoutError:
            raise RunTimeoutError(f"The run is not finished after {timeout} s; wait longer.") from None

    def outputs(self) -> list[Any]:
        """Waits, and returns the flat list of outputs."""
        return self._future.result()

    def release(self) -> None:
        """Does nothing: no resources are held."""


class Future:
    """A run in flight; like `concurrent.futures.Future`, but it cannot be cancelled."""

    def __init__(
        self,
        run: NativeRun | ScriptRun | Job[Any],
        finished: Callable[[list[Any]], None],
        wrap: Callable[[list[Any]], Any],
        keep: object = None,
    ) -> None:
        """Wraps a run; `Program.submit` returns futures.

        Args:
            run: the run in flight.
            finished: called once with the outputs.
            wrap: converts the outputs to the result of a call.
            keep: what must live as long as the run may take.
        """
        self._keep = keep
        self._run, self._finished, self._wrap = run, finished, wrap
        self._lock = threading.Lock()
        self._outputs: list[Any] | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the run is finished."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            return self._outputs is not None or self._error is not None or self._run.done()
        finally:
            self._lock.release()

    def result(self, timeout: float | None = None) -> Any:
        """Waits, and returns what a call of the program returns.

        Args:
            timeout: seconds; None: without limit.

        Raises:
            RunTimeoutError: a TimeoutError: the run takes longer. It goes on, and can be waited for again.
            LapilliError: the run failed.
        """
        self.finish(timeout)
        if self._error is not None:
            raise self._error
        assert self._outputs is not None
        return self._wrap(self._outputs)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The exception that the run failed with, or None; waits as `result` does."""
        self.finish(timeout)
        return self._error

    def finish(self, timeout: float | None = None) -> None:
        """Waits as `result` does, but does not raise the run's own exception."""
        end = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else max(0, timeout)):
            raise RunTimeoutError(f"The run is not finished after {timeout} s; wait longer.")
        try:
            if self._outputs is None and self._error is None:
                self._run.wait(None if end is None else max(0, end - time.monotonic()))
                self._outputs = self._run.outputs()
                self._run.release()
                self._finished(self._outputs)
        except RunTimeoutError:
            raise
        except BaseException as error:
            self._error = error
            self._run.release()
        finally:
            self._lock.release()
