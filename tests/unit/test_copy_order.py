"""Copies beside steps on streams that advance at random: no step reads what is not there yet, and no copy overwrites
what a step still reads, however early adapters are handed over and however soon their pages are somebody else's.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from interleaf.adapters.copy import CopyDevice, StreamCopier
from interleaf.adapters.image import AdapterImage
from interleaf.core import AdapterLoad, AdapterUid, PooledLayout
from interleaf.errors import AdapterLoadFailed

ADAPTERS = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 5}
"""Pages of each."""
NUM_PAGES = 12
ROUNDS = 60


class Stream:
    """Work in its order; an entry returns whether it could be done."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], bool]] = deque()

    def put(self, work: Callable[[], object]) -> None:
        self.work.append(lambda: (work(), True)[1])

    def advance(self) -> bool:
        """Do the next entry. Returns: whether there was one that waits for nothing."""
        if not self.work or not self.work[0]():
            return False
        self.work.popleft()
        return True


class Point:
    """An event: what is recorded and waited for is on the current stream."""

    def __init__(self, device: TwoStreams) -> None:
        self.device = device
        self.has_passed = True  # as CUDA says of one that was never recorded

    def record(self) -> None:
        self.has_passed = False
        self.device.current.put(self._pass)

    def _pass(self) -> None:
        self.has_passed = True

    def query(self) -> bool:
        return self.has_passed

    def wait(self) -> None:
        self.device.current.work.append(lambda: self.has_passed)

    def synchronize(self) -> None:
        while not self.has_passed:
            assert any([self.device.copies.advance(), self.device.steps.advance()]), "the streams wait for each other"


class TwoStreams:
    """A device whose streams do nothing by themselves."""

    def __init__(self) -> None:
        self.steps, self.copies = Stream(), Stream()
        self.current = self.steps

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.current = self.copies
        yield
        self.current = self.steps

    def event(self) -> Point:
        return Point(self)


class Lanes:
    """Pages that remember who wrote them last."""

    def __init__(self, device: TwoStreams) -> None:
        self.device = device
        self.pages: list[object] = [None] * NUM_PAGES

    def __getitem__(self, where: slice) -> Lanes.Part:
        return Lanes.Part(self, where)

    class Part:
        def __init__(self, lanes: Lanes, where: slice) -> None:
            self.lanes, self.where = lanes, where

        def copy_(self, data: list[object], *, non_blocking: bool) -> None:
            if "torn" in data:
                raise RuntimeError("it was refused")
            for page, value in zip(range(self.where.start, self.where.stop), data, strict=True):
                self.lanes.device.current.put(lambda page=page, value=value: self.lanes.write(page, value))

    def write(self, page: int, value: object) -> None:
        self.pages[page] = value


class World:
    """What a scheduler does with a copier: random loads, evictions and polls, and steps that check what they read."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.device = TwoStreams()
        self.lanes = Lanes(self.device)
        self.data = self
        self.copier = StreamCopier(cast(Any, self), self.image, cast(CopyDevice, self.device))
        self.free = list(range(NUM_PAGES))
        self.loading: dict[str, tuple[int, ...]] = {}
        self.resident: dict[str, tuple[tuple[int, ...], list[object]]] = {}
        self.kv: dict[int, tuple[int, ...]] = {}
        self.is_torn, self.is_gone = set[str](), set[str]()
        self.version = self.num_read = self.num_early = 0
        self.contents: dict[str, list[object]] = {}

    def image(self, uid: AdapterUid) -> AdapterImage:
        if uid in self.is_gone:
            raise AdapterLoadFailed(uid, "it is gone")
        self.version += 1  # so that every load of an adapter has bytes of its own
        data: list[object] = [(uid, self.version, part) for part in range(ADAPTERS[uid])]
        if uid in self.is_torn:
            data[-1:] = ["torn"] * bool(data)
        self.contents[uid] = data
        return AdapterImage(PooledLayout((), (None,), len(data), 0), cast(Any, data))

    def round(self) -> None:
        for report in self.copier.poll(self.random.choice([0, 0, 1, 3, 7, 100])):
            pages = self.loading.pop(report.uid)
            was_bad = report.uid in self.is_torn | self.is_gone
            assert (report.error is not None) == (was_bad and bool(pages or report.uid in self.is_gone))
            self.is_torn.discard(report.uid)
            self.is_gone.discard(report.uid)
            if report.error is None and self.random.random() < 0.9:
                self.resident[report.uid] = pages, self.contents[report.uid]
                self.num_early += self.device.copies.work != deque()
            else:  # failed, or nobody waits for it any more
                self.free += pages
        for uid in [*self.resident]:
            if self.random.random() < 0.3:
                self.free += self.resident.pop(uid)[0]
        for tokens in [*self.kv]:
            if self.random.random() < 0.3:
                self.free += self.kv.pop(tokens)
        self.random.shuffle(self.free)
        for uid, count in ADAPTERS.items():
            if uid not in self.loading | self.resident and count <= len(self.free) and self.random.random() < 0.4:
                pages, self.free = tuple(self.free[:count]), self.free[count:]
                self.loading[uid] = pages
                bad = self.random.choice([None] * 8 + [self.is_torn, self.is_gone])
                if bad is not None:
                    bad.add(uid)
                self.copier.copy(AdapterLoad(AdapterUid(uid), pages))
        if self.free and self.random.random() < 0.5:
            self.version += 1
            self.kv[self.version] = (self.free.pop(),)
            self.write(self.version)
        for uid, (pages, contents) in self.resident.items():
            self.device.steps.put(lambda p=pages, c=contents, u=uid: self.read(u, p, c))
        for tokens, pages in self.kv.items():
            self.device.steps.put(lambda p=pages, t=tokens: self.read("kv", p, [t]))
        for _ in range(self.random.choice([0, 1, 5, 30])):
            self.random.choice([self.device.steps, self.device.copies]).advance()

    def write(self, tokens: int) -> None:
        (page,) = self.kv[tokens]
        self.device.steps.put(lambda: self.lanes.write(page, tokens))

    def read(self, who: str, pages: tuple[int, ...], contents: list[object]) -> None:
        self.num_read += 1
        assert [self.lanes.pages[page] for page in pages] == contents, f"{who} reads what is not its own"


@pytest.mark.parametrize("seed", range(20))
def test_no_step_reads_what_is_not_there_and_no_copy_overwrites_what_is_read(seed: int) -> None:
    world = World(seed)
    for _ in range(ROUNDS):
        world.round()
    world.copier.close()
    while world.device.steps.advance():
        pass
    assert world.copier.num_under_way == len(world.copier._failed)
    assert not world.device.steps.work
    assert world.num_read > 100
    assert world.num_early > 5


def test_a_loop_that_waits_for_copies_ends_when_all_have_been_reported_ahead_of_their_end() -> None:
    world = World(0)
    world.copier.copy(AdapterLoad(AdapterUid("d"), (0, 1, 2)))
    assert world.copier.poll(3) == [], "the steps launched before it are not over"
    assert world.device.steps.advance()
    assert len(world.copier.poll(3)) == 1
    assert world.copier.wait(), "a copy is under way though it was reported"
    assert world.copier.poll() == []
    assert not world.copier.wait(), "and the step loop may rest"
