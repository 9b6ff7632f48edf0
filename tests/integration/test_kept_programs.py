"""Program files of earlier days, in tests/kept, load and give what PyTorch gave: the promise of docs/versions.md."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import keep_programs
import numpy as np
import pytest
from numpy.typing import NDArray

from lapilli import Program
from lapilli.format.container import FORMAT_VERSION
from lapilli.runtime.host import LISTED

FILES = sorted(keep_programs.FOLDER.glob("*.zip"))
MOST = 96 << 10
"""Bytes: the repository keeps them for good."""


def test_there_is_one_of_each_kind_in_this_format() -> None:
    wanted = {f"{name}-{FORMAT_VERSION}.zip" for name in keep_programs.cases()}
    assert wanted <= {file.name for file in FILES}, "run tools/keep_programs.py, and commit what it writes"
    assert all(file.stat().st_size < MOST for file in FILES)


def call(archive: zipfile.ZipFile, number: int, kind: str) -> list[NDArray[Any]]:
    names = sorted(
        (n for n in archive.namelist() if n.startswith(f"{number}/{kind}")),
        key=lambda n: int(Path(n).stem.removeprefix(kind)),
    )
    return [np.load(io.BytesIO(archive.read(name)), allow_pickle=False) for name in names]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_of_earlier_days_run(file: Path) -> None:
    with zipfile.ZipFile(file) as archive, Program(archive.read("program.lap"), permission=LISTED) as program:
        numbers = sorted({int(name.partition("/")[0]) for name in archive.namelist() if "/" in name})
        assert numbers
        for number in numbers:
            given, wanted = call(archive, number, "in"), call(archive, number, "out")
            for y, expected in zip(program.run_flat(given), wanted, strict=True):
                assert y.shape == expected.shape and y.dtype == expected.dtype
                if expected.dtype.kind != "f":
                    np.testing.assert_array_equal(y, expected)
                else:  # roundings of float32 sums of 72 products, or of 16-bit storage
                    bound = 2e-2 if "half" in file.stem else 1e-5
                    np.testing.assert_allclose(y, expected, rtol=bound, atol=bound)
