"""`lapilli.ray` on a cluster of two nodes on this machine: one with lavapipe, one with SwiftShader.

`make test` runs the first two, of which one starts the cluster; `make test-all` all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray_cluster
import several_devices
import tiny
from numpy.typing import NDArray

ray = pytest.importorskip("ray")
predictor = pytest.importorskip("lapilli.ray.predictor")
if len(several_devices.drivers()) < 2:
    pytest.skip("tools/setup.sh test fetches SwiftShader", allow_module_level=True)

FAULTS = pytest.mark.skipif(not several_devices.LOADER.exists(), reason="make native builds the loader")
WEIGHTS = np.array([1, 2, 3], np.float32)
ROWS = 1000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster.two_nodes(several_devices.drivers()) as started:
        yield started


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "scaled.lap"
    path.write_bytes(tiny.scales(WEIGHTS))
    return path


@pytest.fixture(scope="module")
def values() -> NDArray[np.float32]:
    return np.random.default_rng(0).random((ROWS, 3), dtype=np.float32)


def dataset(values: NDArray[np.float32], blocks: int = 10) -> Any:
    return ray.data.from_items([{"id": k, "x": x} for k, x in enumerate(values)], override_num_blocks=blocks)


def whole(rows: list[dict[str, Any]], values: NDArray[np.float32]) -> None:
    """Each row once, and right."""
    assert sorted(row["id"] for row in rows) == list(range(len(values)))
    for row in rows:
        np.testing.assert_array_equal(row["y"], values[row["id"]] * WEIGHTS * WEIGHTS)
        assert "x" not in row


def predict(values: NDArray[np.float32], actor: type, program: Path, *arguments: Any, **options: Any) -> list[Any]:
    from lapilli.ray import ship

    return list(
        dataset(values).map_batches(
            actor,
            batch_size=options.pop("batch_size", 25),
            fn_constructor_args=(ship(program), *arguments),
            fn_constructor_kwargs=options,
            num_cpus=0,
            resources={"vulkan": 1},
            **predictor._pool(2),
        ).take_all()
    )  # fmt: skip


def test_actors_do_not_wait_for_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """They did, for as long as they computed, with the two batches that Ray gives them; docs/scaling.md has what that cost."""
    given = predictor._pool(3)
    assert (given["compute"].min_size, given["compute"].max_size) == (3, 3)
    assert given["compute"].max_tasks_in_flight_per_actor == 4 and given["compute"].max_concurrent_calls_per_actor == 2
    assert not given["compute"].enable_true_multi_threading  # a predictor is one thread's

    class Older:
        def __init__(self, size: int, max_tasks_in_flight_per_actor: int) -> None:
            self.most = max_tasks_in_flight_per_actor

    monkeypatch.setattr(ray.data, "ActorPoolStrategy", Older)
    given = predictor._pool(3)
    assert given["compute"].most == 4 and given["max_concurrency"] == 2


def test_a_data_set_on_two_nodes(cluster: Any, program: Path, values: NDArray[np.float32]) -> None:
    """25 rows a batch, of which a run takes 16. Both devices work, and no file is copied by a process."""
    from ray_actors import Telling

    rows = predict(values, Telling, program)
    whole(rows, values)
    assert len({row["device"] for row in rows}) == len({row["process"] for row in rows}) == 2
    assert all(row["shared"] for row in rows)
    threads = {thread.name for thread in threading.enumerate()}
    assert "data-usage-metrics-poller" not in threads  # it would disturb other tests


@pytest.mark.long
def test_poisoned_rows_are_reported(cluster: Any, program: Path, values: NDArray[np.float32]) -> None:
    from lapilli import InvalidInputError
    from lapilli.ray import predict as predict_

    items: list[dict[str, Any]] = [{"id": k, "x": x} for k, x in enumerate(values)]
    items[17]["x"] = np.ones(4, np.float32)
    items[500]["x"] = np.ones(2, np.float32)
    poisoned = ray.data.from_items(items, override_num_blocks=10)
    for form in ("numpy", "pyarrow"):
        rows = predict_(poisoned, program, batch_size=50, batch_format=form, on_error="return").take_all()
        bad = {row["id"]: row for row in rows if row["error"]}
        assert sorted(bad) == [17, 500] and all("InvalidInputError" in row["error"] for row in bad.values())
        assert all(np.isnan(row["y"]).all() for row in bad.values())
        whole(
            [row for row in rows if not row["error"]] + [{**b, "y": values[k] * WEIGHTS**2} for k, b in bad.items()],
            values,
        )
    with pytest.raises(Exception, match=InvalidInputError.__name__):
        predict_(poisoned, program, batch_size=50).take_all()


@pytest.mark.long
def test_an_actor_is_killed(cluster: Any, program: Path, values: NDArray[np.float32], tmp_path: Path) -> None:
    from ray_actors import Dying

    flag = tmp_path / "killed"
    rows = predict(values, Dying, program, str(flag), 310)
    assert flag.exists()
    whole(rows, values)


@pytest.mark.long
@FAULTS
def test_a_device_is_lost(cluster: Any, program: Path, values: NDArray[np.float32], tmp_path: Path) -> None:
    from ray_actors import Losing

    flag = tmp_path / "lost"
    rows = predict(values, Losing, program, str(flag), 310)
    assert flag.exists()
    whole(rows, values)


@pytest.mark.long
@FAULTS
def test_a_lost_device_fails_the_health_check(cluster: Any, program: Path, values: NDArray[np.float32]) -> None:
    """And is opened anew by the next batch."""
    from ray_actors import Checked

    from lapilli.ray import ship

    shipped = ship(program)
    actor = ray.remote(num_cpus=0, resources={"vulkan": 1}, max_restarts=0)(Checked).remote(shipped)
    ray.get(actor.check.remote())
    ray.get(actor.lose.remote())
    with pytest.raises(ray.exceptions.RayTaskError, match="DeviceLostError"):
        ray.get(actor.check.remote())
    results, _ = ray.get(actor.run.remote([values[:40]]))
    np.testing.assert_array_equal(results[0], values[:40] * WEIGHTS * WEIGHTS)
    ray.get(actor.check.remote())
    ray.kill(actor)


@pytest.mark.long
def test_a_device_has_one_process(cluster: Any, program: Path) -> None:
    """Whatever resources are said: the third of two devices is refused with what to do, and a process that ends gives its own."""
    from lapilli.ray import Predictor, ship

    shipped = ship(program)
    actor = ray.remote(num_cpus=0, resources={"vulkan": 0.5}, max_restarts=0)(Predictor)
    both = [actor.remote(shipped) for _ in range(4)]
    known = []
    for one in both:
        try:
            ray.get(one.check.remote())
            known.append(one)
        except ray.exceptions.RayError as error:
            assert "All devices of this node are taken" in str(error)
    assert len(known) == 2
    for one in both:
        ray.kill(one)
    del both, known, one
    shared = [actor.remote(shipped, share=2) for _ in range(4)]
    ray.get([one.check.remote() for one in shared])
    for one in shared:
        ray.kill(one)


@pytest.mark.long
def test_a_node_goes(cluster: Any, program: Path, values: NDArray[np.float32], tmp_path: Path) -> None:
    """Last, as the second node does not come back."""
    import threading

    from ray_actors import Telling

    node = next(iter(cluster.worker_nodes))

    def remove() -> None:
        time.sleep(6)
        cluster.remove_node(node, allow_graceful=False)

    class Slow(Telling):
        def __call__(self, batch: Any) -> Any:
            time.sleep(0.3)
            return super().__call__(batch)

    thread = threading.Thread(target=remove)
    thread.start()
    rows = predict(values, Slow, program)
    thread.join()
    whole(rows, values)
