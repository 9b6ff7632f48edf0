"""Package.swift, the podspec and the example for iOS: read, not built, for what builds them runs on Apple's machines."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import pytest
import tree_sitter
import tree_sitter_swift

ROOT = Path(__file__).parents[2]
APPLE = ROOT / "apple"
SWIFT = [APPLE / "Package.swift", *sorted((ROOT / "examples" / "ios").glob("*.swift"))]
READER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_swift.language()))
PODSPEC = """
require 'json'
module Pod
  class Spec
    attr_reader :said
    def initialize(parts = nil) = (@said = {}; yield self if block_given?)
    def version = @said['version']
    def osx = (@osx ||= Spec.new)
    def ios = (@ios ||= Spec.new)
    def method_missing(name, *given)
      raise NoMethodError, name.to_s unless name.end_with?('=')
      @said[name.to_s.chomp('=')] = given.first
    end
    def respond_to_missing?(*) = true
  end
end
puts JSON.generate(eval(File.read(ARGV[0])).said)
"""


@pytest.fixture(scope="module")
def archive() -> dict[str, bytes]:
    cache = (ROOT / "build" / "package" / "CMakeCache.txt").read_text()
    found = re.search(r"^LAPILLI_FLATBUFFERS_INCLUDE:PATH=(.*)$", cache, re.M)
    assert found is not None
    contents = runpy.run_path(str(ROOT / "native" / "tools" / "source_archive.py"))["contents"]
    files: dict[str, bytes] = contents(ROOT / "build" / "package" / "generated", Path(found[1]))
    return files


def errors(text: bytes) -> list[str]:
    """What is no Swift."""
    found, left = [], [READER.parse(text).root_node]
    while left:
        node = left.pop()
        if node.is_error or node.is_missing:
            found.append(f"line {node.start_point[0] + 1}: {(node.text or b'').decode()[:60]}")
        left += node.children
    return found


@pytest.mark.parametrize("path", SWIFT, ids=lambda p: p.name)
def test_swift_files_are_swift(path: Path) -> None:
    text = path.read_bytes()
    assert errors(text) == []
    assert errors(text.rstrip()[:-1]), "a bracket that is missing is seen"


def test_the_example_calls_what_the_header_has() -> None:
    header = (APPLE / "include" / "LapilliModule.h").read_text()
    names = set(re.findall(r"NS_SWIFT_NAME\((\w+)\(", header)) | set(re.findall(r"@property.*?(\w+);", header))
    text = (ROOT / "examples" / "ios" / "ViewController.swift").read_text()
    calls = set(re.findall(r"\bmodule\.(\w+)", text))
    assert calls and calls <= names | {"init"}
    assert "LapilliModule(fileAtPath:" in text and "initWithFileAtPath:" in header


def test_the_podspec_takes_the_archives_files(archive: dict[str, bytes]) -> None:
    done = subprocess.run(
        ["ruby", "-w", "-e", PODSPEC, str(APPLE / "Lapilli.podspec")], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    said = json.loads(done.stdout)
    patterns = [
        re.sub(r"\{.*\}", extension, pattern.replace("**/", "*"))
        for pattern in said["source_files"]
        for extension in re.sub(r".*\{(.*)\}", r"\1", pattern).removeprefix("generated/**/*.").split(",")
    ]
    taken = {name for name in archive if any(fnmatch(name, pattern) for pattern in patterns)}
    assert {
        "apple/LapilliModule.mm",
        "apple/include/LapilliModule.h",
        "include/lapilli.hpp",
        "generated/vulkan_api.h",
    } <= taken
    assert {name for name in archive if name.startswith("src/") and name.endswith(".cpp")} <= taken
    assert not any(name.startswith(("apps/", "jni/", "examples/")) for name in taken)
    assert said["license"]["file"] in archive and said["public_header_files"] in archive
    assert said["version"] == version()
    assert_defines(said["pod_target_xcconfig"]["GCC_PREPROCESSOR_DEFINITIONS"].split()[1:])


def test_the_swift_package_takes_the_archives_files(archive: dict[str, bytes]) -> None:
    text = archive["Package.swift"].decode()
    assert text == (APPLE / "Package.swift").read_text()
    for folder in re.findall(r'(?:headerSearchPath\(|sources: \[|publicHeadersPath: )"([\w.]+)"', text):
        assert any(name.startswith((f"{folder}/", f"apple/{folder}")) or name == folder for name in archive), folder
    assert_defines(f"{name}={value}" for name, value in re.findall(r'\.define\("(\w+)", to: "([\d.]+)"\)', text))


def version() -> str:
    found = re.search(r"^project\(lapilli VERSION ([\d.]+)", (ROOT / "native" / "CMakeLists.txt").read_text(), re.M)
    assert found is not None
    return found[1]


def assert_defines(defines: Iterable[str]) -> None:
    parts = re.search(r"foreach\(part ([A-Z_ ]+)\)", (ROOT / "native" / "CMakeLists.txt").read_text())
    assert parts is not None
    assert set(defines) == {f"LAPILLI_VERSION={version()}", *(f"LAPILLI_HAS_{p}=1" for p in parts[1].split())}


def test_the_archive_compiles_with_the_packages_settings(archive: dict[str, bytes], tmp_path: Path) -> None:
    """One file of each folder, with the search paths that Package.swift and the podspec name, and no others."""
    for name, data in archive.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    flags = ["-std=c++20", "-fsyntax-only", "-Isrc", "-Igenerated", "-Iinclude", f"-DLAPILLI_VERSION={version()}"]
    flags += [f"-DLAPILLI_HAS_{part}=1" for part in ("PROFILER", "JSON", "STREAMS", "WRITER", "FIRST_RUN")]
    for name in ("src/format/reader.cpp", "src/hal/vulkan/instance.cpp"):
        subprocess.run(["clang++", *flags, name], cwd=tmp_path, check=True)
