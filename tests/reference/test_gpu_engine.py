"""The GPU's runner over interpreted kernels, in a process of its own: a wrong index would end this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import FILE_OF_TESTS_S

REPOSITORY = Path(__file__).resolve().parents[2]
SHORT = (
    "captured_for or pieces or scrap or our_own or groups or takes_long or starts_before or fails or evicts or 64-True "
    "or short"
)


def _run(*options: str) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *options]
    command.append("tests/gpu/test_gpu_engine.py")
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.timeout(FILE_OF_TESTS_S)
def test_the_gpu_s_runner_gives_the_tokens_of_the_cpu_s():
    _run("-k", SHORT)


@pytest.mark.long
def test_the_gpu_s_runner_gives_the_tokens_of_the_cpu_s_in_every_setting():
    _run("-k", f"not ({SHORT})")
