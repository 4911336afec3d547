"""What every test shares: thread counts, Hypothesis profiles, the built-in model. Imports no torch."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Read by torch and numpy when they are first imported, which is after this file. More threads than free cores make
# small operations many times slower: a test that runs processes side by side gives each of them a single thread.
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, len(os.sched_getaffinity(0)))))
# No test reaches a model hub, whatever the machine could reach.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# `ci` draws the same examples every time: a failure is the change under test. `long` (make test-long) seeks new ones.
# How long an example takes, or drawing it, is the machine's doing, and no verdict.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", **UNTIMED, derandomize=True, database=None, max_examples=100)
settings.register_profile("long", **UNTIMED, max_examples=2000, stateful_step_count=100, print_blob=True)
settings.load_profile("ci")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The built-in model's GGUF file: INTERLEAF_TEST_GGUF if set, else where `make model` puts it."""
    path = Path(os.environ.get("INTERLEAF_TEST_GGUF") or REPOSITORY / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    if not path.is_file():
        pytest.fail(f"{path} does not exist: run `make model`, or set INTERLEAF_TEST_GGUF", pytrace=False)
    return path
