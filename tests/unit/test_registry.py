"""Names and references: nothing is reported unused while anything holds it."""

import pytest

from interleaf.adapters.registry import Registry
from interleaf.core import AdapterUid
from interleaf.errors import AdapterNameTaken, AdapterNotFound, AdapterRejected

A, B = AdapterUid("a" * 64), AdapterUid("b" * 64)


@pytest.fixture
def unused() -> list[AdapterUid]:
    return []


@pytest.fixture
def registry(unused: list[AdapterUid]) -> Registry:
    return Registry(on_unused=unused.append)


def test_a_withdrawn_adapter_is_kept_until_its_last_reference(registry: Registry, unused: list[AdapterUid]) -> None:
    registry.publish("x", A)
    assert registry.acquire("x") == registry.acquire("x") == A
    registry.withdraw("x")
    with pytest.raises(AdapterNotFound, match="no adapter named 'x'"):
        registry.acquire("x")
    registry.release(A)
    assert unused == []
    registry.release(A)
    assert unused == [A]


def test_two_names_may_share_an_adapter_and_one_going_leaves_the_other(
    registry: Registry, unused: list[AdapterUid]
) -> None:
    registry.publish("x", A)
    registry.publish("y", A)
    registry.withdraw("x")
    assert registry.acquire("y") == A
    registry.withdraw("y")
    assert unused == []
    registry.release(A)
    assert unused == [A]


def test_a_name_is_taken_only_by_other_contents(registry: Registry, unused: list[AdapterUid]) -> None:
    registry.publish("x", A)
    registry.publish("x", A)
    with pytest.raises(AdapterNameTaken, match="'x' is taken by adapter aaaaaaaaaaaa"):
        registry.publish("x", B)
    registry.withdraw("x")
    registry.publish("x", B)
    assert registry.uid("x") == B
    assert unused == [A]


@pytest.mark.parametrize("name", ["", "a@b", "a:b", " a", "-a", "../x", "é", "a" * 201, "a\n", "a b", None, 3])
def test_names_outside_the_grammar_are_refused(registry: Registry, name: object) -> None:
    with pytest.raises(AdapterRejected, match="a name has 1 to 200 characters"):
        registry.publish(name, A)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a", "acme/legal-v2", "customer_00017", "llama-500", "A.b"])
def test_names_of_the_grammar_are_kept_as_they_are(registry: Registry, name: str) -> None:
    registry.publish(name, A)
    assert registry.names() == (name,)
