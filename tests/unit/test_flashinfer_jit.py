"""Which of FlashInfer's kernels are compiled, and which are loaded from the cache as they lie; its specs are fakes."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from interleaf.kernels import flashinfer_jit


class Spec:
    """A kernel's specification: compiled or not, whole or not."""

    def __init__(self, name, is_compiled, is_whole=True):
        self.name, self.is_compiled, self.is_whole = name, is_compiled, is_whole
        self.built = 0

    def get_library_path(self):
        return Path(self.name)

    def load(self, path):
        if not self.is_whole:
            raise RuntimeError(f"{path}: file too short")
        return f"loaded {path}"

    def build_and_load(self):
        self.built += 1
        return f"built {self.name}"


@pytest.fixture
def builds(monkeypatch):
    """The lists of specs that were compiled together."""
    calls = []
    jit = ModuleType("flashinfer.jit")
    jit.build_jit_specs = calls.append
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    return calls


def specs(monkeypatch, *are_compiled):
    made = [Spec(name, done) for name, done in zip(("attention", "norm", "silu"), are_compiled, strict=True)]
    monkeypatch.setattr(flashinfer_jit, "_attention_spec", lambda *_: made[0])
    monkeypatch.setattr(flashinfer_jit, "_norm_spec", lambda: made[1])
    monkeypatch.setattr(flashinfer_jit, "_activation_spec", lambda: made[2])
    return made


def test_what_is_missing_is_compiled_together_and_told(builds, monkeypatch):
    attention, _, silu = specs(monkeypatch, False, True, False)
    told = []
    flashinfer_jit.build(torch.bfloat16, 128, False, lambda *n: told.append(n))
    assert builds == [[attention, silu]]
    assert told == [(1, 3), (3, 3)]
    builds.clear()
    flashinfer_jit.build(torch.bfloat16, 128, False, attends=False)
    assert builds == [[silu]]


def test_a_whole_cache_compiles_and_tells_nothing(builds, monkeypatch):
    specs(monkeypatch, True, True, True)
    flashinfer_jit.build(torch.bfloat16, 128, False, lambda *_: pytest.fail("told"))
    assert builds == []


def test_a_library_in_the_cache_is_loaded_and_one_that_is_cut_short_made_again():
    assert flashinfer_jit._load(Spec("a", is_compiled=True)) == "loaded a"
    assert flashinfer_jit._load(Spec("b", is_compiled=False)) == "built b"
    assert flashinfer_jit._load(Spec("c", is_compiled=True, is_whole=False)) == "built c"


@pytest.mark.parametrize(("dtype", "head_dim", "computed"), [
    (torch.bfloat16, 128, True), (torch.float16, 64, True), (torch.float32, 128, False), (torch.bfloat16, 80, False),
])  # fmt: skip
def test_it_computes_16_bits_and_certain_sizes_of_heads(dtype, head_dim, computed, monkeypatch):
    monkeypatch.setattr(flashinfer_jit, "is_installed", lambda: True)
    assert flashinfer_jit.computes(dtype, head_dim) == computed
    monkeypatch.setattr(flashinfer_jit, "is_installed", lambda: False)
    assert not flashinfer_jit.computes(dtype, head_dim)
