"""Names of a file on a terminal, in a page and in messages: text, never commands."""

from __future__ import annotations

import json
from pathlib import Path

import hostile
import pytest
from click.testing import CliRunner
from command_line import Page

import lapilli
from lapilli.cli import main
from lapilli.names import printable
from lapilli.player import NativeProgram
from lapilli.runtime.description import Description

NAMES = {
    "escape": b"\x1b]0;title\x07\x1b[2J\x1b[31mred",
    "csi": "\u009b31m\u0085x".encode(),
    "direction": "a\u202etxt.exe\u2066b".encode(),
    "lines": b"one\rtwo\x0bthree\nfour",
    "not utf-8": b"\xff\xfe\x80name",
    "html": b"<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;",
    "markup": b"[bold red]x[/] [link=file:///etc]y[/link]",
    "surrogate": b"\xed\xa0\x80",
    "long": b"n" * 3000,
}


@pytest.mark.parametrize(
    "text", ["\x1b[2J", "\x07", "\x9b1m", "\u202e", "\u2066", "\u200e", "\ufeff", "\udc80", "\x7f", "\u2028"]
)
def test_what_is_not_shown_is_written_out(text: str) -> None:
    shown = printable(f"a{text}b")
    assert shown.isprintable() and shown.startswith("a\\") and shown.endswith("b")
    assert str(lapilli.InvalidFileError(f"a{text}b")) == shown


def test_what_is_shown_stays() -> None:
    for text in ("", "conv_1.weight", "größer × 日本語", "\u0645\u06cc\u200c\u062e", "👩\u200d🔬", "two\nlines\tof it"):
        assert printable(text) == text
    assert printable("a\nb", keep="") == "a\\nb"


@pytest.mark.parametrize("name", NAMES, ids=[n.replace(" ", "-") for n in NAMES])
def test_names_on_a_terminal_in_a_page_and_in_messages(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "named.lap"
    path.write_bytes(hostile.renamed(NAMES[name]))
    monkeypatch.chdir(tmp_path)
    for key, value in {"COLUMNS": "200", "FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(key, value)

    def run(*args: str) -> str:
        done = CliRunner().invoke(main, args)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.output

    for text in (run("inspect", str(path), "--all"), run("run", str(path), "random")):
        for own in ("\x1b[1m", "\x1b[0m", "\x1b[3m", "\x1b[31m", "\x1b[2m"):  # what rich itself writes
            text = text.replace(own, "") if name != "escape" or own != "\x1b[31m" else text
        assert not [c for c in text if not c.isprintable() and c not in "\n\t"], text
    json.loads(run("inspect", str(path), "--json"))
    run("inspect", str(path), "--html", "page.html")
    (tmp_path / "plain.lap").write_bytes(hostile.renamed(b"plain"))
    run("inspect", "plain.lap", "--html", "plain.html")
    page, plain = (Page(), Page())
    for made, file in ((page, "page.html"), (plain, "plain.html")):
        made.feed((tmp_path / file).read_text(encoding="utf-8"))
    assert not set(page.tags) & {"img", "a", "link", "iframe"}
    assert not set(page.attributes) & {"onerror", "src", "href"}
    assert page.scripts == plain.scripts and len(page.scripts) == 1, "nothing of the file is in the page's script"
    assert page.tags.count("script") == 1


def test_the_player_takes_names_of_any_bytes() -> None:
    """Or refuses the file; either way there is no other exception."""
    for name in NAMES.values():
        data = hostile.renamed(name)
        try:
            description = Description.of(data)
            with NativeProgram.load(data, cache_dir="", allow_host=True) as native:
                assert native.methods[0].name == description.methods[0].name
        except lapilli.InvalidFileError as error:
            assert str(error).isprintable()
