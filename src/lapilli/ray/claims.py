"""Which device of a node a process of Ray takes: one that no other process has.

Ray counts a custom resource, but does not say which piece of it an actor got, and CUDA_VISIBLE_DEVICES does not hide Vulkan
devices. So an actor locks a file named after the device's UUID. The system ends the lock with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import ray

from lapilli.errors import NoDeviceError, ReadError
from lapilli.runtime.devices import Device, every_device

RESOURCE = "vulkan"
WAIT = 20.0
"""Seconds: Ray gives an actor's resources to the next one while its process still ends."""


class Claim:
    """A device that this process has until it releases it, or ends."""

    def __init__(self, device: Device, handle: int) -> None:
        self.device, self._handle = device, handle

    def release(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def claim(share: int = 1, without: Iterable[str] = ()) -> Claim:
    """Takes a device of this node. share: how many processes may have it. without: UUIDs of devices not to take.

    Raises NoDeviceError if all are taken, and stay so for WAIT seconds.
    """
    known = every_device()
    wanted = [device for device in known if device.uuid not in set(without)]
    end = time.monotonic() + WAIT
    while (found := _free(wanted, share)) is None:
        if time.monotonic() > end:
            names = ", ".join(f"{d.index}: {d.name}" for d in known)
            raise NoDeviceError(
                f"All devices of this node are taken ({names}; {share} processes each). Start the node with as many as it has: "
                f"ray start --resources='{{\"{RESOURCE}\": {len(known)}}}'."
            )
        time.sleep(0.05)
    return found


def _free(wanted: list[Device], share: int) -> Claim | None:
    folder, node = _folder(), ray.get_runtime_context().get_node_id()
    for slot in range(share):  # all devices have one process before one has two
        for device in wanted:
            handle = os.open(folder / f"{node}-{device.uuid}-{slot}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return Claim(device, handle)
            except BlockingIOError:
                os.close(handle)
    return None


def _folder() -> Path:
    """The folder of the locks: of this user alone. Raises ReadError if it is somebody else's."""
    folder = Path(tempfile.gettempdir()) / f"lapilli-ray-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ReadError(f"{folder} is not a folder of this user alone; remove it.")
    return folder
