"""What /metrics and the log say after requests whose numbers a test knows."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from interleaf.core import Event, RequestWaiting, SamplingParams
from interleaf.scheduler.sequence import WaitReason
from interleaf.server.histogram import Histogram
from interleaf.server.label_table import LabelTable
from interleaf.server.labels import AdapterCounts, AdapterLabels, add_up
from interleaf.server.last_stats import LastStats
from interleaf.server.logs import ConsoleFormatter, JsonFormatter, configure_logging, log_fields
from interleaf.server.metrics import Metrics
from interleaf.server.observed import ObservedEngine
from interleaf.server.totals import Totals
from interleaf.stats import EngineStats
from tests.support.asynchronous import asynchronous
from tests.support.null_engine import LOADED
from tests.support.served import STATS, FakeEngine, serving, tiny_engine
from tests.support.tiny_models import make_model, save_model

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(page: str) -> Samples:
    """Every sample by (name, labels); `model_name` must be on all of them."""
    found: Samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "base"
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"interleaf:{name}", frozenset(labels.items())]


def scrape(url: str) -> Samples:
    answer = httpx.get(url + "/metrics", timeout=60)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples_of(answer.text)


def complete(url: str, **fields: object) -> httpx.Response:
    return httpx.post(url + "/v1/completions", json={"model": "base", "prompt": [1, 2, 3], **fields}, timeout=60)


def test_requests_are_counted_by_end_tokens_and_adapter() -> None:
    with serving(lambda: FakeEngine(("a", "b"))) as (url, engine):
        for _ in range(3):
            assert complete(url, model="a", max_tokens=5).status_code == 200
        assert complete(url, model="b", max_tokens=2, n=2).status_code == 200
        assert complete(url, max_tokens=4).status_code == 200
        assert complete(url, max_tokens=-4).status_code == 400
        assert complete(url, model="nobody").status_code == 404
        samples = scrape(url)
        assert value(samples, "request_success_total", finished_reason="length") == 3 + 2 + 1
        assert value(samples, "request_success_total", finished_reason="abort") == 0
        assert value(samples, "prompt_tokens_total") == 5 * 3
        assert value(samples, "generation_tokens_total") == 3 * 5 + 2 * 2 + 4
        assert value(samples, "time_to_first_token_seconds_count") == 5
        assert value(samples, "e2e_request_latency_seconds_count") == 5
        # A sequence of k tokens has k - 1 times between two.
        assert value(samples, "inter_token_latency_seconds_count") == 3 * 4 + 2 * 1 + 3
        assert value(samples, "time_to_first_token_seconds_sum") <= value(samples, "e2e_request_latency_seconds_sum")
        assert value(samples, "adapter_requests_total", adapter="a") == 3
        assert value(samples, "adapter_generation_tokens_total", adapter="a") == 15
        assert value(samples, "adapter_generation_tokens_total", adapter="b") == 4
        assert value(samples, "adapter_prompt_tokens_total", adapter="b") == 3
        assert value(samples, "http_responses_total", status="200") == 5
        # The fake engine: the first of an adapter waits 0.75 s, of which 0.25 for the load; all others 0.5 s.
        assert value(samples, "request_queue_time_seconds_count") == 5
        assert value(samples, "request_queue_time_seconds_sum") == 2 * 0.75 + 3 * 0.5
        assert value(samples, "adapter_queue_time_seconds_count", adapter="a") == 3
        assert value(samples, "adapter_queue_time_seconds_sum", adapter="a") == 0.75 + 2 * 0.5
        assert value(samples, "adapter_queue_time_seconds_count", adapter="b") == 2, "sequences"
        for name, labels, seconds in (("request", {}, 6 * 0.5), ("adapter", {"adapter": "a"}, 3 * 0.5)):
            waited = f"{name}_queue_time_by_reason_seconds_total"
            assert value(samples, waited, reason="seats", **labels) == seconds, "sequences"
            loads = 1 if labels else 2 + 1
            assert value(samples, waited, reason="adapter is copied to the pool", **labels) == loads * 0.25
        assert value(samples, "request_queue_time_by_reason_seconds_total", reason="pages") == 0
        assert value(samples, "request_preempted_time_seconds_total", reason="pages") == 0
        assert value(samples, "adapter_time_to_first_token_seconds_count", adapter="b") == 1, "requests"
        assert value(samples, "adapter_time_to_first_token_seconds_sum", adapter="a") > 0
        assert value(samples, "adapter_lookups_total", adapter="a", found="miss") == 1
        assert value(samples, "adapter_lookups_total", adapter="a", found="hit") == 2
        assert value(samples, "adapter_lookups_total", adapter="a", found="late") == 0
        assert value(samples, "adapter_used_load_seconds_count", adapter="a") == 1
        assert value(samples, "adapter_used_load_seconds_sum", adapter="a") == 0.25
        pages = [value(samples, "adapter_resident_pages", adapter=label) for label in ("a", "b", "other")]
        assert pages == [12, 5, 3]
        assert value(samples, "http_responses_total", status="404") == 1
        assert value(samples, "http_responses_total", status="400") == 1


def test_what_the_engine_counts_is_shown_and_its_death_too() -> None:
    with serving(FakeEngine) as (url, engine):
        samples = scrape(url)
        assert value(samples, "engine_up") == 1
        assert value(samples, "num_requests_running") == STATS.running_sequences
        assert value(samples, "num_requests_waiting") == STATS.waiting_sequences
        assert value(samples, "num_requests_waiting_by_reason", reason="pages") == 2
        assert value(samples, "num_requests_waiting_by_reason", reason="seats") == 3
        for reason in set(WaitReason) - {WaitReason.PAGES, WaitReason.SEATS}:
            assert value(samples, "num_requests_waiting_by_reason", reason=reason.value) == 0
        owners = ("kv", "prefix", "adapter", "free")
        assert [value(samples, "pool_pages", owner=owner) for owner in owners] == [30, 7, 20, 43]
        assert [value(samples, "pool_peak_pages", owner=owner) for owner in owners[:3]] == [40, 17, 25]
        assert value(samples, "pool_usage_perc") == pytest.approx(0.57)
        assert value(samples, "adapter_load_seconds_bucket", le="60.0") == 0
        assert value(samples, "adapter_load_seconds_bucket", le="120.0") == 5
        assert value(samples, "adapter_load_seconds_count") == 5 + 3
        assert value(samples, "adapter_load_seconds_sum") == STATS.load_s
        assert value(samples, "adapter_late_prefetches_total") == STATS.adapter_late_prefetches
        assert value(samples, "adapter_prefetches_total") == STATS.adapter_prefetches
        assert value(samples, "adapter_prefetches_unused_total") == STATS.adapter_prefetches_unused
        assert value(samples, "prefix_cache_queries_total") == STATS.prefix_hit_tokens + STATS.prefix_miss_tokens
        assert value(samples, "prefix_cache_hits_total") == STATS.prefix_hit_tokens
        assert value(samples, "adapter_hits_total") == STATS.adapter_hits
        assert value(samples, "adapter_misses_total") == STATS.adapter_misses
        assert value(samples, "adapter_loads_total") == STATS.adapter_loads
        assert value(samples, "adapter_evictions_total") == STATS.adapter_evictions
        assert value(samples, "num_preemptions_total") == STATS.preemptions
        ways = ("kept", "swapped", "recomputed")
        assert [value(samples, "preempted_resumed_total", how=how) for how in ways] == [21, 22, 23]
        assert value(samples, "recomputed_tokens_total") == STATS.recomputed_tokens
        assert [value(samples, "swapped_pages_total", direction=way) for way in ("out", "in")] == [25, 26]
        assert [value(samples, "swap_pages", state=state) for state in ("used", "free")] == [27, 13]
        engine.die("out of luck")  # type: ignore[attr-defined]
        assert httpx.get(url + "/health").status_code == 503
        samples = scrape(url)
        assert value(samples, "engine_up") == 0
        assert not any(name == "interleaf:num_requests_running" for name, _ in samples)


class HungEngine(FakeEngine):
    """Answers nothing about itself while it is not let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stepping = threading.Event()
        self.num_asked = 0

    async def stats(self) -> EngineStats:
        self.num_asked += 1
        while self.is_stepping.is_set():
            await asyncio.sleep(0.005)
        return await super().stats()


def test_while_a_step_hangs_the_page_has_the_last_snapshot_and_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interleaf.server.operation.LastStats", lambda engine: LastStats(engine, limit_s=0.05))
    with serving(HungEngine) as (url, engine):
        assert isinstance(engine, HungEngine)
        engine.is_stepping.set()
        samples = scrape(url)
        assert value(samples, "engine_up") == 1
        assert value(samples, "engine_stats_age_seconds") > 0
        assert not any(name == "interleaf:num_requests_running" for name, _ in samples), "it was never known"
        engine.is_stepping.clear()
        while ("interleaf:num_requests_running", frozenset()) not in scrape(url):
            pass
        engine.is_stepping.set()
        assert complete(url, max_tokens=3).status_code == 200
        asked = engine.num_asked
        ages = []
        for _ in range(3):
            samples = scrape(url)
            ages.append(value(samples, "engine_stats_age_seconds"))
            assert value(samples, "num_requests_running") == STATS.running_sequences
            assert value(samples, "generation_tokens_total") == 3, "what is counted here is as new as ever"
        assert ages == sorted(set(ages)), "it grows"
        assert ages[0] > 0.04
        assert engine.num_asked <= asked + 1, "asked again though it has not answered"
        engine.die("out of luck")
        engine.is_stepping.clear()
        assert value(scrape(url), "engine_up") == 0


def test_a_client_that_leaves_is_an_abort_and_a_failed_request_an_error() -> None:
    with serving(lambda: FakeEngine(max_model_len=10**7)) as (url, engine):
        body = {"model": "base", "prompt": [1], "max_tokens": 10**6, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
        while value(scrape(url), "request_success_total", finished_reason="abort") < 1:
            pass
        engine.held.clear()  # type: ignore[attr-defined]
        engine.die("out of luck")  # type: ignore[attr-defined]
        assert complete(url).status_code == 503
        samples = scrape(url)
        assert value(samples, "request_success_total", finished_reason="abort") == 1
        assert value(samples, "request_refused_total") == 1


@asynchronous
async def test_a_reader_that_leaves_by_itself_has_found_a_stop_string_and_one_that_is_cancelled_has_not() -> None:
    metrics = Metrics("base", LabelTable(5))
    engine = ObservedEngine(FakeEngine(), metrics)

    async def read(count: int) -> None:
        async with aclosing(engine.generate([1], SamplingParams(max_tokens=100), None)) as batches:  # type: ignore[type-var]
            async for _ in batches:
                count -= 1
                if not count:
                    return

    await read(2)
    assert (metrics.finished["stop"], metrics.finished["abort"], metrics.generation_tokens) == (1, 0, 2)
    task = asyncio.create_task(read(10**6))
    while metrics.generation_tokens < 5:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (metrics.finished["stop"], metrics.finished["abort"]) == (1, 1)


def test_with_a_real_engine_pages_and_adapters_add_up(tmp_path: Path) -> None:
    model = save_model(make_model("llama3"), tmp_path / "model")

    async def prepare(engine: object) -> None:
        await engine.load_adapter("a", "dummy:r=4,targets=all,seed=1")  # type: ignore[attr-defined]

    def engine() -> object:
        return tiny_engine(model, memory="4MiB", page_tokens=4, max_num_seqs=16, max_batch_tokens=64)

    with serving(engine, prepare) as (url, _):  # type: ignore[arg-type]
        for _ in range(3):
            assert complete(url, model="a", max_tokens=5, ignore_eos=True).status_code == 200
        samples = scrape(url)
        assert value(samples, "adapter_misses_total") == 1
        assert value(samples, "adapter_hits_total") == 2
        assert value(samples, "adapter_loads_total") == 1
        assert value(samples, "adapters_resident") == value(samples, "adapters_registered") == 1
        assert value(samples, "pool_pages", owner="adapter") > 0
        assert value(samples, "pool_pages", owner="kv") == 0
        assert value(samples, "generation_tokens_total") == 15
        assert value(samples, "engine_computed_tokens_total") >= 15
        pages = value(samples, "pool_pages", owner="adapter")
        assert value(samples, "adapter_resident_pages", adapter="a") == pages
        assert value(samples, "adapter_lookups_total", adapter="a", found="miss") == 1
        assert value(samples, "adapter_lookups_total", adapter="a", found="hit") == 2
        assert value(samples, "adapter_load_seconds_count") == 1
        waited_s = value(samples, "adapter_queue_time_seconds_sum", adapter="a")
        assert waited_s == pytest.approx(waited_for(samples, adapter="a"), abs=1e-6)
        assert value(samples, "adapter_queue_time_by_reason_seconds_total", adapter="a", reason=LOADED) > 0
        load_s = value(samples, "adapter_used_load_seconds_sum", adapter="a")
        assert 0 < load_s == value(samples, "adapter_load_seconds_sum")
        assert load_s <= value(samples, "adapter_queue_time_seconds_sum", adapter="a")


def waited_for(samples: Samples, adapter: str) -> float:
    """The sum over all reasons."""
    name = "interleaf:adapter_queue_time_by_reason_seconds_total"
    return sum(number for (each, labels), number in samples.items() if each == name and ("adapter", adapter) in labels)


@asynchronous
async def test_what_a_client_has_waited_for_that_left_without_an_answer_is_counted(tmp_path: Path) -> None:
    model = save_model(make_model("llama3"), tmp_path / "model")
    metrics = Metrics("base", LabelTable(5))
    inner = tiny_engine(model, memory="4MiB", page_tokens=4, max_num_seqs=1, max_batch_tokens=64)
    engine = ObservedEngine(inner, metrics)

    async def sit(max_tokens: int) -> None:
        async for _ in engine.generate([5, 6, 7], SamplingParams(max_tokens=max_tokens, ignore_eos=True), "a"):
            pass

    try:
        await inner.load_adapter("a", "dummy:r=4,targets=all,seed=1")
        has_waited = False
        while not has_waited:
            sitting = asyncio.create_task(sit(200))
            leaving = asyncio.create_task(sit(2))
            while not leaving.done() and not has_waited:
                has_waited = (await engine.stats()).waiting_by_reason == {"seats": 1}
            leaving.cancel()
            await asyncio.gather(sitting, leaving, return_exceptions=True)
        while not metrics.finished["abort"]:
            await asyncio.sleep(0.01)
        (counts,) = (counts for _, counts in metrics.adapters.items())
        assert counts.requests == metrics.finished["abort"] + metrics.finished["length"], "it was counted, too"
        assert sum(counts.waits.values()) > counts.queue_s + 1e-6, "what those have waited that had no seat"
        assert counts.waits["seats"] > 0
        assert metrics.waits == counts.waits
    finally:
        await engine.close()


# --- labels -----------------------------------------------------------------------------------------------------------


def test_adapters_beyond_the_cap_share_a_label_and_no_counter_ever_falls() -> None:
    labels = AdapterLabels(LabelTable(3))
    seen: dict[str, int] = {}
    total = 0
    # Ten adapters; "a9" comes late and is by far the busiest.
    for adapter in [f"a{i}" for i in range(10)] * 5 + ["a9"] * 100 + ["a0"] * 7:
        labels.add(adapter, AdapterCounts(1, 2, 3))
        total += 1
        now = {label: counts.requests for label, counts in labels.items()}
        assert len(now) <= 3 + 1
        assert all(now[label] >= seen[label] for label in now if label in seen)
        seen |= now
    assert "a9" in now, "the busiest has earned a label"
    assert sum(seen.values()) == total, "every request is under exactly one label that was ever shown"
    assert all(counts.prompt_tokens == 2 * counts.requests for _, counts in labels.items())


def test_with_a_cap_of_nothing_all_adapters_are_other_and_so_is_one_of_that_name() -> None:
    none = AdapterLabels(LabelTable(0))
    none.add("a", AdapterCounts(1))
    assert [label for label, _ in none.items()] == ["other"]
    one = AdapterLabels(LabelTable(1))
    one.add("other", AdapterCounts(1))
    one.add("a", AdapterCounts(1))
    assert [(label, counts.requests) for label, counts in one.items()] == [("a", 1), ("other", 1)]


def test_a_histograms_buckets_are_cumulative_and_its_bounds_inclusive() -> None:
    histogram = Histogram((1, 2))
    histogram.observe(1.0)
    histogram.observe(1.5, 3)
    histogram.observe(9)
    family = histogram.family("interleaf:x", "text", "base")
    values = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    assert values == {"1.0": 1, "2.0": 4, "+Inf": 5, "interleaf:x_count": 5, "interleaf:x_sum": 14.5}


def test_labels_of_strangers_are_escaped() -> None:
    metrics = Metrics('ba"se\n', LabelTable(5))
    page = metrics.exposition(None).decode()
    assert 'model_name="ba\\"se\\n"' in page
    list(text_string_to_metric_families(page))


# --- the log ----------------------------------------------------------------------------------------------------------


def test_every_request_is_one_line_with_its_id_adapter_tokens_and_time_to_first_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="interleaf")
    with serving(lambda: FakeEngine(("a",))) as (url, _):
        answer = httpx.post(
            url + "/v1/completions",
            json={"model": "a", "prompt": [1, 2, 3], "max_tokens": 5},
            headers={"X-Request-Id": "mine-17"},
        )
        assert answer.headers["x-request-id"] == "mine-17"
        httpx.get(url + "/nowhere")
        httpx.get(url + "/health")
    records = [record for record in caplog.records if record.name == "interleaf.access"]
    generation, missing, health = (json.loads(JsonFormatter().format(record)) for record in records)
    assert generation["request_id"] == "mine-17"
    assert (generation["method"], generation["path"], generation["status"]) == ("POST", "/v1/completions", 200)
    assert (generation["adapter"], generation["prompt_tokens"], generation["generation_tokens"]) == ("a", 3, 5)
    assert 0 <= generation["ttft_s"] <= generation["seconds"]
    assert generation["finish_reason"] == "length"
    assert (missing["status"], "adapter" in missing, len(missing["request_id"])) == (404, False, 32)
    assert (health["level"], generation["level"]) == ("debug", "info")


def test_a_request_that_waits_for_long_is_one_line_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Queueing(FakeEngine):
        async def generate(self, *asked: Any) -> AsyncIterator[list[Event]]:
            yield [RequestWaiting("request-0", 5.04, "pages")]
            async for events in super().generate(*asked):
                yield events

    caplog.set_level(logging.INFO, logger="interleaf")
    with serving(lambda: Queueing(("a",))) as (url, _):
        headers = {"X-Request-Id": "mine-18"}
        body = {"model": "a", "prompt": [1], "max_tokens": 2}
        assert httpx.post(url + "/v1/completions", json=body, headers=headers).json()["usage"]["completion_tokens"] == 2
        assert value(scrape(url), "adapter_requests_total", adapter="a") == 1
    (record,) = [record for record in caplog.records if record.name == "interleaf.server.observed"]
    entry = json.loads(JsonFormatter().format(record))
    assert (entry["message"], entry["level"]) == ("request waits", "info")
    assert (entry["request_id"], entry["adapter"], entry["waited_s"], entry["reason"]) == ("mine-18", "a", 5.0, "pages")


def test_a_key_or_a_prompt_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = "a-secret-key-of-some-length"
    with serving(FakeEngine, api_key=(key,)) as (url, _):
        for given in (key, key + "-wrong"):
            body = {"model": "base", "prompt": [191, 191, 191], "max_tokens": 2}
            httpx.post(url + "/v1/completions?token=abc", json=body, headers={"Authorization": f"Bearer {given}"})
    text = "\n".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records if "interleaf" in record.name)
    assert text
    assert "a-secret" not in text
    assert not re.search(r"191,\s*191", text)
    assert "token=abc" not in text


def test_a_line_of_the_log_is_one_line_whatever_strangers_write() -> None:
    def record(text: str, /, **fields: object) -> logging.LogRecord:
        extra = log_fields(**fields)
        return logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, text, (), None, extra=extra)

    evil = "GET\n2026-01-01 INFO forged \x1b[31m"
    for formatter in (ConsoleFormatter(), JsonFormatter()):
        line = formatter.format(record(evil, path=evil))
        assert "\n" not in line
        assert "\x1b" not in line
    entry = json.loads(JsonFormatter().format(record("m", message="forged", extra=1)))
    assert (entry["message"], entry["extra"]) == ("m", 1)


def test_the_log_is_configured_once_for_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    root, ours = logging.getLogger(), logging.getLogger("interleaf")
    before = root.handlers[:], root.level, ours.level
    try:
        configure_logging("json", "warning")
        ours.info("quiet")
        ours.warning("loud", extra=log_fields(n=1))
        logging.getLogger("somebody.else").error("theirs")
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        assert [(line["message"], line["level"], line.get("n")) for line in lines] == [
            ("loud", "warning", 1),
            ("theirs", "error", None),
        ]
    finally:
        root.handlers[:], root.level = before[0], before[1]
        ours.setLevel(before[2])


# ---------------------------------------------------------------- several API processes


def counting(requests: int, adapter: str = "a", table: LabelTable | None = None) -> Metrics:
    metrics = Metrics("base", table or LabelTable(5))
    metrics.finished["stop"] += requests
    metrics.responses["200"] += requests
    metrics.prompt_tokens += 10 * requests
    for _ in range(requests):
        metrics.first_token_s.observe(0.1)
        metrics.adapters.add(adapter, AdapterCounts(1, 10, 3, waits={"seats": 0.5}, waits_again={"pages": 0.25}))
        add_up(metrics.waits, {"seats": 0.5})
        add_up(metrics.waits_again, {"pages": 0.25})
    return metrics


def sums(totals: Totals) -> tuple[float, ...]:
    samples = samples_of(totals.sum().exposition(None).decode())
    return (
        value(samples, "request_success_total", finished_reason="stop"),
        value(samples, "http_responses_total", status="200"),
        value(samples, "prompt_tokens_total"),
        value(samples, "time_to_first_token_seconds_bucket", le="0.15"),
        value(samples, "adapter_generation_tokens_total", adapter="a"),
        2 * value(samples, "request_queue_time_by_reason_seconds_total", reason="seats"),
        2 * value(samples, "adapter_queue_time_by_reason_seconds_total", adapter="a", reason="seats"),
        4 * value(samples, "request_preempted_time_seconds_total", reason="pages"),
        4 * value(samples, "adapter_preempted_time_seconds_total", adapter="a", reason="pages"),
    )


def test_whichever_process_answers_tells_what_all_have_counted(tmp_path: Path) -> None:
    table = LabelTable(5, tmp_path / "labels")
    first = Totals(counting(3, table=table), "base", tmp_path / "api-1.counts")
    second = Totals(counting(4, table=table), "base", tmp_path / "api-2.counts")
    assert sums(first) == (3, 3, 30, 3, 9, 3, 3, 3, 3), "the other one has written nothing yet"
    assert sums(second) == sums(first) == (7, 7, 70, 7, 21, 7, 7, 7, 7)
    second.sum().prompt_tokens += 1000
    assert sums(second) == (7, 7, 70, 7, 21, 7, 7, 7, 7), "a sum is not what is counted on"


def test_a_process_counts_on_from_where_the_one_before_it_was_seen_last(tmp_path: Path) -> None:
    table = LabelTable(5, tmp_path / "labels")
    dies = Totals(counting(3, table=table), "base", tmp_path / "api-1.counts")
    told = sums(dies)
    assert sums(Totals(Metrics("base", table), "base", tmp_path / "api-1.counts")) == told
    assert sums(Totals(counting(2, table=table), "base", tmp_path / "api-1.counts")) == (5, 5, 50, 5, 15, 5, 5, 5, 5)


def of_processes(folder: Path, capacity: int, count: int) -> list[tuple[AdapterLabels, Totals]]:
    made = []
    for number in range(count):
        metrics = Metrics("base", LabelTable(capacity, folder / "labels"))
        made.append((metrics.adapters, Totals(metrics, "base", folder / f"api-{number}.counts")))
    return made


def adapters_shown(totals: Totals) -> dict[str, float]:
    samples = samples_of(totals.sum().exposition(None).decode())
    return {
        dict(labels)["adapter"]: number
        for (name, labels), number in samples.items()
        if name == "interleaf:adapter_requests_total"
    }


def test_a_label_that_one_process_has_given_is_one_for_all(tmp_path: Path) -> None:
    (first, totals), (second, others) = of_processes(tmp_path, 1, 2)
    first.add("a", AdapterCounts(1))
    second.add("b", AdapterCounts(1))
    second.add("a", AdapterCounts(1))
    totals.write()
    others.write()
    assert adapters_shown(totals) == adapters_shown(others) == {"a": 2, "other": 1}


def test_all_processes_together_show_no_more_labels_than_the_cap_and_no_counter_ever_falls(tmp_path: Path) -> None:
    rng = random.Random(7)
    processes = of_processes(tmp_path, 5, 4)
    ever: dict[str, float] = {}
    total = changes = 0
    last: set[str] = set()
    for step in range(1500):
        # Busy adapters change as time goes on, and each process has some that the others have not.
        number = rng.randrange(4)
        busy = f"a{step // 100 % 15}" if rng.random() < 0.7 else f"a{number}-{rng.randrange(9)}"
        processes[number][0].add(busy, AdapterCounts(1))
        total += 1
        if rng.random() < 0.02:  # one dies and another takes its place
            for _, totals in processes:
                totals.write()
            metrics = Metrics("base", LabelTable(5, tmp_path / "labels"))
            processes[number] = metrics.adapters, Totals(metrics, "base", tmp_path / f"api-{number}.counts")
        if step % 10 == 0:
            for _, totals in processes:
                totals.write()
            shown = adapters_shown(processes[rng.randrange(4)][1])
            assert len(shown.keys() - {"other"}) <= 5
            assert all(number >= ever.get(label, 0) for label, number in shown.items())
            ever |= shown
            changes += shown.keys() != last
            last = set(shown)
    assert changes > 5, "no label ever changed hands"
    for _, totals in processes:
        totals.write()
    kept = [counts for labels, _ in processes for counts in labels.all_counts().values()]
    assert sum(counts.requests for counts in kept) == total


def test_a_table_that_cannot_be_written_costs_labels_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "in-the-way.new" / "x").mkdir(parents=True)
    for file in (tmp_path / "missing" / "labels", tmp_path / "in-the-way"):
        labels = AdapterLabels(LabelTable(5, file))
        labels.add("a", AdapterCounts(1))
        assert [label for label, _ in labels.items()] == ["other"]
