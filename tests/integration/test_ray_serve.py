"""`lapilli.ray`'s services on a cluster of two nodes on this machine, each with lavapipe: SwiftShader takes no language
model. `make test-all` runs them."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray_cluster
import several_devices
import tiny
from numpy.typing import NDArray

pytestmark = pytest.mark.long
ray = pytest.importorskip("ray")

FAULTS = pytest.mark.skipif(not several_devices.LOADER.exists(), reason="make native builds the loader")
WEIGHTS = np.array([1, 2, 3], np.float32)
PORT = 18000 + os.getpid() % 1000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray import serve

    with ray_cluster.two_nodes(several_devices.drivers()[:1] * 2) as started:
        serve.start(http_options={"port": PORT, "location": "HeadOnly"})
        yield started
        serve.shutdown()


@pytest.fixture
def service(cluster: Any) -> Iterator[Callable[..., Any]]:
    """Starts an application, which ends with the test."""
    from ray import serve

    yield serve.run
    serve.delete("default")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "scaled.lap"
    path.write_bytes(tiny.scales(WEIGHTS))
    return path


@pytest.fixture(scope="module")
def values() -> NDArray[np.float32]:
    return np.random.default_rng(0).random((200, 3), dtype=np.float32)


def _ask(path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """POST; body: bytes, or what becomes JSON. The status, and the answer: JSON, or events."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            status, text, kind = answer.status, answer.read().decode(), answer.headers["content-type"]
    except urllib.error.HTTPError as error:
        status, text, kind = error.code, error.read().decode(), error.headers["content-type"]
    if kind.startswith("text/event-stream"):
        return status, [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return status, json.loads(text) if kind == "application/json" else text


def _replicas(name: str) -> int:
    """How many are running."""
    from ray import serve

    found = serve.status().applications["default"].deployments[name].replica_states
    return int(found.get("RUNNING", 0))


def _until(true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "this has not happened in time"
        time.sleep(0.1)


def test_rows_become_batches(service: Any, program: Path, values: NDArray[np.float32]) -> None:
    from lapilli.ray import deployment

    handle = service(deployment(program, max_batch_size=16, batch_wait=0.02, num_replicas=2))
    futures = [handle.remote({"x": x}) for x in values]
    for x, future in zip(values, futures, strict=True):
        np.testing.assert_array_equal(future.result()["y"], x * WEIGHTS * WEIGHTS)
    mixed = [handle.remote({"x": x}) for x in (values[0], np.ones(4, np.float32), values[1])]
    for x, future in ((values[0], mixed[0]), (values[1], mixed[2])):
        np.testing.assert_array_equal(future.result()["y"], x * WEIGHTS * WEIGHTS)
    with pytest.raises(Exception, match="must be float32 of shape|InvalidInputError"):
        mixed[1].result()
    assert _ask("/", {"x": [1, 2, 3]}) == (200, {"y": [1, 8, 27]})
    for body, said in ((b"{", "no JSON"), (b"[]", "no JSON object"), (b"{}", "takes"), (b'{"x": ["a"]}', "no array")):
        status, answer = _ask("/", body)
        assert status == 400 and said in answer["error"], answer


def test_replicas_follow_the_load(
    service: Any, program: Path, values: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one to two while requests wait, and back; answers are right throughout."""
    import ray_actors

    from lapilli.ray import deployment, serving

    monkeypatch.setattr(serving, "Predictor", ray_actors.Slow)
    scaling = {
        "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 0.5, "downscale_delay_s": 1.0,
        "metrics_interval_s": 0.2, "look_back_period_s": 1.0,
    }  # fmt: skip
    service(deployment(program, max_batch_size=1, name="scaled", autoscaling_config=scaling))
    assert _replicas("scaled") == 1
    done = threading.Event()

    def ask(k: int) -> None:
        while not done.is_set():
            x = values[k]
            status, answer = _ask("/", {"x": x.tolist()})
            assert status == 200, answer
            np.testing.assert_array_equal(np.array(answer["y"], np.float32), x * WEIGHTS * WEIGHTS)

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, k) for k in range(8)]
        try:
            _until(lambda: _replicas("scaled") == 2)
        finally:
            done.set()
        for one in asked:
            one.result()
    _until(lambda: _replicas("scaled") == 1)
    assert _ask("/", {"x": [1, 2, 3]}) == (200, {"y": [1, 8, 27]})


@pytest.mark.parametrize("happens", ["killed", pytest.param("lost", marks=FAULTS)])
def test_a_replica_is_started_anew(
    service: Any, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: str
) -> None:
    """After its process is killed in a batch, and after its device is lost, which nobody but the health check notices."""
    import ray_actors

    from lapilli.ray import deployment, serving

    flag, started = tmp_path / "flag", tmp_path / "started"
    actor = partial(ray_actors.Served, flag=str(flag), happens=happens, started=str(started))
    monkeypatch.setattr(serving, "Predictor", actor)
    service(deployment(program, name="checked", health_check_period_s=0.5))
    assert _ask("/", {"x": [1, 2, 3]}) == (200, {"y": [1, 8, 27]})
    status, answer = _ask("/", {"x": [-1, 2, 3]})
    assert flag.exists()
    assert (status, answer) == (200, {"y": [-1, 8, 27]}) if happens == "lost" else status in (200, 500)
    _until(lambda: len(started.read_text().split()) == 2)
    _until(lambda: _replicas("checked") == 1)
    assert _ask("/", {"x": [-1, 2, 3]}) == (200, {"y": [-1, 8, 27]})
    assert len(set(started.read_text().split())) == 2


CHAT = [{"role": "user", "content": "the question"}]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from language_models import save_program

    return save_program(tmp_path_factory.mktemp("llm"))


def test_a_language_model_is_served(service: Any, language_model: Path) -> None:
    """By two replicas, as `generate` writes it here, whole and streamed; and what is wrong is said."""
    from lapilli.llm import LLM
    from lapilli.ray import llm_deployment, ship

    prompts = [f"the {word} in a" for word in ("question", "thin", "answer", "inn", "thing", "end")]
    with LLM(language_model) as lm:
        want = [lm.generate(p, max_tokens=10).text for p in prompts]
        chat = lm.generate(CHAT, max_tokens=10).text
        vector = lm.embed("the question")[0]
    service(llm_deployment(ship(language_model), name="llm", api_key="secret", num_replicas=2))
    key = {"Authorization": "Bearer secret"}

    def complete(prompt: str) -> str:
        status, found = _ask("/v1/completions", {"prompt": prompt, "max_tokens": 10, "temperature": 0}, key)
        assert status == 200, found
        return str(found["choices"][0]["text"])

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(complete, prompts)) == want
    body = {"messages": CHAT, "max_tokens": 10, "temperature": 0}
    status, found = _ask("/v1/chat/completions", body, key)
    assert status == 200 and found["choices"][0]["message"]["content"] == chat
    status, events = _ask("/v1/chat/completions", body | {"stream": True}, key)
    assert status == 200 and events.pop() == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events) == chat
    status, found = _ask("/v1/embeddings", {"input": "the question"}, key)
    np.testing.assert_allclose(found["data"][0]["embedding"], vector, rtol=1e-4, atol=1e-5)
    assert _ask("/v1/completions", {"prompt": "the"})[0] == 401
    assert _ask("/v1/completions", {"prompt": 5}, key)[0] == 400
    assert _ask("/v1/completions", b"{", key)[0] == 400
    assert _ask("/v1/completions", {"prompt": "the"}, key | {"Host": "evil.example"})[0] == 400


@FAULTS
def test_a_language_model_whose_device_is_lost(
    service: Any, language_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replica fails the health check, and another one is started; answers are the same."""
    import ray_actors

    from lapilli.ray import language_models

    monkeypatch.setattr(language_models, "Replica", ray_actors.Writer)
    flag, started = tmp_path / "flag", tmp_path / "flag.started"
    options: dict[str, Any] = {"ray_actor_options": {"runtime_env": {"env_vars": {"LAPILLI_TEST_FLAG": str(flag)}}}}
    service(language_models.llm_deployment(language_model, name="llm", health_check_period_s=0.5, **options))
    body = {"prompt": "the question", "max_tokens": 8, "temperature": 0}
    status, first = _ask("/v1/completions", body)
    assert status == 200
    flag.touch()
    _until(lambda: len(started.read_text().split()) == 2)
    _until(lambda: _replicas("llm") == 1)
    status, again = _ask("/v1/completions", body)
    assert status == 200 and again["choices"][0]["text"] == first["choices"][0]["text"]


def test_what_is_no_language_model_is_refused(cluster: Any, program: Path) -> None:
    from lapilli import InvalidFileError, InvalidInputError
    from lapilli.ray import llm_deployment

    with pytest.raises(InvalidFileError, match="no language model"):
        llm_deployment(program)
    with pytest.raises(InvalidInputError, match="share is 0"):
        llm_deployment(program, share=0)
