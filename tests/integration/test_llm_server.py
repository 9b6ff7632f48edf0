"""The server of a language model, and the commands, with a tiny model of random weights."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from language_models import save_program
from starlette.testclient import TestClient

import lapilli.cli
from lapilli.llm import LLM
from lapilli.llm.server import ServerLimits, application

CHAT = [{"role": "user", "content": "the question"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_program(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def lm(file: Path) -> Iterator[LLM]:
    with LLM(file) as found:
        found.text = dataclasses.replace(found.text, ends=())  # random weights end anywhere
        yield found


@pytest.fixture(scope="module")
def client(lm: LLM) -> Iterator[TestClient]:
    with TestClient(application(lm, limits=ServerLimits(body=4096)), base_url="http://localhost") as found:
        yield found


def events(response: Any) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_answers_are_those_of_generate(client: TestClient, lm: LLM) -> None:
    want = lm.generate(CHAT, max_tokens=12)
    body = {"messages": CHAT, "max_tokens": 12, "temperature": 0, "model": "any"}
    found = client.post("/v1/chat/completions", json=body).json()
    assert found["object"] == "chat.completion" and found["choices"][0]["finish_reason"] == "length"
    assert found["choices"][0]["message"] == {"role": "assistant", "content": want.text}
    assert found["usage"] == {
        "prompt_tokens": want.prompt_tokens, "completion_tokens": 12, "total_tokens": want.prompt_tokens + 12
    }  # fmt: skip
    parts = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "question"}]}]
    again = client.post("/v1/chat/completions", json=body | {"messages": parts}).json()
    assert again["choices"][0]["message"] == found["choices"][0]["message"]

    text = lm.generate("the question", max_tokens=9, temperature=2.0, seed=4, top_k=50, stop=["zzzz"]).text
    body = {"prompt": "the question", "max_tokens": 9, "temperature": 2.0, "seed": 4, "top_k": 50, "stop": ["zzzz"]}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
    body["prompt"] = lm.tokens("the question")
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == text


def test_streams_bring_the_same_text_in_pieces(client: TestClient, lm: LLM) -> None:
    want = lm.generate(CHAT, max_tokens=12).text
    body = {
        "messages": CHAT,
        "max_tokens": 12,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response = client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response)
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in found[:-1]) == want
    assert found[-2]["choices"][0]["finish_reason"] == "length" and found[-1]["usage"]["completion_tokens"] == 12
    assert len({e["id"] for e in found}) == 1
    body = {"prompt": "the", "max_tokens": 7, "temperature": 0, "stream": True}
    found = events(client.post("/v1/completions", json=body))
    assert "".join(e["choices"][0]["text"] for e in found) == lm.generate("the", max_tokens=7).text


def test_requests_at_once_are_written_in_one_step(client: TestClient, lm: LLM) -> None:
    """Each is as alone; a third one waits for a place."""
    bodies = [{"prompt": p, "max_tokens": 40, "temperature": 0} for p in ("the", "one more", "a third")]
    want = [lm.generate(str(b["prompt"]), max_tokens=40).text for b in bodies]
    found = [""] * 3

    def ask(k: int) -> None:
        found[k] = client.post("/v1/completions", json=bodies[k]).json()["choices"][0]["text"]

    lm._session.steps.clear()
    with lm._session.lock:  # until all have come
        threads = [threading.Thread(target=ask, args=(k,)) for k in range(3)]
        for t in threads:
            t.start()
        time.sleep(0.3)
    for t in threads:
        t.join()
    assert found == want
    assert lm._session.steps.count(2) > 30 and len(lm._session.steps) < 100


def test_embeddings(client: TestClient, lm: LLM) -> None:
    texts: Any = ["the question", "x", lm.tokens("a third")]
    want = lm.embed(texts)
    found = client.post("/v1/embeddings", json={"input": texts, "model": "any"}).json()
    assert found["object"] == "list" and [d["index"] for d in found["data"]] == [0, 1, 2]
    np.testing.assert_allclose([d["embedding"] for d in found["data"]], want, rtol=0, atol=1e-6)
    assert found["usage"]["prompt_tokens"] == sum(len(lm.tokens(t)) for t in texts)
    for one in (texts[0], texts[2]):
        body = {"input": one, "encoding_format": "base64"}
        data = base64.b64decode(client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"])
        np.testing.assert_allclose(np.frombuffer(data, "<f4"), lm.embed([one])[0], rtol=0, atol=1e-6)
    wrong: tuple[Any, ...] = (
        {}, {"input": []}, {"input": ""}, {"input": [1, "a"]}, {"input": 5}, {"input": [[]]}, {"input": "a" * 2000}, [],
        {"input": "x", "encoding_format": "hex"}, {"input": "x", "dimensions": 4}, {"input": [True]}, {"input": [[10**9]]},
        {"input": ["x"] * 2049},
    )  # fmt: skip
    for bad in wrong:
        response = client.post("/v1/embeddings", json=bad)
        assert response.status_code in (400, 413) and response.json()["error"]["message"]


def test_answers_follow_a_schema(file: Path) -> None:
    schema = {
        "type": "object", "properties": {"size": {"type": "integer"}, "kind": {"enum": ["big", "small"]}},
        "required": ["size", "kind"], "additionalProperties": False,
    }  # fmt: skip
    with LLM(file) as lm, TestClient(application(lm), base_url="http://localhost") as client:
        body: dict[str, Any] = {"messages": CHAT, "temperature": 2.0, "max_tokens": 100}
        for seed in range(4):
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            given = client.post("/v1/chat/completions", json=body | {"response_format": form, "seed": seed}).json()
            choice = given["choices"][0]
            if choice["finish_reason"] == "stop":
                assert set(json.loads(choice["message"]["content"])) == {"size", "kind"}
        form = {"type": "json_object"}
        given = client.post("/v1/chat/completions", json=body | {"response_format": form, "temperature": 0}).json()
        assert given["choices"][0]["message"]["content"].startswith("{")
        rules = 'root ::= "yes" | "no"'
        given = client.post("/v1/completions", json={"prompt": "x", "grammar": rules, "seed": 3}).json()
        assert given["choices"][0]["text"] in ("yes", "no") and given["choices"][0]["finish_reason"] == "stop"
        for bad in (
            {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}}, {"response_format": "json"},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nix"}}}},
            {"grammar": "root ::= ("}, {"grammar": 5}, {"grammar": rules, "response_format": form},
        ):  # fmt: skip
            response = client.post("/v1/chat/completions", json=body | bad)
            assert response.status_code == 400 and response.json()["error"]["message"], bad


def test_log_probabilities(client: TestClient, lm: LLM) -> None:
    want = lm.generate(CHAT, max_tokens=5, logprobs=2).tokens
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    found = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    streamed = events(client.post("/v1/chat/completions", json=body | {"stream": True}))
    pieces = [x for e in streamed for x in (e["choices"][0]["logprobs"] or {"content": []})["content"]]
    for entries in (found, pieces):
        assert [e["token"] for e in entries] == [t.text for t in want]
        assert [e["logprob"] for e in entries] == pytest.approx([t.logprob for t in want], abs=1e-4)
        assert all(e["top_logprobs"][0]["logprob"] == pytest.approx(e["logprob"], abs=1e-4) for e in entries)
    listed = client.post("/v1/chat/completions", json=body | {"top_logprobs": 20}).json()["choices"][0]["logprobs"][
        "content"
    ]
    halves = [t for e in listed for t in e["top_logprobs"] if t["token"] == "\ufffd"]  # bytes above 127, one token each
    assert len(halves) > 4 and all(len(t["bytes"]) == 1 and t["bytes"][0] > 127 for t in halves)
    assert all(bytes(t["bytes"]).decode() == t["token"] for e in listed for t in e["top_logprobs"] if t not in halves)
    body = {"prompt": "the", "max_tokens": 5, "temperature": 0, "logprobs": 20}
    listed = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert all(len(each) == 20 for each in listed["top_logprobs"])
    assert any(name.startswith("bytes:\\x") for name in listed["top_logprobs"][0])
    body["logprobs"] = 2
    listed = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert len(listed["tokens"]) == 5 and max(listed["top_logprobs"][0].values()) == pytest.approx(
        listed["token_logprobs"][0], abs=1e-4
    )


def test_the_model_is_listed_and_found_by_its_name(client: TestClient, lm: LLM) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [m["id"] for m in listed] == [lm.name] and listed[0]["context_length"] == lm.context
    assert client.get(f"/v1/models/{lm.name}").json() == listed[0]
    response = client.get("/v1/models/an%22other/name")
    assert (
        response.status_code == 404
        and "There is no model 'an\"other/name' here; " in response.json()["error"]["message"]
    )
    assert "other" not in client.get("/metrics").text


@pytest.mark.parametrize(
    "body, status, reason",
    [
        ({}, 400, "'messages' is missing"), ({"messages": []}, 400, "'messages'"), ({"messages": ["x"]}, 400, "'messages'"),
        ({"messages": [{"role": "user"}]}, 400, "Messages are"), ([], 400, "not a JSON object"),
        ({"messages": CHAT, "temperature": -1}, 400, "temperature is -1"),
        ({"messages": CHAT, "temperature": "hot"}, 400, "temperature is 'hot'"),
        ({"messages": CHAT, "max_tokens": 1.5}, 400, "max_tokens is 1.5"),
        ({"messages": CHAT, "stream": "yes"}, 400, "'stream' is 'yes'"), ({"messages": CHAT, "stop": 5}, 400, "'stop' is 5"),
        ({"messages": CHAT, "stop": [5]}, 400, "stop is"), ({"messages": CHAT, "n": 2}, 400, "'n' is not offered"),
        ({"messages": CHAT, "tools": [{}]}, 400, "'tools' is not offered"), ({"messages": CHAT, "top_kk": 2}, 400, "'top_kk'"),
        ({"messages": CHAT, "stream_options": 1}, 400, "stream_options"),
        ({"messages": CHAT, "top_logprobs": 3}, 400, "needs 'logprobs'"),
        ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, 400, "logprobs is 21"),
        ({"messages": CHAT, "seed": 1.5}, 400, "seed"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "no text"),
        ({"messages": [{"role": "user", "content": "x" * 1000}]}, 400, "the cache holds 128"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 413, "larger than 4096"),
    ],
)  # fmt: skip
def test_wrong_requests_are_told_why(client: TestClient, body: Any, status: int, reason: str) -> None:
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == status and reason in response.json()["error"]["message"]


def test_what_is_no_request(client: TestClient) -> None:
    path = "/v1/chat/completions"
    json_type = {"content-type": "application/json"}
    assert client.post(path, content=b"{", headers=json_type).status_code == 400
    assert client.post(path, content=b"[" * 4000, headers=json_type).status_code == 400
    assert client.post(path, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert client.get(path).status_code == 405 and client.get("/v1/nothing").status_code == 404
    assert "not served" in client.get("/v1/nothing").json()["error"]["message"]
    response = client.get("/v1/models", headers={"host": "evil.example"})
    assert response.status_code == 400 and "'evil.example' is not served" in response.json()["error"]["message"]
    surrogate = rb'{"messages": [{"role": "user", "content": "\ud800"}]}'
    response = client.post(path, content=surrogate, headers=json_type)
    assert response.status_code == 400 and "half of a character" in response.json()["error"]["message"]
    response = client.post("/v1/embeddings", content=rb'{"input": ["a", "\ud800"]}', headers=json_type)
    assert response.status_code == 400 and "half of a character" in response.json()["error"]["message"]
    for prompt in (None, 5, ["a", "b"], [1, "b"], [1, 10**9]):
        assert client.post("/v1/completions", json={"prompt": prompt}).status_code == 400


def test_what_nobody_expected_is_counted_and_told(lm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON, in a stream as its last event; what it was is for the log alone."""

    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("secret")

    with TestClient(application(lm), base_url="http://localhost") as client:
        body: dict[str, Any] = {"prompt": "the", "max_tokens": 3}
        with monkeypatch.context() as patch:
            patch.setattr(lm._session, "next", fails)
            streamed = client.post("/v1/completions", json=body | {"stream": True}).text
            response = client.post("/v1/completions", json=body)
        assert response.status_code == 500
        for message in (response.json(), json.loads(streamed.strip().split("\n\n")[-1].removeprefix("data: "))):
            assert message["error"]["type"] == "server_error" and "secret" not in message["error"]["message"]
            assert "ZeroDivisionError" in message["error"]["message"]
        text = client.get("/metrics").text
        assert 'lapilli_requests_total{path="/v1/completions",status="500"} 1' in text
        assert "lapilli_requests_waiting 0\n" in text
        assert client.post("/v1/completions", json=body).status_code == 200


def test_a_key_is_asked_for(lm: LLM) -> None:
    with TestClient(application(lm, api_key="secret"), base_url="http://localhost") as client:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Bearer sécret"},
        ):
            sent = {k: v.encode() for k, v in headers.items()}
            assert client.get("/v1/models", headers=sent).status_code == 401  # type: ignore[arg-type]
        assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).json()["data"][0]["id"] == lm.name
        assert client.get("/health").status_code == 200


def test_the_queue_and_the_time_are_limited(lm: LLM) -> None:
    """Of three requests at once, in a queue of two, one is refused; those beyond their time end early, and places come back."""
    limits = ServerLimits(queue=2, seconds=0.4)
    with TestClient(application(lm, limits=limits), base_url="http://localhost") as client:
        body = {"prompt": "the", "temperature": 0, "stop": "never"}
        found: list[Any] = []
        with lm._session.lock:  # nothing is written meanwhile
            threads = [
                threading.Thread(target=lambda: found.append(client.post("/v1/completions", json=body)))
                for _ in range(3)
            ]
            for t in threads:
                t.start()
            deadline = time.monotonic() + 20
            while not found and time.monotonic() < deadline:
                time.sleep(0.02)
            assert [r.status_code for r in found] == [429] and found[0].headers["retry-after"]
            time.sleep(0.5)
        for t in threads:
            t.join()
        assert sorted(r.status_code for r in found) == [200, 200, 429]
        for response in found[1:]:
            assert response.json()["usage"]["completion_tokens"] <= 2
        assert "lapilli_requests_waiting 0\n" in client.get("/metrics").text
        assert client.post("/v1/completions", json=body | {"max_tokens": 2}).status_code == 200


def test_a_client_that_goes_away_ends_its_answer(lm: LLM) -> None:
    """As an ASGI server tells it: the connection is closed after the first pieces."""
    import asyncio

    app = application(lm)
    body = json.dumps({"prompt": "the", "temperature": 0, "stream": True}).encode()
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
        "http_version": "1.1", "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    sent: list[Any] = []

    async def talk() -> None:
        begun = asyncio.Event()
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            for message in messages:
                return message
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                begun.set()

        await asyncio.wait_for(app(scope, receive, send), 60)

    asyncio.run(talk())
    assert 2 <= len(sent) < 100
    with TestClient(app, base_url="http://localhost") as client:
        deadline = time.monotonic() + 20
        while (
            "lapilli_request_seconds_count 1" not in (text := client.get("/metrics").text)
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
    assert "lapilli_requests_waiting 0\n" in text
    written = next(
        float(line.split()[1]) for line in text.splitlines() if line.startswith("lapilli_generated_tokens_total ")
    )
    assert 0 < written < 120


def test_metrics_count(client: TestClient) -> None:
    client.post("/v1/completions", json={"prompt": "the", "max_tokens": 3, "temperature": 0})
    lines = client.get("/metrics").text.splitlines()
    names = {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}
    assert {"lapilli_requests_total", "lapilli_generated_tokens_total", "lapilli_first_token_seconds_sum"} <= names
    assert any(line.startswith('lapilli_requests_total{path="/v1/completions",status="200"}') for line in lines)


def test_commands_write_and_talk(file: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    found = run(
        lapilli.cli.main,
        ["generate", str(file), "the question", "--max-tokens", "8", "-o", str(tmp_path / "again.lap")],
    )
    assert found.exit_code == 0, found.output
    with LLM(tmp_path / "again.lap") as lm:
        from lapilli.names import printable

        assert printable(lm.generate("the question", max_tokens=8).text) in found.stdout
    found = run(lapilli.cli.main, ["chat", str(file), "--max-tokens", "4"], input="the question\nand another\n\n")
    assert found.exit_code == 0, found.output
    for command in ("generate", "chat", "serve"):
        assert "MODEL" in run(lapilli.cli.main, [command, "--help"]).output
    found = run(lapilli.cli.main, ["generate", str(file), "x", "--temperature", "-1"])
    assert found.exit_code == 1 and "temperature is -1.0" in found.output


def test_a_reader_that_has_enough_ends_an_answer_without_a_word(file: Path) -> None:
    """As `lapilli generate ... | head -c 5` does."""
    command = [sys.executable, "-m", "lapilli.cli", "generate", str(file), "the question", "--max-tokens", "100", "-q"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert done.stderr == "" and done.returncode == 1


def test_compile_makes_the_file_that_save_writes(file: Path, tmp_path: Path) -> None:
    model, run = file.with_suffix(".gguf"), CliRunner().invoke
    options = ["--target", "cpu-fp32", "--context", "128", "--sequences", "2"]
    found = run(lapilli.cli.main, ["compile", str(model), "-o", str(tmp_path / "model.lap"), *options])
    assert found.exit_code == 0, found.output
    assert (tmp_path / "model.lap").read_bytes() == file.read_bytes()
    for wrong in (["--input", "1,2"], ["--sequences", "0"]):
        assert run(lapilli.cli.main, ["compile", str(model), *wrong]).exit_code == 1
    assert "for language models" in run(lapilli.cli.main, ["compile", str(file), "--context", "9", "-o", "x"]).output
    assert "without config.json" in run(lapilli.cli.main, ["compile", str(tmp_path)]).output
    program = lapilli.compile(model, target="cpu-fp32", metadata={"made": "here"})
    assert {"prompt", "step"} <= program.methods.keys() and program.metadata["made"] == "here"
    with pytest.raises(lapilli.CompileError, match="without example_inputs"):
        lapilli.compile(model, (1,))


def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    from importlib.util import find_spec

    import lapilli.runtime.extras

    monkeypatch.setattr(
        lapilli.runtime.extras, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name)
    )
    found = CliRunner().invoke(lapilli.cli.main, ["serve", str(file)])
    assert found.exit_code == 1 and "pip install 'lapilli[serve]'" in found.output
    monkeypatch.setattr(lapilli.runtime.extras, "find_spec", lambda name: None)
    with LLM(file) as lm, pytest.raises(lapilli.LapilliError, match=r"pip install 'lapilli\[llm\]'"):
        lm.generate("x")
