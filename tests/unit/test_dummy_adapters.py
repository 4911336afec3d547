"""Dummy adapters: what is asked for, told apart, refused by name."""

import pytest
import torch

from interleaf.adapters.sources import open_adapter
from interleaf.core import ModelSpec, Module
from interleaf.errors import AdapterRejected
from tests.support.peft_folders import MODEL, NUM_LAYERS

SPEC = ModelSpec(**MODEL)


def test_it_has_the_rank_and_the_targets_that_were_asked_for():
    parsed = open_adapter("dummy:r=3,targets=q+down,seed=7", SPEC)
    assert parsed.ranks == {(l, m): 3 for l in range(NUM_LAYERS) for m in (Module.Q, Module.DOWN)}
    assert parsed.pairs[1, Module.DOWN].a.shape == (3, 128)
    assert parsed.pairs[1, Module.DOWN].b.shape == (64, 3)


def test_all_targets_every_module_of_every_layer():
    assert len(open_adapter("dummy:r=1,targets=all,seed=0", SPEC).pairs) == NUM_LAYERS * 7


def test_order_and_defaults_do_not_matter():
    uids = {
        open_adapter(s, SPEC).uid
        for s in ("dummy:r=16,targets=v+q,seed=0", "dummy:targets=q+v", "dummy:seed=0, targets=q+v,r=16")
    }
    assert len(uids) == 1


def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not():
    first, again, other = (open_adapter(f"dummy:r=4,targets=all,seed={s}", SPEC) for s in (1, 1, 2))
    for at, pair in first.pairs.items():
        assert torch.equal(pair.a, again.pairs[at].a)
        assert torch.equal(pair.b, again.pairs[at].b)
        assert not torch.equal(pair.a, other.pairs[at].a)
        assert not torch.equal(pair.b, other.pairs[at].b)


def test_a_thousand_seeds_give_a_thousand_uids():
    assert len({open_adapter(f"dummy:r=1,targets=q,seed={s}", SPEC).uid for s in range(1000)}) == 1000


def test_the_weight_change_is_that_of_a_trained_adapter_at_every_rank():
    for rank in (1, 8, 64):
        for pair in open_adapter(f"dummy:r={rank},targets=all,seed=3", SPEC).pairs.values():
            change = pair.scale * pair.b @ pair.a
            assert 2e-4 < change.std() < 3e-3


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("dummy:r=0", "r must be a whole number from 1 to 4096, got '0'"),
        ("dummy:r=5000", "got '5000'"),
        ("dummy:r=-1", "got '-1'"),
        ("dummy:r=1.5", "got '1.5'"),
        ("dummy:r=٣", "r must be"),
        ("dummy:seed=x", "seed must be"),
        ("dummy:seed=9223372036854775808", "seed must be"),
        ("dummy:targets=q+lm_head", "got 'lm_head'"),
        ("dummy:targets=", "got ''"),
        ("dummy:rank=4", "'rank=4' is not one of"),
        ("dummy:16", "'16' is not one of"),
        ("dummy:r=4,r=4", "r stands twice"),
    ],
)
def test_a_malformed_recipe_is_refused_by_name(source, problem):
    with pytest.raises(AdapterRejected) as caught:
        open_adapter(source, SPEC)
    assert any(problem in p for p in caught.value.problems), caught.value.problems


def test_all_problems_of_a_recipe_are_listed_at_once():
    with pytest.raises(AdapterRejected) as caught:
        open_adapter("dummy:r=0,targets=x,seed=y,z=1", SPEC)
    assert len(caught.value.problems) == 4
