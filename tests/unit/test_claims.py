"""A device belongs to one process of a node, until that ends: with devices and a node that are made up."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from lapilli.errors import NoDeviceError, ReadError
from lapilli.ray import claims


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    devices = [SimpleNamespace(index=k, name=f"device {k}", uuid=f"{k:032x}") for k in range(3)]
    monkeypatch.setattr(claims, "every_device", lambda: devices)
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr(claims, "WAIT", 0.1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return context


def test_each_device_once() -> None:
    taken = [claims.claim() for _ in range(3)]
    assert sorted(c.device.index for c in taken) == [0, 1, 2]
    with pytest.raises(NoDeviceError, match="All devices of this node are taken.*vulkan.: 3"):
        claims.claim()
    taken[1].release()
    taken[1].release()
    assert claims.claim().device.index == taken[1].device.index


def test_devices_are_shared_evenly() -> None:
    taken = [claims.claim(2) for _ in range(6)]
    assert [c.device.index for c in taken] == [0, 1, 2, 0, 1, 2]
    with pytest.raises(NoDeviceError, match="2 processes each"):
        claims.claim(2)
    taken[4].release()
    assert claims.claim(2).device.index == 1


def test_another_node_has_devices_of_its_own(node: Any) -> None:
    first = [claims.claim() for _ in range(3)]
    node.get_node_id = lambda: "other"
    assert [claims.claim().device.index for _ in first] == [0, 1, 2]


def test_a_process_that_is_killed_gives_its_device_back() -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            own = claims.claim()
            os.write(tell, b"%d" % own.device.index)
            os.read(os.pipe()[0], 1)  # for ever
        finally:
            os._exit(1)
    assert os.read(ready, 1) == b"0"
    held = [claims.claim() for _ in range(2)]
    with pytest.raises(NoDeviceError):
        claims.claim()
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert claims.claim().device.index == 0
    assert [c.device.index for c in held] == [1, 2]


def test_a_process_that_ends_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "WAIT", 20.0)
    held = [claims.claim() for _ in range(3)]
    timer = threading.Timer(0.3, held[2].release)
    timer.start()
    assert claims.claim().device.index == 2
    timer.join()


def test_a_lost_device_is_left_out() -> None:
    assert claims.claim(without=[f"{0:032x}"]).device.index == 1


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / f"lapilli-ray-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ReadError, match="not a folder of this user alone"):
        claims.claim()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ReadError, match="not a folder of this user alone"):
        claims.claim()
