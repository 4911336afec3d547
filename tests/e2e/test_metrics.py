"""What /metrics and the log say after requests whose numbers a test knows."""

from __future__ import annotations

import asyncio
import json
import logging
import re
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
from interleaf.server.labels import AdapterCounts, AdapterLabels
from interleaf.server.logs import ConsoleFormatter, JsonFormatter, configure_logging, log_fields
from interleaf.server.metrics import Metrics
from interleaf.server.observed import ObservedEngine
from interleaf.server.totals import Totals
from tests.support.asynchronous import asynchronous
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
        engine.die("out of luck")  # type: ignore[attr-defined]
        assert httpx.get(url + "/health").status_code == 503
        samples = scrape(url)
        assert value(samples, "engine_up") == 0
        assert not any(name == "interleaf:num_requests_running" for name, _ in samples)


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
    metrics = Metrics("base", 5)
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
        load_s = value(samples, "adapter_used_load_seconds_sum", adapter="a")
        assert 0 < load_s == value(samples, "adapter_load_seconds_sum")
        assert load_s <= value(samples, "adapter_queue_time_seconds_sum", adapter="a")


# --- labels -----------------------------------------------------------------------------------------------------------


def test_adapters_beyond_the_cap_share_a_label_and_no_counter_ever_falls() -> None:
    labels = AdapterLabels(3)
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
    none = AdapterLabels(0)
    none.add("a", AdapterCounts(1))
    assert [label for label, _ in none.items()] == ["other"]
    one = AdapterLabels(1)
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
    metrics = Metrics('ba"se\n', 5)
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


def counting(requests: int, adapter: str = "a") -> Metrics:
    metrics = Metrics("base", 5)
    metrics.finished["stop"] += requests
    metrics.responses["200"] += requests
    metrics.prompt_tokens += 10 * requests
    for _ in range(requests):
        metrics.first_token_s.observe(0.1)
        metrics.adapters.add(adapter, AdapterCounts(1, 10, 3))
    return metrics


def sums(totals: Totals) -> tuple[float, ...]:
    samples = samples_of(totals.sum().exposition(None).decode())
    return (
        value(samples, "request_success_total", finished_reason="stop"),
        value(samples, "http_responses_total", status="200"),
        value(samples, "prompt_tokens_total"),
        value(samples, "time_to_first_token_seconds_bucket", le="0.15"),
        value(samples, "adapter_generation_tokens_total", adapter="a"),
    )


def test_whichever_process_answers_tells_what_all_have_counted(tmp_path: Path) -> None:
    first = Totals(counting(3), "base", 5, tmp_path / "api-1.counts")
    second = Totals(counting(4), "base", 5, tmp_path / "api-2.counts")
    assert sums(first) == (3, 3, 30, 3, 9), "the other one has written nothing yet"
    assert sums(second) == sums(first) == (7, 7, 70, 7, 21)
    second.sum().prompt_tokens += 1000
    assert sums(second) == (7, 7, 70, 7, 21), "a sum is not what is counted on"


def test_a_process_counts_on_from_where_the_one_before_it_was_seen_last(tmp_path: Path) -> None:
    dies = Totals(counting(3), "base", 5, tmp_path / "api-1.counts")
    told = sums(dies)
    assert sums(Totals(Metrics("base", 5), "base", 5, tmp_path / "api-1.counts")) == told
    assert sums(Totals(counting(2), "base", 5, tmp_path / "api-1.counts")) == (5, 5, 50, 5, 15)


def test_a_label_of_one_process_is_a_label_of_the_sum(tmp_path: Path) -> None:
    one = Totals(counting(1, "a"), "base", 1, tmp_path / "api-1.counts")
    two = Totals(counting(1, "b"), "base", 1, tmp_path / "api-2.counts")
    one.write()
    samples = samples_of(two.sum().exposition(None).decode())
    assert [value(samples, "adapter_requests_total", adapter=name) for name in "ab"] == [1, 1]
