"""The program of a language model, and which tokens its cache holds: several sequences are written in one step.

A sequence has a slot while its answer is written: a line of the program's states, and pages of the cache, one more whenever its
last one is full. Those who begin alike have the same pages, and a page is written only by the one that has it alone. Prompts are
read a part at a time between steps. When all slots are taken, an answer takes that of the one that was not read for the longest
time, which reads its tokens again when its turn comes. Where pages run out, what ended answers left goes first, and then the
youngest answers wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidFileError, InvalidInputError
from lapilli.llm.about import KNOWN, LONGEST, SCORED, About, step_name, step_sizes
from lapilli.llm.answer_options import AnswerOptions
from lapilli.llm.beams import BeamSearch
from lapilli.llm.cache_size import CacheUse
from lapilli.llm.page_pool import PagePool
from lapilli.llm.turn import Allowed, Given, Slot, Turn, Written
from lapilli.runtime.futures import Future
from lapilli.runtime.program import Program

_AHEAD, _AHEAD_ON_HOST = 2, 1
"""Steps that the device has to do while the host reads a token. What is queued at the end of an answer is done in vain."""
_WORTH_SHARING = 16
"""Tokens that two prompts begin with alike, from which on they have them in the same pages."""
_PAUSE = 0.1
"""Seconds after which a thread that waits for pages sees whether its answer was abandoned."""


class _Run:
    """What is in flight: the answers whose tokens it gives, with their tickets."""

    def __init__(self, future: Future, rows: Sequence[tuple[int, Turn, Future | None]]) -> None:
        self.future = future
        self.rows = [(row, turn, turn.ticket, likely) for row, turn, likely in rows]


class Session:
    """Writes the tokens of turns. seats: as many as there are slots, for those who want to keep one. read: how many tokens of
    prompts were computed; those found in the cache were not.
    """

    def __init__(self, program: Program, about: About) -> None:
        self.program, self.about, self.size = program, about, about.cache
        self.lock = threading.RLock()
        self.pool = PagePool(self.size.pages)
        self.slots = [Slot(k) for k in range(about.sequences)]
        self.seats = threading.Semaphore(about.sequences)
        self.ahead = _AHEAD_ON_HOST if program.device.type == "cpu" else _AHEAD
        self.read = 0
        self.steps: list[int] = []  # rows of the last ones; for tests
        self._sizes = step_sizes(about.sequences)
        self._runs: deque[_Run] = deque()
        self._clock = self._ages = self._waits = 0
        self._room = threading.Condition(self.lock)  # some pages may be free now

    def next(self, turn: Turn, wait: bool = True) -> Written | None:
        """The next token of a turn; None if it is abandoned meanwhile, or, unless it is to wait, if older ones need all pages.
        There must be one: less than `last` so far, and none that ends it. Raises InvalidInputError if none is allowed.
        """
        with self.lock:
            while not turn.unread:
                if turn.over:
                    return None
                if turn.error is not None:
                    raise turn.error
                self.enter(turn)
                self._fill()
                if turn.error is None and self._runs:
                    self._take()
                elif turn.slot is None and turn.error is None:
                    if not wait:
                        return None
                    self._room.wait(_PAUSE)
            if turn.slot is not None:
                self._clock += 1
                turn.slot.used = self._clock
            return turn.unread.popleft()

    def enter(self, turn: Turn) -> None:
        """Gives a turn a slot, if it has none and need not wait for pages."""
        with self.lock:
            if turn.slot is None and not self._must_wait(turn):
                self._enter(turn)

    def leave(self, turn: Turn) -> None:
        """Gives a turn's slot back; what its cache holds can be used by the next one."""
        with self.lock:
            turn.over = True
            self._leave(turn)

    def forget(self) -> None:
        """Whatever the cache holds."""
        with self.lock:
            for slot in self.slots:
                if slot.turn is not None:
                    self._leave(slot.turn)
                self._drop(slot)
                slot.given = None
            self._runs.clear()

    def embedding(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Of a text, [width]: of its last token, or the mean of all, of length 1."""
        rows = self._embedded(list(tokens) * 2 if len(tokens) == 1 else tokens)[: len(tokens)]
        whole: NDArray[np.float32] = rows[-1] if self.about.pooling == "last" else rows.mean(0, dtype=np.float32)
        return whole / max(float(np.linalg.norm(whole)), 1e-12)

    def scores(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The logarithm of the probability of each of two or more tokens but the first, after those before it."""
        rows, following = self._embedded(tokens), np.array([*tokens[1:], 0])
        with self.lock:
            runs = [self._submit("score", rows[a:b], following[a:b]) for a, b in _parts(len(tokens), SCORED)]
            return np.concatenate([run.result() for run in runs])[:-1]

    def _embedded(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """What the head would read of each of two or more tokens, [tokens, width]."""
        with self.lock:
            self._free()
            slot = self._least_useful()
            self._drop(slot)
            self._reserve(slot, None, 0, len(tokens))
            place, runs = np.array([slot.line]), []
            for a, b in _parts(len(tokens), LONGEST):
                runs.append(self._submit("embed", np.array([tokens[a:b]]), place, np.array([a])))
            found = np.concatenate([run.result() for run in runs])
            self._drop(slot)
        return found

    def search(
        self, begin: Sequence[int], given: Given, search: BeamSearch, allowed: Allowed = None, timed: bool = False
    ) -> None:
        """Runs a search to its end; arguments as for `Turn`, begin: its prompt. Answers of others wait meanwhile, and those whose
        slots it takes read their tokens again.
        """
        with self.lock:
            try:
                self._search(begin, given, search, allowed, timed)
            except BaseException:
                self.forget()  # who knows what the device holds
                raise

    def _search(self, begin: Sequence[int], given: Given, search: BeamSearch, allowed: Allowed, timed: bool) -> None:
        slots = self.slots[: search.beams.count]
        for slot in slots:
            if slot.turn is not None:
                self._leave(slot.turn)
            self._drop(slot)
            self._give(slot, given)
            self._mark(slot, timed, allowed is not None)
        for place, token in enumerate(begin[:-1]):
            self._beams_step([(0, token)], place)
        held, last, place = [0], [begin[-1]], len(begin) - 1  # slots of the beams, and their last tokens
        while search.running:
            self._beams_step(list(zip(held, last, strict=True)), place)
            runs = []
            for k, beam in zip(held, search.running, strict=True):
                if allowed is not None:
                    self._submit("allow", np.array([slots[k].line]), allowed(beam.tokens))
                runs.append(self._listed(slots[k].line, "ranked"))
            search.take([run.result() for run in runs])
            place += 1
            parents = [held[beam.parent] for beam in search.running]
            free = [k for k in range(len(slots)) if k not in parents]
            held = []
            for k in parents:
                if k in held:
                    self._share(slots[k], slots[free[0]], place)
                    k = free.pop(0)
                held.append(k)
            last = [beam.tokens[-1] for beam in search.running]
        for slot in slots:
            self._drop(slot)

    def _beams_step(self, rows: Sequence[tuple[int, int]], place: int) -> None:
        """A step of slots with these tokens, all at one place."""
        size = self._size(len(rows))
        numbers, limits = self._idle(size)
        for at, (k, token) in enumerate(rows):
            self._reserve(self.slots[k], None, place, place + 1)
            numbers[at] = token, place, self.slots[k].line, 0, 0, 0
            limits[at] = AnswerOptions().drawn()[1]
        self._submit(step_name(size), numbers, limits)

    def alignment(self, given: Given, tokens: Sequence[int]) -> NDArray[np.float32]:
        """What the method `align` gives of tokens, two or more, after what the encoder reads: [heads, tokens, places]."""
        with self.lock:
            self._free()
            same = (s for s in self.slots if s.turn is None and s.given is given)
            slot = next(same, None) or self._least_useful()
            self._drop(slot)
            self._give(slot, given)
            self._reserve(slot, None, 0, len(tokens))
            run = self._submit("align", np.array([tokens]), np.array([slot.line]))
            found: NDArray[np.float32] = run.result()
            self._drop(slot)
            return found

    def use(self) -> CacheUse:
        """What of the cache is taken."""
        page, pages = self.size.page, self.size.pages
        return CacheUse(pages * page, (pages - self.pool.free) * page, self._waits)

    def check(self) -> None:
        """Runs a method that changes no state. Raises DeviceLostError if the device is lost."""
        self._listed(0).result()

    # -- slots

    def _leave(self, turn: Turn) -> None:
        slot = turn.slot
        if slot is not None:
            slot.cached = turn.tokens[: turn.read]
            slot.turn = turn.slot = turn.ticket = None
            turn.read = 0
            self._cut(slot, len(slot.cached))
            self._room.notify_all()

    def _enter(self, turn: Turn) -> None:
        """Finds a slot for a turn, and what of its tokens the cache has."""
        self._free()
        wanted = turn.tokens[:-1]  # the last one is read for its logits

        def common(slot: Slot) -> int:
            return _common(slot.known, wanted) if slot.given is turn.given else 0

        best = max(self.slots, key=lambda s: (common(s), s.turn is None))
        known = common(best)
        if best.turn is None and 2 * known >= len(best.cached):
            slot = best
        else:
            slot = self._least_useful()
            if slot is not best and known >= _WORTH_SHARING:
                self._share(best, slot, known)
            else:
                known = common(slot)
        self._cut(slot, known)
        self._give(slot, turn.given)
        slot.cached, slot.turn = [], turn
        turn.slot, turn.ticket, turn.read = slot, object(), known
        if not turn.age:
            self._ages += 1
            turn.age = self._ages
        if turn.options.repetition_penalty != 1:
            seen = np.zeros(self.about.words, np.int32)
            seen[turn.tokens] = 1
            self._submit("remember", np.array([slot.line]), seen)
        self._mark(slot, turn.timed, turn.allowed is not None)

    def _mark(self, slot: Slot, timed: bool, bound: bool) -> None:
        """Tells the device what the answer is that a line is for now. bound: whether it says itself which tokens are allowed."""
        if slot.bound and not bound:
            self._submit("allow", np.array([slot.line]), np.full(-(-self.about.words // 32), -1, np.int32))
        slot.bound = bound
        if slot.timed != timed:
            self._submit("time", np.array([slot.line]), np.array([int(timed)]))
            slot.timed = timed

    def _give(self, slot: Slot, given: Given) -> None:
        """Sees to it that the encoder has read something for a slot."""
        if given is None or slot.given is given:
            return
        same = next((s for s in self.slots if s.given is given), None)
        if same is None:
            self._submit("encode", *given, np.array([slot.line]))
        else:
            self._submit("carry", np.array([same.line]), np.array([slot.line]))
        slot.given = given

    def _free(self) -> None:
        """Sees to it that some slot has no turn."""
        for slot in self.slots:
            if slot.turn is not None and slot.turn.over:
                self._leave(slot.turn)
        if all(slot.turn is not None for slot in self.slots):
            found = min(self.slots, key=lambda s: s.used).turn
            assert found is not None
            self._leave(found)

    def _least_useful(self) -> Slot:
        return min((s for s in self.slots if s.turn is None), key=lambda s: (len(s.cached) > 0, s.used))

    # -- pages

    def _drop(self, slot: Slot) -> None:
        """Forgets the tokens of a slot that has no turn."""
        slot.cached = []
        self._cut(slot, 0)

    def _cut(self, slot: Slot, tokens: int) -> None:
        """Gives back the pages behind so many tokens."""
        count = self.size.count(tokens)
        self.pool.release(slot.pages[count:])
        del slot.pages[count:]

    def _share(self, source: Slot, target: Slot, tokens: int) -> None:
        """Lets a slot begin with so many tokens of another one."""
        pages = self.pool.share(source.pages[: self.size.count(tokens)])
        self._drop(target)
        target.pages = pages
        self._lay(target)

    def _lay(self, slot: Slot) -> None:
        """Tells the device which pages a slot has."""
        if self.size.is_paged:
            rest = [self.size.pages] * (self.size.most - len(slot.pages))  # the spare one, which nobody reads
            self._submit("lay", np.array([slot.line]), np.array(slot.pages + rest))

    def _reserve(self, slot: Slot, turn: Turn | None, start: int, end: int) -> bool:
        """Sees to it that tokens from start to end - 1 can be written: whether there are pages for them. turn: as for `_page`."""
        before, enough = list(slot.pages), True
        for k in range(start // self.size.page, self.size.count(end)):
            there = k < len(slot.pages)
            if there and not self.pool.is_shared(slot.pages[k]):
                continue
            page = self._page(turn)
            if page is None and there and not self.pool.is_shared(slot.pages[k]):
                continue  # who had it, too, gave it back
            if page is None:
                enough = False
                break
            if there:
                self._submit("copy", np.array([slot.pages[k]]), np.array([page]))
                self.pool.release([slot.pages[k]])
                slot.pages[k] = page
            else:
                slot.pages.append(page)
        if slot.pages != before:
            self._lay(slot)
        return enough

    def _page(self, turn: Turn | None) -> int | None:
        """A page for a turn; None if all are those of older ones. turn: None, if others have no say."""
        while True:
            page = self.pool.take()
            if page is not None:
                return page
            left = [s for s in self.slots if s.turn is None and s.cached]
            if left:
                self._drop(min(left, key=lambda s: s.used))
                continue
            found = self._next_to_wait(turn)
            if found is None:
                return None
            self._park(found)

    def _next_to_wait(self, turn: Turn | None) -> Turn | None:
        """Whose pages another turn may take: of one that nobody may be reading, or of the youngest."""
        others = [(s.used, s.turn) for s in self.slots if s.turn is not None and s.turn is not turn]
        loose = [(used, other) for used, other in others if turn is None or other.over or not other.steady]
        if loose:
            return min(loose, key=lambda x: x[0])[1]
        younger = [other for _, other in others if turn is not None and turn.steady and other.age > turn.age]
        return max(younger, key=lambda other: other.age, default=None)

    def _park(self, turn: Turn) -> None:
        """Takes a turn its slot, until there are pages."""
        self._leave(turn)
        turn.parked = True
        self._waits += 1

    def _must_wait(self, turn: Turn) -> bool:
        """Whether a turn that was without pages would be so again before long: all others get another page, too."""
        others = [s for s in self.slots if s.turn is not None and s.turn is not turn]
        if not turn.parked or not others or self._next_to_wait(turn) is not None:
            return False
        held = {page for s in others for page in s.pages}
        return self.size.pages - len(held) < self.size.count(len(turn.tokens)) + 1 + len(others)

    def _size(self, rows: int) -> int:
        return next(n for n in self._sizes if n >= rows)

    # -- runs

    def _submit(self, method: str, *args: Any) -> Future:
        return self.program.methods[method].submit(*args)

    def _fill(self) -> None:
        """Gives the device something to do: parts of prompts and steps in turn."""
        while len(self._runs) <= self.ahead:
            turns = [slot.turn for slot in self.slots if slot.turn is not None and not slot.turn.over]
            reading = [turn for turn in turns if turn.in_prompt and turn.error is None]
            if reading:
                self._part(max(reading, key=lambda t: t.read > 0))
            if self._runs and _wait_for_others(turns):
                break
            wants = self._with_pages(turn for turn in turns if turn.wants_step)
            wants = [turn for turn in wants if self._allow(turn)]
            if wants:
                self._step(wants)
            elif not reading:
                break

    def _with_pages(self, turns: Iterable[Turn]) -> list[Turn]:
        """Those that have pages for one token more; others wait for them, the youngest first."""
        found = []
        for turn in sorted(turns, key=lambda turn: turn.age):
            if turn.slot is None:
                continue  # it gave its pages to an older one
            if self._reserve(turn.slot, turn, turn.read, turn.read + 1):
                found.append(turn)
            else:
                self._park(turn)
        return [turn for turn in found if turn.slot is not None]

    def _part(self, turn: Turn) -> None:
        """Reads a part of a prompt; the last one gives a token."""
        slot = turn.slot
        assert slot is not None
        part = turn.tokens[turn.read : turn.read + LONGEST]
        last = turn.read + len(part) == len(turn.tokens)
        if last and not self._allow(turn):
            return
        if not self._reserve(slot, turn, turn.read, turn.read + len(part)):
            self._park(turn)
            return
        self.read += len(part)
        numbers, limits = self._row(turn, slot, turn.read, len(turn.tokens))
        run = self._submit("prompt", np.array([part]), np.array([slot.line]), numbers[None], limits[None])
        turn.read += len(part)
        self._runs.append(_Run(run, [(0, turn, self._likely(turn, slot))] if last else []))

    def _step(self, turns: Sequence[Turn]) -> None:
        """A token for each of these turns."""
        size = self._size(len(turns))
        self.steps = [*self.steps[-99:], size]
        numbers, limits = self._idle(size)
        rows = [(turn, turn.slot) for turn in turns if turn.slot is not None]
        for k, (turn, slot) in enumerate(rows):
            numbers[k], limits[k] = self._row(turn, slot, turn.read, turn.read + 1)
        run = self._submit(step_name(size), numbers, limits)
        for turn, _ in rows:
            turn.read += 1
        self._runs.append(_Run(run, [(k, turn, self._likely(turn, slot)) for k, (turn, slot) in enumerate(rows)]))

    def _idle(self, size: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Rows that are computed in vain."""
        numbers, limits = np.zeros((size, 6), np.int32), np.ones((size, 4), np.float32)
        numbers[:, 2] = self.size.sequences
        return numbers, limits

    def _row(self, turn: Turn, slot: Slot, place: int, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The row of a turn for a run that begins at a place and writes the token number `count`."""
        token = turn.tokens[place] if place < len(turn.tokens) else KNOWN
        top_k, limits = turn.drawn
        return np.array([token, place, slot.line, top_k, count - turn.first, turn.seed], np.int32), limits

    def _allow(self, turn: Turn) -> bool:
        """Tells the device which tokens a turn may write next; whether there are some."""
        slot = turn.slot
        if turn.allowed is None or slot is None:
            return True
        try:
            bits = turn.allowed(turn.tokens[turn.first :])
        except InvalidInputError as error:
            turn.error = error
            return False
        self._submit("allow", np.array([slot.line]), bits)
        return True

    def _likely(self, turn: Turn, slot: Slot) -> Future | None:
        if not turn.options.logprobs:
            return None
        return self._listed(slot.line)

    def _listed(self, line: int, method: str = "likely") -> Future:
        """The likeliest tokens of a line."""
        most, _ = self.program.methods[method].inputs
        return self._submit(method, np.zeros(most.least_shape(), np.float32), np.array([line]))

    def _take(self) -> None:
        """Waits for the oldest run, and gives its tokens to its turns."""
        run = self._runs.popleft()
        try:
            tokens, logprobs = run.future.result()
            listed = [None if likely is None else likely.result() for *_, likely in run.rows]
        except BaseException:
            self.forget()  # who knows what the device holds
            raise
        for (row, turn, ticket, _), likely in zip(run.rows, listed, strict=True):
            if turn.ticket is not ticket or turn.ended:
                continue  # it left; or this was done in vain
            token = int(tokens[row])
            if not 0 <= token < self.about.words:
                self.forget()
                raise InvalidFileError(f"The model wrote token {token}, and there are {self.about.words}.")
            turn.tokens.append(token)
            found = [] if likely is None else list(zip(*(x.tolist() for x in likely), strict=True))
            turn.unread.append((token, float(logprobs[row]), found[: turn.options.logprobs]))


def _parts(count: int, most: int) -> list[tuple[int, int]]:
    """Where the parts of two or more begin and end: at most so many, and at least two, which methods take."""
    cuts = [*range(0, count, most), count]
    if cuts[-1] - cuts[-2] == 1:
        cuts[-2] -= 1
    return list(pairwise(cuts))


def _wait_for_others(turns: Sequence[Turn]) -> bool:
    """Whether all that want a step ask the host after each token, as others do whose token is in flight: one step for all later,
    instead of two in turn.
    """
    wants = [turn for turn in turns if turn.wants_step]
    flying = [turn for turn in turns if turn.allowed is not None and turn.read >= len(turn.tokens)]
    return bool(wants and flying) and all(turn.allowed is not None for turn in wants)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
