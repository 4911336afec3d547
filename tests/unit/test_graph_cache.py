"""Which captured steps are kept, and when the others leave. A graph is anything here."""

import torch

from interleaf.engine.cuda import graphs
from interleaf.engine.cuda.graphs import GraphCache


class Refusing:
    """A capture for which there never is memory."""

    def __init__(self):
        self.times = 0

    def __call__(self):
        self.times += 1
        raise torch.OutOfMemoryError


def test_the_last_graph_leaves_only_when_there_is_another():
    """Graphs share memory that torch gives up with the last of them, and then captures no more into."""
    cache: GraphCache[str] = GraphCache(max_rows=4, max_graphs=1)
    seen = []
    for key in ("a", "b"):
        cache.keep((key,), lambda key=key: seen.append(len(cache)) or key)
    assert seen == [0, 1]
    assert (cache.find(("a",)), cache.find(("b",)), len(cache)) == (None, "b", 1)


def test_the_least_recently_used_leaves_first():
    cache: GraphCache[str] = GraphCache(max_rows=4, max_graphs=2)
    for key in ("a", "b"):
        cache.keep((key,), lambda key=key: key)
    cache.find(("a",))
    cache.keep(("c",), lambda: "c")
    assert [cache.find((key,)) for key in ("a", "b", "c")] == ["a", None, "c"]


def test_a_key_for_which_there_was_no_memory_is_tried_again_ever_more_rarely():
    cache: GraphCache[str] = GraphCache(max_rows=4, max_graphs=2)
    refuse = Refusing()
    assert cache.keep(("a",), refuse) is None
    assert cache.keep(("a",), refuse) is None
    assert refuse.times == 1
    assert (len(cache), cache.num_captures) == (0, 0)
    assert cache.keep(("b",), lambda: "b") == "b"
    for _ in range(300):
        cache.keep(("a",), refuse)
    assert refuse.times == 3  # after 64 meetings, and after 128 more
    found = [cache.keep(("a",), lambda: "a") for _ in range(300)]
    assert found[-1] == "a"


def test_what_was_met_once_and_never_again_is_forgotten(monkeypatch):
    monkeypatch.setattr(graphs, "_REMEMBERED", 3)
    cache: GraphCache[str] = GraphCache(max_rows=4, max_graphs=2)
    assert not cache.is_due(("often",))
    for i in range(20):
        assert not cache.is_due((i,))
        assert cache.is_due(("often",))
    assert not cache.is_due((0,))
    assert (len(cache._met), len(cache._refused)) == (3, 0)


def test_a_key_does_without_a_graph_until_that_has_cost_what_a_capture_does():
    cache: GraphCache[str] = GraphCache(max_rows=4, max_graphs=2)
    small = graphs._CAPTURE_S / 4
    assert [cache.does_without(("a",), small) for _ in range(6)] == [True] * 4 + [False] * 2
    assert cache.does_without(("b",), small), "each key has its own account"
    assert cache.does_without(("c",), graphs._CAPTURE_S * 0.99)
    assert not cache.does_without(("c",), graphs._CAPTURE_S * 0.99)
    assert not cache.does_without(("d",), graphs._CAPTURE_S * 1.01)
    assert all(cache.does_without(("e",), 0.0) for _ in range(1000)), "what costs nothing is never captured"
    assert ("a",) not in cache
    cache.keep(("a",), lambda: "a")
    assert ("a",) in cache


def test_accounts_of_keys_that_are_not_met_again_are_dropped(monkeypatch):
    monkeypatch.setattr(graphs, "_REMEMBERED", 3)
    cache: GraphCache[str] = GraphCache(max_rows=4, max_graphs=2)
    half = graphs._CAPTURE_S * 0.4
    assert cache.does_without(("often",), half)
    for i in range(20):
        assert cache.does_without((i,), half)
        assert cache.does_without(("often",), 0.0)
    assert len(cache._owed_s) == 3
    assert cache.does_without(("often",), half)
    assert not cache.does_without(("often",), half)


def test_a_key_for_which_there_is_no_memory_does_without_until_it_is_tried_again():
    cache: GraphCache[str] = GraphCache(max_rows=4, max_graphs=2)
    refuse = Refusing()
    small = graphs._CAPTURE_S / 4
    without = 0
    for _ in range(2000):
        if cache.does_without(("a",), small):
            without += 1
        elif cache.is_due(("a",)):
            cache.keep(("a",), refuse)
    assert without > 1980
    assert refuse.times == 6  # after 64 meetings, 128, 256, 512, 1,024


def test_a_key_that_was_captured_begins_a_new_account():
    cache: GraphCache[str] = GraphCache(max_rows=4, max_graphs=1)
    most = graphs._CAPTURE_S * 0.9
    assert cache.does_without(("a",), most)
    assert not cache.does_without(("a",), most)
    cache.keep(("a",), lambda: "a")
    cache.keep(("b",), lambda: "b")
    assert ("a",) not in cache
    assert cache.does_without(("a",), most)
