"""The command line in a process of its own, and the pages that it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path


class Cli:
    """Runs `lapilli` in a process of its own; `python` may be one without torch."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder, self.python = folder, python
        self.has_torch = python == sys.executable

    def __call__(self, *args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [self.python, "-m", "lapilli.cli", *map(str, args)]
        environment = os.environ | {"COLUMNS": "160"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=self.folder, env=environment, check=False
        )
        assert done.returncode == code, (args, done.stdout, done.stderr)
        assert not any(line.startswith("Traceback") for line in done.stderr.splitlines())
        return done


class Page(HTMLParser):
    """The tags of a page, their attributes, what they refer to, and the code of its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and self.cdata_elem == "script":
            self.scripts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
