"""The Triton LoRA kernels under Triton's interpreter, in a process of their own: a wrong index would end this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import FILE_OF_TESTS_S

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(FILE_OF_TESTS_S)
def test_the_kernels_agree_with_float32_loops_when_interpreted():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu/test_lora_kernels.py"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
