"""The page of `lapilli inspect --html`, and the site, in a headless Chromium. `make browser` runs them, and `make test-all`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
import tiny
import torch
from click.testing import CliRunner

import lapilli
from lapilli.cli import main

if not os.environ.get("LAPILLI_TEST_ALL"):
    pytest.skip("make browser runs it", allow_module_level=True)
if browser.PROGRAM is None:
    pytest.skip("tools/setup.sh browser installs Chromium", allow_module_level=True)

SITE = Path(__file__).parents[2] / "build" / "site"
HOSTILE = "</script><img src=x onerror=\"document.title='done'\"><svg onload=document.title='done'>"


def command(*arguments: object) -> None:
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    assert done.exit_code == 0, (done.output, done.exception)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Tab]:
    with browser.tab(tmp_path_factory.mktemp("browser")) as found:
        yield found


class Residual(torch.nn.Module):
    """Twelve convolutions, each with what went into it, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(12))
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return torch.softmax(self.head(x.mean((2, 3))), -1), x


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a program with the times that its profile has."""
    folder = tmp_path_factory.mktemp("page")
    program = lapilli.compile(Residual().eval(), (torch.zeros(1, 8, 24, 24),))
    program.save(folder / "model.lap")
    command("profile", folder / "model.lap", "--no-limits", "--repeat", "2")
    command("inspect", folder / "model.lap", "--html", folder / "page.html", "--profile", folder / "model.trace.json")
    return folder / "page.html"


def selected(tab: browser.Tab) -> dict[str, str]:
    """What the page says of the selected box of the first graph that has one."""
    found = tab.ask("""(() => {
      const viewer = [...document.querySelectorAll('.viewer')].find((v) => v.querySelector('.facts dt'));
      if (!viewer) return {};
      const [names, values] = ['dt', 'dd'].map((tag) => [...viewer.querySelectorAll(tag)].map((e) => e.textContent));
      return Object.fromEntries(names.map((name, k) => [name, values[k]]));
    })()""")
    assert isinstance(found, dict)
    return found


def view(tab: browser.Tab) -> list[float]:
    """x, y, width and height of what is seen of the first graph."""
    return [float(n) for n in tab.ask("document.querySelector('svg.graph').getAttribute('viewBox')").split()]


def test_the_graph_by_keyboard(tab: browser.Tab, page: Path) -> None:
    tab.open(page)
    tab.ask("document.querySelector('.tools button').focus()")
    for _ in range(5):  # four buttons, the search
        tab.press("Tab")
    assert tab.ask("document.activeElement.closest('svg.graph') !== null")
    boxes = tab.ask("document.querySelectorAll('.viewer')[0].querySelectorAll('g[tabindex]').length")
    seen = []
    for _ in range(boxes):
        tab.press("ArrowDown")
        seen.append(selected(tab))
    assert seen[0] == {"tensor": "x"} and len({json.dumps(s) for s in seen}) == boxes
    kernels = [s for s in seen if "kernel" in s]
    assert len(kernels) >= 14
    for known in kernels:
        assert {"kernel", "work groups", "bytes", "writes"} <= known.keys()
    assert sum("conv2d" in known.get("operators", "") for known in kernels) == 12
    assert tab.ask("document.querySelectorAll('g[tabindex=\"0\"]').length") == tab.ask(
        "document.querySelectorAll('.viewer').length"
    )  # one stop of Tab for each graph
    x, y, w, h = view(tab)
    tab.press("+")
    assert view(tab)[2] == pytest.approx(w / 1.25)
    tab.press("-")
    assert view(tab) == pytest.approx([x, y, w, h])
    tab.press("ArrowRight", shift=True)
    assert view(tab) == pytest.approx([x + w / 10, y, w, h])
    tab.press("0")
    width, height = (tab.ask(f"Number(document.querySelector('svg.graph').dataset.{n})") for n in ("width", "height"))
    x, y, w, h = view(tab)
    assert x <= 0 and y <= 0 and x + w >= width - 26 and y + h >= height - 30
    assert tab.problems == []


def test_search(tab: browser.Tab, page: Path) -> None:
    tab.open(page)
    tab.ask("document.querySelector('g[tabindex]').focus()")
    tab.press("/")
    for letter in "softmax":
        tab.press(letter)
    assert tab.ask("document.querySelector('output').textContent") in ("1 found", "2 found")
    tab.press("Enter")
    found = selected(tab)
    assert any("softmax" in value for value in found.values())
    x, y, w, h = view(tab)
    place = tab.ask(
        """(() => { const m = document.querySelector('.selected').transform.baseVal[0].matrix; return [m.e, m.f]; })()"""
    )
    assert x <= place[0] <= x + w and y <= place[1] <= y + h
    tab.ask("document.querySelector('input').focus()")
    tab.press("Escape")
    assert tab.ask("document.querySelectorAll('.other').length") == 0
    assert tab.problems == []


def test_times_and_memory(tab: browser.Tab, page: Path) -> None:
    """The plan that was profiled has the times of the trace; each plan a chart of its memory, as high as what is alive at most."""
    tab.open(page)
    trace = json.loads(page.with_name("model.trace.json").read_text())
    times = [event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"]
    shown = tab.ask("[...document.querySelectorAll('[data-time]')].map((g) => g.dataset.time)")
    assert len(shown) == len(times)
    assert sum(float(text.split("(")[1].rstrip("%)")) for text in shown) == pytest.approx(100, abs=0.1 * len(times))
    widths = tab.ask("[...document.querySelectorAll('g[data-time] .heat')].map((r) => r.width.baseVal.value)")
    for width, time in zip(widths, times, strict=True):
        assert width == pytest.approx(150 * time / max(times), abs=0.06)
    plans = tab.ask("document.querySelectorAll('svg.alive').length")
    assert plans == tab.ask("document.querySelectorAll('.viewer').length") > 1
    for k in range(plans):
        top = tab.ask(f"document.querySelectorAll('svg.alive path')[{k}].getBBox().height")
        assert top == pytest.approx(120, abs=0.01)
    assert tab.problems == []


def test_the_mouse(tab: browser.Tab, page: Path) -> None:
    tab.size(1200, 900)
    tab.open(page)
    tab.ask("document.querySelector('svg.graph').scrollIntoView()")
    x, y = tab.ask(
        "(() => { const b = document.querySelectorAll('g.kernel')[1].getBoundingClientRect(); return [b.x + 9, b.y + 9]; })()"
    )
    tab.click(x, y)
    assert selected(tab)["dispatch"] == "1"
    before = view(tab)
    x, y = tab.ask(
        "(() => { const b = document.querySelector('[data-does=in]').getBoundingClientRect(); return [b.x + 5, b.y + 5]; })()"
    )
    tab.ask("document.querySelector('[data-does=in]').click()")
    assert view(tab)[2] == pytest.approx(before[2] / 1.25)
    assert tab.problems == []


def test_names_of_a_file_are_text(tab: browser.Tab, tmp_path: Path) -> None:
    """Markup in a program's names runs nothing, and asks for nothing; without scripts of its own nothing could."""
    made = tiny.Tiny()
    x, y = made.input(HOSTILE, "float32", (4,)), made.output("y", "float32", (4,))
    made.dispatch("copy", (x, y), made.number(4))
    path = tmp_path / "hostile.lap"
    path.write_bytes(made.bytes())
    command("inspect", path, "--html", tmp_path / "page.html")
    tab.open(tmp_path / "page.html")
    tab.ask("document.querySelectorAll('g[tabindex]')[1].focus()")
    tab.press("Enter")
    assert HOSTILE in "".join(selected(tab).values())
    assert tab.ask("document.title") == "hostile.lap"
    assert tab.ask("document.querySelectorAll('img, body script').length") == 1
    assert tab.problems == []
    tab.ask("document.body.append(Object.assign(document.createElement('script'), {text: 'document.title = 1'}))")
    assert tab.ask("document.title") == "hostile.lap" and "Content Security Policy" in "".join(tab.problems)


@pytest.mark.parametrize("width", [320, 420, 1200])
def test_the_page_is_no_wider_than_its_window(tab: browser.Tab, page: Path, tmp_path: Path, width: int) -> None:
    """With its parts open, of a program with the longest names too; what is wider than its part is moved within it."""
    made = tiny.Tiny()
    name = "a_name_without_a_place_to_break_it_" * 6
    x, y = made.input(name, "float32", (4,)), made.output(name + "y", "float32", (4,))
    made.dispatch("copy", (x, y), made.number(4))
    made.program.kernels[0].name = made.plan.run[0].label = name
    made.constant(name, np.ones(4, np.float32))
    (tmp_path / f"{name[:200]}.lap").write_bytes(made.bytes())
    command("inspect", tmp_path / f"{name[:200]}.lap", "--html", tmp_path / "page.html")
    tab.size(width, 800)
    for path in (page, tmp_path / "page.html"):
        tab.open(path)
        tab.ask("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        tab.ask("document.querySelectorAll('g[tabindex]')[1].focus()")
        tab.press("Enter")
        assert selected(tab)
        assert tab.ask("document.documentElement.scrollWidth") <= width
        beyond = tab.ask(f"""[...document.querySelectorAll('body *:not(svg *)')].filter(
          (e) => e.getBoundingClientRect().right > {width} && !e.closest('div.wide')).map((e) => e.outerHTML.slice(0, 99))""")
        assert beyond == [], path
        narrowest = tab.ask("Math.min(...[...document.querySelectorAll('td:not(.n)')].map((e) => e.offsetWidth))")
        assert narrowest >= (6 * 14 if width < 700 else 0), path  # words such as "convolution" stay whole
        assert tab.problems == []


@pytest.mark.parametrize("width", [360, 1200])
def test_every_page_of_the_site(tab: browser.Tab, width: int) -> None:
    """Opens, without errors, has a title and text, loads its own pictures, and is not wider than a telephone."""
    if not SITE.exists():
        pytest.skip("make docs builds it")
    tab.size(width, 800)
    pages = sorted(set(SITE.rglob("*.html")) - {SITE / "404.html"})  # which asks a server for what is at its root
    assert len(pages) > 30
    for page in pages:
        tab.open(page)
        about: Any = tab.ask("""({
          title: document.title, text: document.body.innerText.length,
          broken: [...document.images].filter((i) => i.complete && i.naturalWidth === 0).map((i) => i.src),
          wide: document.documentElement.scrollWidth,
        })""")
        place = page.relative_to(SITE)
        assert about["title"] and about["text"] > 100, place
        assert about["broken"] == [], place
        assert about["wide"] <= width, place
        assert tab.problems == [], place
