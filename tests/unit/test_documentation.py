"""Pages that list what the sources have are complete."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pictures
import pytest

ROOT = Path(__file__).parents[2]
READS = re.compile(r'(?:environ\.get|getenv|environment|environ)\s*[(\[]\s*"(LAPILLI_[A-Z_]+)"')
"""os.environ.get("X"), os.environ["X"], getenv("X"), and the player's environment("X")."""


def test_every_environment_variable_is_on_its_page() -> None:
    sources = [*(ROOT / "src" / "lapilli").rglob("*.py"), *(ROOT / "native" / "src").rglob("*.cpp")]
    read = {name for file in sources for name in READS.findall(file.read_text(encoding="utf-8"))}
    assert {"LAPILLI_DEVICE", "LAPILLI_STRICT"} <= read  # one of each language
    text = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(LAPILLI_[A-Z_]+)` \|", text, re.M)
    assert sorted(listed) == sorted(read)


def test_files_that_pages_name_exist() -> None:
    """Paths in backquotes and links to files, in every page but the notes, which tell of other days."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.md")]
    missing = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        paths = re.findall(r"`((?:tests|tools|docs|native|benchmarks|examples)/[\w./-]*\w/?)`", text)
        links = [(page.parent, link) for link in re.findall(r"\]\(([\w./-]+\.\w+)(?:#[\w-]+)?\)", text)]
        for folder, path in [*((ROOT, path) for path in paths), *links]:
            if not (folder / path).exists():
                missing.append(f"{page.relative_to(ROOT)}: {path}")
    assert not missing


def test_sources_that_the_map_names_exist() -> None:
    """Files of sources are named by their place in the package, or in the folder that a paragraph is about."""
    sources = [*(ROOT / "src" / "lapilli").rglob("*.*"), *(ROOT / "native").rglob("*.*")]
    known = {f"/{file.relative_to(ROOT).as_posix()}" for file in sources} | {"/abi.py"}  # which the build makes
    missing = []
    for page in ("architecture.md", "glossary.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        named = re.findall(r"`(?!tests/|tools/)([\w/]+\.(?:py|slang|cpp|h|fbs))`", text)
        missing += [f"{page}: {name}" for name in named if not any(file.endswith(f"/{name}") for file in known)]
    assert not missing


def test_a_name_means_one_thing() -> None:
    """Files and public classes of the package have names of their own. Those of `cli/` are the names of its commands."""
    files = [f for f in (ROOT / "src" / "lapilli").rglob("*.py") if f.stem not in ("__init__", "__main__")]
    names = Counter(f.name for f in files if f.parent.name != "cli")
    assert not [name for name, n in names.items() if n > 1]
    classes = Counter(
        name for f in files for name in re.findall(r"^class ([A-Za-z]\w*)", f.read_text(encoding="utf-8"), re.M)
    )
    assert not [name for name, n in classes.items() if n > 1]


STEP = re.compile(r"^ {4,}([A-Za-z_][\w.:]*) +([\w/]+\.(?:py|cpp))\b")
"""A line of a call that the map follows: a function, and its file in the package or in `native/src`."""


def test_calls_that_the_map_follows_are_in_the_sources() -> None:
    """Every function is in the file that the line names, and is met once."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    steps = [found.groups() for line in text.splitlines() if (found := STEP.match(line))]
    assert len(steps) > 50
    assert not [step for step, n in Counter(steps).items() if n > 1]
    missing = []
    for name, file in steps:
        native = file.endswith(".cpp")
        folder = ROOT / "native" / "src" if native else ROOT / "src" / "lapilli"
        source = (folder / file).read_text(encoding="utf-8")
        *owners, function = name.split("::" if native else ".")
        wanted = (
            [rf"\b{name}\("] if native else [rf"^(?:class|    def) {o}\b" for o in owners] + [rf"\bdef {function}\("]
        )
        missing += [f"{name} in {file}" for pattern in wanted if not re.search(pattern, source, re.M)]
    assert not missing


def test_layers_on_the_map_are_those_that_lint_checks() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    section = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("### Layers")[1].split("\n##")[0]
    drawn = [re.split(r" {2,}", line.strip())[0] for line in section.splitlines() if line.startswith("    ")]
    assert drawn == [layer.replace(" | ", ", ") for layer in contract["layers"]]


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_those_that_their_script_draws(name: str) -> None:
    drawn = pictures.PICTURES[name]()
    assert drawn == (pictures.FOLDER / name).read_text(encoding="utf-8"), "run tools/pictures.py"
    assert "prefers-color-scheme: dark" in drawn


def test_the_map_is_drawn_with_the_stages_that_there_are() -> None:
    """Their folders, in the order in which they are called: the rows of the first table."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    stages = re.findall(r"^\| `(\w+)/`", text.split("### Layers")[0], re.M)
    drawn = re.findall(r'<text class="title"[^>]*>(.*?)</text>', pictures.architecture())
    assert stages[-1] == "native" and all((ROOT / "src" / "lapilli" / stage).is_dir() for stage in stages[:-1])
    assert [name for name in drawn if name in stages] == stages[:-1]


def test_performance_is_drawn_for_light_and_dark() -> None:
    for file in (ROOT / "docs" / "performance").glob("*.svg"):
        assert "prefers-color-scheme: dark" in file.read_text(encoding="utf-8"), file


def test_the_readme_is_short() -> None:
    """Three lines, one picture, two commands, ten lines of code, a table."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^!\[", text, re.M)) == 1 and text.index("![") < text.index("## Two commands")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert len([line for line in code.splitlines() if line]) <= 10
    assert len(text.splitlines()) < 110
