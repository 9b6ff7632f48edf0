"""Answers of several sequences whose keys and values share a cache that is too small for all of them at once."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from language_models import made, save_folder
from starlette.testclient import TestClient

import lapilli
from lapilli.llm import LLM
from lapilli.llm.from_source import build, read
from lapilli.llm.server import application
from lapilli.llm.session import Session

CONTEXT, SEQUENCES, CACHE = 160, 4, 256  # pages of 64: three of a sequence, four in all


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("cache")
    source = read(save_folder(made("llama"), folder / "model"))
    (folder / "one.lap").write_bytes(build(source, CONTEXT, sequences=SEQUENCES, cache=CACHE, target="cpu-fp32"))
    with LLM(folder / "one.lap") as lm:
        yield lm


def answer(lm: LLM, prompt: list[int], count: int, seed: int) -> list[int]:
    return [t.id for t in lm.generate(prompt, max_tokens=count, temperature=2.0, seed=seed).tokens]


def alone(lm: LLM, given: dict[str, Any]) -> list[int]:
    lm._session.forget()
    return [t.id for t in lm.generate(**given).tokens]


def is_consistent(session: Session) -> bool:
    """Whether the pages that are not free are those of slots, and nobody writes what another one has."""
    holders = Counter(page for slot in session.slots for page in slot.pages)
    assert all(len({*slot.pages}) == len(slot.pages) for slot in session.slots)
    assert all(slot.cached or slot.turn is not None or not slot.pages for slot in session.slots)
    return session.pool.free == session.size.pages - len(holders)


def test_the_cache_is_as_large_as_it_was_asked_for(lm: LLM) -> None:
    session = lm._session
    assert (session.size.pages, session.size.most) == (4, 3)
    states = {s.name: s.shape for s in lm.program.description.states}
    caches = [shape for name, shape in states.items() if name.endswith((".keys", ".values"))]
    assert caches and all(shape[0] == 5 and shape[2] == 64 for shape in caches)


@pytest.mark.part(6)
@pytest.mark.parametrize("seed", range(12))
def test_random_answers_are_those_that_are_written_alone(lm: LLM, seed: int) -> None:
    """Prompts that begin alike or not, streams that are read in any order, cut short or left, and lists of prompts between them."""
    r = random.Random(seed)
    beginnings = [[r.randrange(300) for _ in range(r.choice([20, 70, 110]))] for _ in range(2)]

    def question() -> dict[str, Any]:
        beginning = r.choice(beginnings)
        prompt = beginning[: r.randint(1, len(beginning))] + [r.randrange(300) for _ in range(r.randint(1, 30))]
        room = CONTEXT + 1 - len(prompt)
        return dict(prompt=prompt, max_tokens=r.randint(1, min(room, 60)), temperature=2.0, seed=r.randrange(1000))

    lm._session.forget()
    streams, wanted = [(lm.generate(**g, stream=True), g) for g in (question() for _ in range(r.randint(1, 6)))], []
    running = list(streams)
    while running:
        stream, given = r.choice(running)
        if r.random() < 0.03:
            stream.cancel()
        if next(stream, None) is None:
            running.remove((stream, given))
        if r.random() < 0.02:
            several = [question() for _ in range(r.randint(2, 6))]
            same = {k: v for k, v in several[0].items() if k != "prompt"} | {"max_tokens": 20}
            prompts = [q["prompt"][:138] for q in several]
            for prompt, found in zip(prompts, lm.generate(prompts, **same), strict=True):
                wanted.append((same | {"prompt": prompt}, [t.id for t in found.tokens]))
        assert is_consistent(lm._session)
    for stream, given in streams:
        wanted.append((given, [t.id for t in stream.answer.tokens]))
    for given, found in wanted:
        assert alone(lm, given)[: len(found)] == found


def test_younger_answers_of_a_list_wait_for_pages(lm: LLM) -> None:
    """All four need three pages each, and there are four: at most one of them waits with pages that another one needs."""
    given = dict(max_tokens=110, temperature=2.0, seed=3)
    prompts = [[k, *range(40)] for k in range(4)]
    lm._session.forget()
    before = lm._session.read
    found = lm.generate(prompts, **given)
    read = lm._session.read
    assert is_consistent(lm._session)
    assert [[t.id for t in a.tokens] for a in found] == [alone(lm, given | {"prompt": p}) for p in prompts]
    assert read - before < 2 * SEQUENCES * 150


def test_threads_wait_for_pages(lm: LLM) -> None:
    """As those of a server do, whose readers go on at any time."""
    given = [dict(prompt=[k, *range(50)], max_tokens=100, temperature=2.0, seed=k) for k in range(SEQUENCES)]
    found: dict[int, list[int]] = {}

    def write(k: int) -> None:
        stream = lm.generate(**given[k], stream=True)
        for _ in stream.steadily():
            pass
        found[k] = [t.id for t in stream.answer.tokens]

    lm._session.forget()
    before = lm._session.read
    threads = [threading.Thread(target=write, args=(k,)) for k in range(SEQUENCES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == SEQUENCES and is_consistent(lm._session)
    assert lm._session.read - before < 3 * SEQUENCES * 150  # nobody reads everything again for each token
    assert [found[k] for k in range(SEQUENCES)] == [alone(lm, g) for g in given]


def test_a_server_answers_more_than_there_is_memory_for(lm: LLM) -> None:
    """Six requests at once, of which one and a half fit; each answer is the one that is written alone."""
    bodies = [{"prompt": [k, *range(60)], "max_tokens": 80, "temperature": 2.0, "seed": k} for k in range(6)]
    found: dict[int, str] = {}
    with TestClient(application(lm), base_url="http://localhost") as client:

        def ask(k: int) -> None:
            found[k] = client.post("/v1/completions", json=bodies[k]).json()["choices"][0]["text"]

        lm._session.forget()
        before = lm.cache().waits_total
        threads = [threading.Thread(target=ask, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        numbers = dict(line.split() for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    use = lm.cache()
    assert use.tokens == 256 and 0 < use.tokens_held <= 256 and use.tokens_held % 64 == 0
    assert before < use.waits_total < before + 60
    assert float(numbers["lapilli_cache_tokens"]) == 256
    assert float(numbers["lapilli_cache_waits_total"]) == use.waits_total
    for k, body in enumerate(bodies):
        lm._session.forget()
        assert lm.generate(**body).text == found[k]


def test_a_waiting_answer_can_be_abandoned(lm: LLM) -> None:
    """Without pages it would never write another token."""
    lm._session.forget()
    first = lm.generate([1, 2, 3], max_tokens=150, temperature=2.0, seed=1, stream=True).steadily()
    second = lm.generate([9, *range(30)], max_tokens=120, temperature=2.0, seed=2, stream=True).steadily()
    next(first), next(second)
    thread = threading.Thread(target=lambda: list(second))
    thread.start()
    for _ in first:
        pass
    second.cancel()
    thread.join(60)
    assert not thread.is_alive() and second.answer.reason in ("cancelled", "length", "stop")


def test_what_prompts_begin_with_is_there_once(lm: LLM) -> None:
    """Three answers of 91 tokens of which 64 are the same take a page, and one more each."""
    lm._session.forget()
    common = list(range(70))
    streams = [lm.generate([*common, k], max_tokens=20, seed=k, temperature=2.0, stream=True) for k in range(3)]
    for stream in streams:
        next(stream)
    session = lm._session
    assert sum(slot.turn is not None for slot in session.slots) == 3
    assert session.size.pages - session.pool.free == 4
    pages = [slot.pages for slot in session.slots if slot.turn is not None]
    assert len({p[0] for p in pages}) == 1 and len({p[1] for p in pages}) == 3
    for _ in zip(*streams, strict=False):
        pass


def test_answers_gone_on_with_do_not_change_others(lm: LLM) -> None:
    """Who goes on from the middle of a page that others have, too, gets a copy of it."""
    lm._session.forget()
    prompt = list(range(100))
    first = lm.generate(prompt, max_tokens=60, seed=1, temperature=2.0, stream=True)
    next(first)
    other = answer(lm, [*prompt[:80], 7], 30, 2)  # shares a page and a half
    rest = [t.id for t in first.answer.tokens]
    for _ in first:
        pass
    assert [t.id for t in first.answer.tokens][: len(rest)] == rest
    assert [t.id for t in first.answer.tokens] == alone(lm, dict(prompt=prompt, max_tokens=60, seed=1, temperature=2.0))
    lm._session.forget()
    assert other == answer(lm, [*prompt[:80], 7], 30, 2)


def test_likelihoods_are_those_of_one_sequence(lm: LLM) -> None:
    text = [(7 * k * k + k) % 300 for k in range(500)]
    found = lm.score(text, window=150)
    assert len(found) == 500 - 4 and is_consistent(lm._session)
    lm._session.forget()
    assert abs(found[:149] - lm.score(text[:150])).max() < 1e-4


def test_embeddings_take_pages_and_give_them_back(lm: LLM) -> None:
    stream = lm.generate(list(range(90)), max_tokens=60, seed=1, temperature=2.0, stream=True)
    next(stream)
    before = lm._session.pool.free
    lm.embed([list(range(150))])
    assert is_consistent(lm._session) and lm._session.pool.free >= before
    for _ in stream:
        pass
    wanted = alone(lm, dict(prompt=list(range(90)), max_tokens=60, seed=1, temperature=2.0))
    assert [t.id for t in stream.answer.tokens] == wanted


@pytest.mark.parametrize("cache", [CONTEXT - 1, SEQUENCES * CONTEXT + 1, 0, -5])
def test_caches_of_other_sizes_are_refused(cache: int, tmp_path: Path) -> None:
    folder = save_folder(made("llama"), tmp_path / "model")
    with pytest.raises(lapilli.CompileError, match=f"cache is {cache}: choose 160 to 640 tokens, for 4 sequences"):
        LLM(folder, context=CONTEXT, sequences=SEQUENCES, cache=cache)


def test_a_compiled_file_has_its_cache(lm: LLM, tmp_path: Path) -> None:
    lm.save(tmp_path / "model.lap")
    with pytest.raises(lapilli.CompileError, match="sequences and cache are chosen when a model is compiled"):
        LLM(tmp_path / "model.lap", cache=400)
    with LLM(tmp_path / "model.lap") as again:
        assert again._session.size == lm._session.size
