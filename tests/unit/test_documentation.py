"""Pages that list what the sources have are complete."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

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
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
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
