"""A cluster of Ray with two nodes on this machine, each with a device of software."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import several_devices


def _variables(driver: str) -> dict[str, str]:
    given = several_devices.environment(faults=several_devices.LOADER.exists())
    names: tuple[str, ...] = ("PYTHONPATH", "LD_LIBRARY_PATH")
    kept = {name: given[name] for name in names if name in given}
    return {**kept, "VK_DRIVER_FILES": driver, "VK_ICD_FILENAMES": driver, "LAPILLI_VALIDATION": ""}


@contextmanager
def two_nodes(drivers: Sequence[str]) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster`, to which this process is connected. drivers: the file of each node's driver."""
    # Ray's statistics of use start a thread that stays for as long as the process and writes a traceback each ten seconds; where
    # that falls into another test's `ast.parse`, Python before 3.11.8 raises SystemError there (python/cpython#106905).
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray.data
    from ray.cluster_utils import Cluster

    first, second = (_variables(driver) for driver in drivers)
    started = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "resources": {"vulkan": 1}, "env_vars": first, "include_dashboard": False},
    )
    started.add_node(num_cpus=1, resources={"vulkan": 1}, env_vars=second)
    ray.init(address=started.address, logging_level="error", log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.wait_for_min_actors_s = 120  # both have a part, however long one takes to start
    context.execution_options.verbose_progress = False
    try:
        yield started
    finally:
        ray.shutdown()
        started.shutdown()
