"""`interleaf serve` as a program with two API processes: what they count together, and what a death leaves of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.processes import command, descendants
from tests.support.program import Program
from tests.support.tiny_models import make_model, save_model
from tests.support.tiny_text import save_tokenizer
from tests.support.waiting import WAIT_S, eventually

REQUESTS, TOKENS = 24, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(make_model("llama3"), tmp_path_factory.mktemp("tiny") / "model")
    save_tokenizer(folder)
    return folder


def sample(url: str, name: str) -> float:
    """One value of /metrics, asked on a connection of its own: of whichever process takes it."""
    for line in httpx.get(f"{url}/metrics", timeout=WAIT_S).text.splitlines():
        if line.startswith(f"interleaf:{name}{{"):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"/metrics has no {name}")


def api_processes(program: Program) -> list[int]:
    return [pid for pid in descendants(program.process.pid) if " api " in command(pid)]


def test_counts_are_everybodys_and_outlive_the_process_that_counted(folder: Path, tmp_path: Path) -> None:
    body = {"model": "model", "prompt": "The sea", "max_tokens": TOKENS, "ignore_eos": True}
    with Program(folder, "--memory", "4MiB", "--api-workers", 2, folder=tmp_path) as program:
        for _ in range(REQUESTS):
            assert httpx.post(f"{program.url}/v1/completions", json=body, timeout=WAIT_S).status_code == 200
        eventually(lambda: sample(program.url, "generation_tokens_total") == REQUESTS * TOKENS)
        before = api_processes(program)
        assert len(before) == 2
        for pid in before:  # whichever of them has counted
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(set(api_processes(program)) - set(before)) == 2)
        assert [sample(program.url, "generation_tokens_total") for _ in range(8)] == [REQUESTS * TOKENS] * 8
        assert sample(program.url, "num_requests_running") == 0
    said = [line.split(" ", 2)[2].strip() for line in program.log]
    for number in (1, 2):
        (begun,) = [text for text in said if text.startswith("stopping") and f"process=api-{number} " in text]
        assert begun.endswith("open_requests=0 drain_timeout_s=30.0")
        (ended,) = [text for text in said if text.startswith("drained") and f"process=api-{number} " in text]
        assert said.index(begun) < said.index(ended)
    assert said[-1] == "stopped exit_code=0"
