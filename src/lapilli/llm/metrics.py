"""Counters of a server, in Prometheus' text format."""

from __future__ import annotations

import threading
from collections import defaultdict

_HELP = {
    "requests_total": ("counter", "Answered requests by path and status."),
    "prompt_tokens_total": ("counter", "Tokens of prompts."),
    "generated_tokens_total": ("counter", "Written tokens."),
    "request_seconds": ("summary", "Time of answers, from the request's arrival to the last token."),
    "first_token_seconds": ("summary", "Time from a request's arrival to its first token."),
    "requests_waiting": ("gauge", "Requests that are written or wait for it."),
    "cache_tokens": ("gauge", "Tokens whose keys and values there is room for."),
    "cache_tokens_held": ("gauge", "Those of answers, and of what ended ones left, in whole pages."),
    "cache_waits_total": ("counter", "How often an answer gave its pages to an older one, and read its tokens again."),
}


class Metrics:
    """Numbers that threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = defaultdict(float)

    def add(self, name: str, value: float = 1, labels: str = "") -> None:
        """To a counter."""
        with self._lock:
            self._values[name, labels] += value

    def put(self, name: str, value: float) -> None:
        """Instead of what a number was."""
        with self._lock:
            self._values[name, ""] = value

    def observe(self, name: str, seconds: float) -> None:
        """To a summary."""
        self.add(f"{name}_sum", seconds)
        self.add(f"{name}_count")

    def text(self) -> str:
        """All of them."""
        with self._lock:
            values = dict(self._values)
        lines = []
        for name, (kind, what) in _HELP.items():
            lines += [f"# HELP lapilli_{name} {what}", f"# TYPE lapilli_{name} {kind}"]
            of = [f"{name}_sum", f"{name}_count"] if kind == "summary" else [name]
            found = {k: v for k, v in values.items() if k[0] in of} or {(n, ""): 0.0 for n in of}
            lines += [f"lapilli_{n}{labels} {value:.15g}" for (n, labels), value in sorted(found.items())]
        return "\n".join(lines) + "\n"
