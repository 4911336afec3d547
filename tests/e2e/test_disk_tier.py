"""A server whose host memory holds two of its adapters, and whose disk tier holds them all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from interleaf import LLM, SamplingParams
from tests.e2e.test_metrics import scrape, value
from tests.support.peft_folders import NUM_LAYERS, Draft, make_tensors
from tests.support.program import Program
from tests.support.tiny_models import make_model, save_model
from tests.support.waiting import eventually

NAMES = [f"a{i}" for i in range(5)]
PAGE_BYTES, ADAPTER_PAGES = 3 * 2 * 4 * 2 * 16 * 4, 4
SETTINGS = {
    "memory": 13 * PAGE_BYTES,
    "adapter_host_memory": 2 * ADAPTER_PAGES * PAGE_BYTES,
    "page_tokens": 4,
    "max_model_len": 32,
    "max_num_seqs": 8,
    "max_batch_tokens": 64,
}
"""A pool for three adapters, host memory for two."""
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


class Served:
    """The program, the folder of its adapters and the one of its disk tier."""

    def __init__(self, program: Program, root: Path, disk: Path) -> None:
        self.program = program
        self.root = root
        self.disk = disk

    def ids(self, name: str) -> list[int]:
        body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.program.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=60)
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids

    def count(self, name: str) -> float:
        return value(scrape(self.program.url), name)

    def files(self) -> list[Path]:
        return sorted(self.disk.glob("*/*.image"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disk")
    save_model(make_model("llama3"), folder / "model")
    for seed, name in enumerate(NAMES):
        modules = {(layer, module): 4 for layer in range(NUM_LAYERS) for module in ("q_proj", "v_proj")}
        Draft(tensors=make_tensors(modules, seed)).write(folder / "root" / name)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """What each adapter answers when everything fits."""
    adapters = {name: folder / "root" / name for name in NAMES}
    with LLM(
        folder / "model", adapters=adapters, **SETTINGS | {"memory": "4MiB", "adapter_host_memory": "4MiB"}
    ) as llm:
        outputs = llm.generate([[5, 6, 7]] * len(NAMES), PARAMS, adapter=NAMES)
    answers = {name: list(output.outputs[0].token_ids) for name, output in zip(NAMES, outputs, strict=True)}
    assert len({tuple(ids) for ids in answers.values()}) > 1, "the adapters make no difference: this tests nothing"
    return answers


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    flags = {f"--{name.replace('_', '-')}": setting for name, setting in SETTINGS.items()}
    flags |= {
        "--served-model-name": "base",
        "--adapters-dir": folder / "root",
        "--adapter-disk-dir": folder / "copies",
        "--adapter-disk-memory": "1MB",
    }
    words = [word for flag in flags.items() for word in flag]
    with Program(folder / "model", *words, folder=folder) as program:
        yield Served(program, folder / "root", folder / "copies")


def use_all_until_everyone_is_on_disk(served: Served) -> None:
    """An image that leaves while others are written may go without, and is written another time."""

    def is_on_disk() -> bool:
        for name in NAMES:
            served.ids(name)
        return len(served.files()) == len(NAMES)

    eventually(is_on_disk)


def test_adapters_come_back_from_disk_and_answer_as_before(served: Served, expected: dict[str, list[int]]) -> None:
    use_all_until_everyone_is_on_disk(served)
    hits = served.count("adapter_disk_hits_total")
    moved = served.root.rename(served.root.parent / "away")  # there are no sources any more
    try:
        assert {name: served.ids(name) for name in [*NAMES, *NAMES]} == expected
    finally:
        moved.rename(served.root)
    assert served.count("adapter_disk_hits_total") > hits
    assert served.count("adapter_disk_files") == len(NAMES) == len(served.files())
    assert served.count("adapter_disk_bytes") == sum(file.stat().st_size for file in served.files())
    assert served.count("adapter_disk_errors_total") == 0


def test_the_log_says_at_which_rates_the_engine_reckons(served: Served) -> None:
    (line,) = [line for line in served.program.log if "prompts" in line]
    assert "engine: copies to the pool" in line
    assert line.count("(measured)") == 2


def test_files_that_were_damaged_or_removed_are_made_again_of_their_sources(
    served: Served, expected: dict[str, list[int]]
) -> None:
    use_all_until_everyone_is_on_disk(served)
    for file in served.files()[:2]:
        os.truncate(file, file.stat().st_size // 2)
    for file in served.files()[2:3]:
        file.unlink()
    assert {name: served.ids(name) for name in [*NAMES, *NAMES]} == expected
    assert served.count("adapter_disk_errors_total") == 2
    assert served.count("adapter_failed_loads_total") == 0
    shutil.rmtree(served.disk)
    assert {name: served.ids(name) for name in [*NAMES, *NAMES]} == expected


def test_in_one_process_it_is_the_same(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    adapters = {name: folder / "root" / name for name in NAMES}
    with LLM(folder / "model", adapters=adapters, adapter_disk_dir=str(tmp_path), **SETTINGS) as llm:

        def has_come_from_disk() -> bool:
            for name in NAMES:
                (output,) = llm.generate([[5, 6, 7]], PARAMS, adapter=name)
                assert list(output.outputs[0].token_ids) == expected[name]
            return llm.stats().adapter_disk_hits > 0

        eventually(has_come_from_disk)
        assert llm.stats().adapter_disk_errors == 0
