"""A GPU's small kernels, its model and FlashInfer's backend under Triton's interpreter, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import FILE_OF_TESTS_S

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(FILE_OF_TESTS_S)
@pytest.mark.parametrize("name", ["row_kernels", "uploads", "flashinfer_attention", "gpu_model"])
def test_what_a_gpu_computes_agrees_with_loops_when_interpreted(name):
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/gpu/test_{name}.py"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
