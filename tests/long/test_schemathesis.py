"""Requests that a machine makes from /openapi.json: none ends in a 5xx. A short fixed run, and three minutes (long)."""

from __future__ import annotations

import time

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.support.served import FakeEngine, serving
from tests.support.waiting import WAIT_S

LONG_S = 180.0


def fuzz(url: str, examples: int, seed_value: int) -> int:
    """Call every operation with `examples` made requests. Returns: how many were made."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    made = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        assert operation is not None, result.err()

        def check(case: schemathesis.Case) -> None:
            nonlocal made
            made += 1
            response = case.call(base_url=url, timeout=WAIT_S)
            assert response.status_code < 500, (
                f"{case.method} {case.path}: {response.status_code} {response.text[:500]}"
            )

        _run(operation.as_strategy(), check, examples, seed_value)
    return made


def _run(strategy: object, check: object, examples: int, seed_value: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    configured = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=checks,
    )

    @seed(seed_value)
    @configured
    @given(strategy)  # type: ignore[arg-type]
    def test(case: object) -> None:
        check(case)  # type: ignore[operator]

    test()


def test_a_short_run_of_made_requests_sees_no_5xx() -> None:
    with serving(lambda: FakeEngine(("a",)), max_body_bytes=256 * 1024, body_timeout=2.0) as (url, _):
        made = fuzz(url, examples=10, seed_value=1)
        assert made >= 40
        assert httpx.get(url + "/health", timeout=WAIT_S).status_code == 200


@pytest.mark.long
@pytest.mark.timeout(LONG_S * 3)
def test_three_minutes_of_made_requests_see_no_5xx() -> None:
    with serving(lambda: FakeEngine(("a",)), max_body_bytes=256 * 1024, body_timeout=2.0) as (url, _):
        end = time.monotonic() + LONG_S
        round_ = 0
        while time.monotonic() < end:
            round_ += 1
            fuzz(url, examples=50, seed_value=round_)
        assert httpx.get(url + "/health", timeout=WAIT_S).status_code == 200
