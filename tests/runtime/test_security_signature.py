"""Signatures: what is signed loads everywhere, what was changed afterwards is found, and what is checked is what is loaded."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest
import tiny
from click.testing import CliRunner

import lapilli
from lapilli import InvalidInputError, SignatureError
from lapilli.cli import main
from lapilli.format import container, signature
from lapilli.runtime.description import Description
from lapilli.runtime.program import Program

X = np.ones((2, 3), np.float32)
WEIGHTS = np.array([1, 2, 3], np.float32)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Private and public."""
    path = tmp_path_factory.mktemp("keys") / "key"
    signature.generate(path)
    return path, path.with_name("key.pub")


@pytest.fixture
def signed(keys: tuple[Path, Path]) -> bytes:
    return signature.sign(tiny.scales(WEIGHTS, metadata={"note": "text"}), signature.private_key(keys[0]))


def test_a_signed_file_loads_everywhere(signed: bytes, keys: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "signed.lap"
    path.write_bytes(signed)
    for key in (None, keys[1], str(keys[1]), keys[1].read_bytes(), signature.public_key(keys[1])):
        with lapilli.load(path, public_key=key) as program:
            np.testing.assert_array_equal(program(X), X * WEIGHTS**2)
            program.save(tmp_path / "again.lap")
        assert (tmp_path / "again.lap").read_bytes() == signed
    plain = Description.of(tiny.scales(WEIGHTS, metadata={"note": "text"}))
    assert Description.of(signed).methods == plain.methods and Description.of(signed).metadata == plain.metadata


def test_signing_again_takes_the_place_of_the_signature(signed: bytes, keys: tuple[Path, Path], tmp_path: Path) -> None:
    signature.generate(tmp_path / "other")
    other = signature.sign(signed, signature.private_key(tmp_path / "other"))
    assert len(other) == len(signed) and signature.sign(other, signature.private_key(keys[0])) == signed
    with pytest.raises(SignatureError, match="signed with another key"):
        signature.verify(other, keys[1])


def test_any_change_is_found(signed: bytes, keys: tuple[Path, Path]) -> None:
    """Every byte of header and signature, and a thousand others; with the checksum put right, as one would who changes a file."""
    private, public = keys[0], signature.public_key(keys[1])
    rng = random.Random(5)
    places = {
        *range(64),
        *range(len(signed) - 192, len(signed)),
        *(rng.randrange(64, len(signed)) for _ in range(1000)),
    }
    for place in sorted(places):
        for repaired in (False, True):
            data = bytearray(signed)
            data[place] ^= 1 << rng.randrange(8)
            changed = bytes(data)
            if repaired:
                if place < 64:
                    continue
                header = container.read_header(changed)
                sizes = (header.structure_offset, header.structure_size, header.data_offset, header.data_size)
                changed = container.from_body(sizes, changed[64:])
            elif 48 <= place < 56:
                continue  # the checksum itself is not signed: a load finds that it does not fit
            with pytest.raises(lapilli.InvalidFileError):
                signature.verify(changed, public)
    header = container.read_header(signed)
    cut = signed[: len(signed) - signature.SIZE]
    sizes = (header.structure_offset, header.structure_size, header.data_offset, header.data_size - signature.SIZE)
    stripped = container.from_body(sizes, cut[64:])
    assert Description.of(stripped)
    for damaged in (stripped, signed + bytes(64), signed[:-1], signed[:10], b"", signed[:64]):
        with pytest.raises(lapilli.InvalidFileError):
            signature.verify(bytes(damaged), public)
    signature.verify(signed, public)
    assert signature.private_key(private)


def test_what_was_verified_is_what_is_loaded(signed: bytes, keys: tuple[Path, Path], tmp_path: Path) -> None:
    """While another program takes the file's place again and again."""
    path, evil = tmp_path / "model.lap", tiny.scales(WEIGHTS * 10)
    path.write_bytes(signed)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for content in (evil, signed):
                (tmp_path / "next").write_bytes(content)
                os.replace(tmp_path / "next", path)

    thread = threading.Thread(target=swap)
    thread.start()
    loaded = 0
    try:
        for _ in range(12):
            try:
                with lapilli.load(path, public_key=keys[1]) as program:
                    loaded += 1
                    np.testing.assert_array_equal(program(X), X * WEIGHTS**2)
            except SignatureError:
                pass
    finally:
        stop.set()
        thread.join()
    assert signature.verify(signed, keys[1])


def test_a_file_that_is_swapped_during_a_load_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.lap"
    path.write_bytes(tiny.scales(WEIGHTS))
    from_json = Description.from_json

    def swapped(source: Path, node: Mapping[str, Any]) -> Description:
        path.write_bytes(tiny.scales(WEIGHTS * 2))
        os.utime(path, (1, 1))
        return from_json(source, node)

    monkeypatch.setattr("lapilli.runtime.loaded.Description.from_json", swapped)
    with pytest.raises(lapilli.ReadError, match="was changed .* load it again"):
        lapilli.load(path)


def test_keys(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    assert keys[0].stat().st_mode & 0o777 == 0o600 or os.name == "nt"
    with pytest.raises(FileExistsError):
        signature.generate(keys[0])
    signature.generate(tmp_path / "locked", b"secret")
    with pytest.raises(signature.PasswordNeeded):
        signature.private_key(tmp_path / "locked")
    with pytest.raises(InvalidInputError, match="cannot be read as a private key"):
        signature.private_key(tmp_path / "locked", b"wrong")
    assert signature.private_key(tmp_path / "locked", b"secret")
    for bad in (b"", b"x" * 31, b"x" * 33, b"-----BEGIN PUBLIC KEY-----\n-----END PUBLIC KEY-----"):
        with pytest.raises(InvalidInputError, match="public key"):
            signature.public_key(bad)
    with pytest.raises(InvalidInputError, match="cannot be read as a private key"):
        signature.private_key(keys[1])


def cli(*args: object, code: int = 0, given: str = "") -> str:
    done = CliRunner().invoke(main, [str(a) for a in args], input=given)
    assert done.exit_code == code, (done.output, done.exception)
    return done.output.replace("\n", " ")


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    key, model = tmp_path / "mine", tmp_path / "model.lap"
    model.write_bytes(hostile.program(hostile.everything()))
    assert "keep it to yourself" in cli("keygen", key)
    assert "is there already" in cli("keygen", key, code=1)
    shown = cli("verify", model)
    assert "signature" in shown and "none" in shown and "aten.nonzero.default: on the list" in shown
    assert "is not signed" in cli("verify", model, "--key", f"{key}.pub", code=1)
    assert "is not signed" in cli("run", model, "random", "--key", f"{key}.pub", code=1)
    assert "signed with the key" in cli("sign", model, "--key", key)
    assert "give --key" in cli("verify", model) and "as it must be" in cli("verify", model, "--key", f"{key}.pub")
    found = json.loads(cli("verify", model, "--key", f"{key}.pub", "--json"))
    assert found["trusted"] and found["signed_by"] and found["methods"][0]["name"] == "forward"
    cli("keygen", tmp_path / "other", "--password", given="secret\nsecret\n")
    assert "another key" in cli("verify", model, "--key", tmp_path / "other.pub", code=1)
    cli("sign", model, "--key", tmp_path / "other", "-o", tmp_path / "two.lap", given="secret\n")
    assert "as it must be" in cli("verify", tmp_path / "two.lap", "--key", tmp_path / "other.pub")
    damaged = bytearray(model.read_bytes())
    damaged[200] ^= 1
    (tmp_path / "damaged.lap").write_bytes(damaged)
    cli("verify", tmp_path / "damaged.lap", code=1)
    cli("sign", tmp_path / "damaged.lap", "--key", key, code=1)
    model.write_bytes(hostile.program(hostile.everything(), [*hostile.OPERATORS, "load_library"]))
    assert "no name of an operator" in cli("verify", model)
    with pytest.raises(lapilli.InvalidFileError):
        Program(hostile.program(hostile.interface(hostile.script(["x"], [], [])))).close()
