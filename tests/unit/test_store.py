"""The host tier keeps its budget, drops what was used longest ago, and reads again what it dropped."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from interleaf.adapters.store import AdapterStore
from interleaf.core import HostState, ModelSpec, Module
from interleaf.errors import AdapterLoadFailed, AdapterRejected
from interleaf.memory.geometry import PageGeometry
from interleaf.parallel.shard import Shard
from tests.support.manual_executor import ManualExecutor
from tests.support.peft_folders import CONFIG, MODEL, NUM_LAYERS, Draft, make_tensors

SPEC = ModelSpec(**MODEL)
GEOMETRY = PageGeometry(page_tokens=4, num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=16, itemsize_bytes=4)
IMAGE_BYTES = 3 * GEOMETRY.page_bytes
"""Of an adapter of rank 3 on q and v: 3 * (64 + 64 + 64 + 32) = 672 elements a layer, in lanes of 256."""


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def executor():
    return ManualExecutor()


@pytest.fixture
def make(executor, clock):
    def make(images: float, fetch=executor, dtype=torch.float32):
        budget = int(images * IMAGE_BYTES)
        return AdapterStore(SPEC, Shard(SPEC), GEOMETRY, dtype, budget, fetch, now=clock)

    return make


def dummy(seed):
    return f"dummy:r=3,targets=q+v,seed={seed}"


def folder(path, seed=0):
    ranks = {(l, m): 3 for l in range(NUM_LAYERS) for m in ("q_proj", "v_proj")}
    draft = Draft(tensors=make_tensors(ranks, seed))
    draft.config["r"] = 3
    return str(draft.write(path))


def in_memory(store, uids):
    """Which of them have an image, without asking `prepare`, which would change the order."""
    found = []
    for uid in uids:
        try:
            store.image(uid)
        except AdapterLoadFailed:
            continue
        found.append(uid)
    return found


def test_an_added_adapter_is_ready_and_described(make, tmp_path):
    store = make(4)
    uid = store.add(folder(tmp_path))
    assert uid in store
    assert store.prepare(uid) is HostState.READY
    assert store.image(uid).layout == store.layout(uid)
    assert store.image(uid).data.nbytes == IMAGE_BYTES == store.used_bytes
    assert store.describe(uid).targets == (Module.Q, Module.V)
    assert store.describe(uid).source == str(tmp_path)


def test_the_same_contents_are_one_adapter_wherever_they_lie(make, tmp_path):
    store = make(4)
    first = store.add(folder(tmp_path / "a"))
    assert store.add(folder(tmp_path / "b")) == first
    assert len(store) == 1
    assert store.used_bytes == IMAGE_BYTES


def test_a_refused_adapter_changes_nothing(make, tmp_path):
    store = make(4)
    store.add(dummy(1))
    (tmp_path / CONFIG).write_text("{}")
    for source in (str(tmp_path), "dummy:r=0"):
        with pytest.raises(AdapterRejected):
            store.add(source)
    assert (len(store), store.num_in_memory, store.used_bytes) == (1, 1, IMAGE_BYTES)


def test_an_adapter_that_overflows_the_pools_dtype_is_refused(make, tmp_path):
    draft = Draft()
    draft.tensors = {name: tensor * 1e6 for name, tensor in draft.tensors.items()}
    store = make(4, dtype=torch.float16)
    with pytest.raises(AdapterRejected, match="65504"):
        store.add(str(draft.write(tmp_path)))
    assert len(store) == 0


def test_beyond_the_budget_the_least_recently_used_leaves(make):
    store = make(3)
    a, b, c = (store.add(dummy(seed)) for seed in range(3))
    store.prepare(a)
    store.prepare(c)
    d = store.add(dummy(3))
    e = store.add(dummy(4))
    assert in_memory(store, (a, b, c, d, e)) == [c, d, e]
    assert store.used_bytes == 3 * IMAGE_BYTES


def test_asking_for_an_image_counts_as_using_it(make):
    store = make(3)
    a, b, c = (store.add(dummy(seed)) for seed in range(3))
    store.prepare(a)
    store.pin(a)
    store.unpin(a)
    d = store.add(dummy(3))
    assert in_memory(store, (a, b, c, d)) == [a, c, d]


def test_what_has_left_is_fetched_again_bit_by_bit(make, executor, tmp_path):
    store = make(1)
    uid = store.add(folder(tmp_path))
    before = store.image(uid).data.clone()
    store.add(dummy(1))
    assert store.prepare(uid) is HostState.FETCHING
    assert store.prepare(uid) is HostState.FETCHING
    assert len(executor.waiting) == 1
    executor.run_all()
    assert store.prepare(uid) is HostState.READY
    assert torch.equal(store.image(uid).data, before)


def test_without_an_executor_prepare_itself_fetches(make):
    store = make(1, fetch=None)
    a, b = store.add(dummy(1)), store.add(dummy(2))
    assert store.prepare(a) is HostState.READY
    assert in_memory(store, (a, b)) == [a]


def test_a_pinned_image_stays(make, executor):
    store = make(1)
    a = store.add(dummy(1))
    store.prepare(a)
    store.pin(a)
    b = store.add(dummy(2))
    assert in_memory(store, (a, b)) == [a]
    store.unpin(a)
    assert in_memory(store, (a, b)) == [a]
    c = store.add(dummy(3))
    assert in_memory(store, (a, b, c)) == [c]


def test_pins_are_counted(make):
    store = make(1)
    a = store.add(dummy(1))
    store.pin(a)
    store.pin(a)
    store.unpin(a)
    store.add(dummy(2))
    assert in_memory(store, (a,)) == [a]


def test_nothing_comes_between_ready_and_its_pin(make):
    store = make(1)
    a = store.add(dummy(1))
    assert store.prepare(a) is HostState.READY
    store.add(dummy(2))  # another thread's
    store.pin(a)
    assert store.image(a)


def test_ready_without_a_pin_is_over_at_the_next_question(make, executor):
    store = make(1)
    a = store.add(dummy(1))
    store.prepare(a)
    b = store.add(dummy(2))
    assert store.prepare(b) is HostState.FETCHING
    executor.run_all()
    assert in_memory(store, (a, b)) == [b]


def test_an_adapter_larger_than_the_budget_is_held_only_while_it_is_wanted(make, executor):
    store = make(0.1)
    a, b = store.add(dummy(1)), store.add(dummy(2))
    assert store.used_bytes == 0
    for uid in (a, b, a):
        assert store.prepare(uid) is HostState.FETCHING
        executor.run_all()
        assert store.prepare(uid) is HostState.READY
        store.pin(uid)
        assert store.used_bytes == IMAGE_BYTES
        store.unpin(uid)
        assert store.used_bytes == 0


def test_fetches_wait_for_room_beside_what_must_stay(make, executor):
    store = make(2)
    a, b, c, d = (store.add(dummy(seed)) for seed in range(4))
    for uid in (c, d):
        store.prepare(uid)
        store.pin(uid)
    assert store.prepare(a) is HostState.FETCHING
    assert not executor.waiting
    store.unpin(c)
    assert [store.prepare(uid) for uid in (a, b)] == [HostState.FETCHING] * 2
    assert len(executor.waiting) == 1
    executor.run_all()
    assert in_memory(store, (a, b, c, d)) == [a, d]
    assert store.used_bytes == 2 * IMAGE_BYTES


def test_an_image_that_has_arrived_waits_for_whoever_sent_for_it(make, executor, clock):
    store = make(1)
    a, b = store.add(dummy(1)), store.add(dummy(2))
    store.prepare(a)
    executor.run_all()
    assert store.prepare(b) is HostState.FETCHING
    assert not executor.waiting
    store.add(dummy(3))
    assert in_memory(store, (a,)) == [a]
    # Nobody asked again: its request was aborted.
    clock.now_s = 11.0
    store.prepare(b)
    executor.run_all()
    assert in_memory(store, (a, b)) == [b]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (shutil.rmtree, "No such file"),
        (lambda path: folder(path, seed=1), "has changed since it was registered"),
        (lambda path: (path / CONFIG).write_text("{"), "not valid JSON"),
    ],
    ids=["vanished", "changed", "damaged"],
)
def test_a_failed_fetch_says_why_and_the_next_attempt_may_succeed(make, executor, tmp_path, spoil, reason):
    store, path = make(1), tmp_path / "adapter"
    uid = store.add(folder(path))
    store.add(dummy(1))
    spoil(path)
    assert store.prepare(uid) is HostState.FETCHING
    executor.run_all()
    assert store.prepare(uid) is HostState.FAILED
    assert reason in store.failure(uid)
    folder(path)
    assert store.prepare(uid) is HostState.FETCHING
    assert store.failure(uid) == ""
    executor.run_all()
    assert store.prepare(uid) is HostState.READY


def test_an_adapter_added_again_after_a_failure_is_ready(make, executor, tmp_path):
    store = make(1)
    uid = store.add(folder(tmp_path / "a"))
    store.add(dummy(1))
    shutil.rmtree(tmp_path / "a")
    store.prepare(uid)
    executor.run_all()
    assert store.add(folder(tmp_path / "b")) == uid
    assert store.prepare(uid) is HostState.READY
    # From now on it is read from where it was last seen.
    store.pin(uid)
    store.unpin(uid)
    store.add(dummy(2))
    assert store.prepare(uid) is HostState.FETCHING
    executor.run_all()
    assert store.prepare(uid) is HostState.READY


def test_an_unforeseen_error_in_a_fetch_is_a_failure_too(make, executor, monkeypatch):
    store = make(1)
    uid = store.add(dummy(1))
    store.add(dummy(2))

    def broken(source, spec):
        raise MemoryError("out of memory")

    monkeypatch.setattr("interleaf.adapters.store.open_adapter", broken)
    store.prepare(uid)
    executor.run_all()
    assert store.prepare(uid) is HostState.FAILED
    assert "MemoryError: out of memory" in store.failure(uid)


def test_an_executor_that_was_shut_down_is_a_failure(make):
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    store = make(1, fetch=pool)
    uid = store.add(dummy(1))
    store.add(dummy(2))
    assert store.prepare(uid) is HostState.FAILED
    assert "shutdown" in store.failure(uid)


def test_a_removed_adapter_takes_its_memory_with_it(make):
    store = make(4)
    uid = store.add(dummy(1))
    store.remove(uid)
    store.remove(uid)
    assert uid not in store
    assert (len(store), store.used_bytes) == (0, 0)
    with pytest.raises(AdapterLoadFailed, match="not registered"):
        store.prepare(uid)


def test_a_pinned_adapter_is_removed_with_its_last_pin(make):
    store = make(4)
    uid = store.add(dummy(1))
    store.pin(uid)
    store.remove(uid)
    assert uid not in store
    assert store.image(uid)
    store.unpin(uid)
    assert (len(store), store.used_bytes) == (0, 0)


def test_an_adapter_added_again_while_its_removal_waits_for_a_pin_stays(make):
    store = make(4)
    uid = store.add(dummy(1))
    store.pin(uid)
    store.remove(uid)
    store.add(dummy(1))
    store.unpin(uid)
    assert uid in store
    assert store.image(uid)


def test_what_arrives_after_removal_or_close_is_dropped(make, executor):
    store = make(1)
    a, b = store.add(dummy(1)), store.add(dummy(2))
    store.prepare(a)
    store.remove(a)
    executor.run_all()
    assert store.num_in_memory == 1
    store.prepare(store.add(dummy(1)))
    store.prepare(b)
    store.close()
    executor.run_all()
    assert (store.num_in_memory, store.used_bytes) == (0, 0)


def test_many_threads_leave_the_books_balanced(make):
    with ThreadPoolExecutor(2) as pool:
        store = make(3, fetch=pool)
        uids = [store.add(dummy(seed)) for seed in range(6)]
        errors = []

        def add_and_remove():
            try:
                for seed in range(6, 40):
                    store.remove(store.add(dummy(seed)))
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=add_and_remove)
        thread.start()
        served, images = 0, {}
        while served < 60:
            uid = uids[served % 6]
            if store.prepare(uid) is HostState.READY:
                store.pin(uid)
                data = store.image(uid).data
                assert torch.equal(images.setdefault(uid, data.clone()), data)
                store.unpin(uid)
                served += 1
        thread.join()
    assert errors == []
    assert store.used_bytes == store.num_in_memory * IMAGE_BYTES <= 3 * IMAGE_BYTES


def test_the_summary_can_be_printed_as_json(make):
    store = make(1)
    summary = store.describe(store.add(dummy(1)))
    assert json.loads(json.dumps(summary.targets)) == ["q_proj", "v_proj"]


def test_adapters_that_come_and_go_leave_nothing_behind(make):
    store = make(10)
    for seed in range(30):
        uid = store.add(dummy(seed))
        assert store.prepare(uid) is HostState.READY
        store.pin(uid)
        store.unpin(uid)
        store.remove(uid)
    left = {name: value for name, value in vars(store).items() if isinstance(value, dict) and value}
    assert not left
    assert (len(store), store._used_bytes, store._coming_bytes) == (0, 0, 0)
