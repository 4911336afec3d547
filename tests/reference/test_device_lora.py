"""The LoRA book of a GPU under Triton's interpreter, in a process of its own: a wrong index would end this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import FILE_OF_TESTS_S

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(FILE_OF_TESTS_S)
def test_steps_planned_on_the_host_and_resolved_by_the_kernel_do_what_loops_do():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu/test_device_lora.py"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
