"""Which launches ask Triton what to launch, and what the others hand over. Without Triton: its side is a stand-in."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from interleaf.kernels import launcher
from interleaf.kernels.launcher import Launcher


class Compiled:
    """A compiled kernel: notes what it is launched with."""

    function, packed_metadata = "function", "packed"

    def __init__(self, form: object) -> None:
        self.form = form
        self.launched: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.launched.append(arguments)


class Kernel:
    """A `triton.jit` function of a, b and the constants C and D; compiles a form for each parity of `a`."""

    arg_names = ("a", "b", "C", "D")

    def __init__(self) -> None:
        self.forms: dict[Any, Compiled] = {}
        self.asked: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(a: int, b: int, **named: int) -> Compiled:
            self.asked.append((grid, a, b, named))
            return self.forms.setdefault(a % 2, Compiled(a % 2))

        return launch


@pytest.fixture(params=["before", "after"])
def hooks(request: Any, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Whoever wants to be told of launches."""
    told: list[object] = []
    driver = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: f"stream of {device}")
    chain, none = SimpleNamespace(calls=told), SimpleNamespace(calls=[])
    if request.param == "after":
        chain, none = none, chain
    monkeypatch.setattr(launcher, "_driver", lambda: driver)
    monkeypatch.setattr(launcher, "_runtime", lambda: SimpleNamespace(launch_enter_hook=chain, launch_exit_hook=none))
    monkeypatch.setattr(launcher, "_is_known", lambda: True)
    return told


def launch(own: Launcher, a: int, b: int, grid: tuple[int, int, int] = (7, 1, 1)) -> None:
    own.launch(a % 2, grid, (a, b), {"D": 5, "C": 4}, {"num_warps": 8})


def test_triton_is_asked_once_for_each_kind(hooks: list[object]) -> None:
    kernel = Kernel()
    own = Launcher(kernel)
    for a, b in [(2, 10), (4, 11), (3, 12), (6, 13), (5, 14)]:
        launch(own, a, b, (a, 2, 1))
    first = {"C": 4, "D": 5, "num_warps": 8}
    assert kernel.asked == [((2, 2, 1), 2, 10, first), ((3, 2, 1), 3, 12, first)]
    rest = ("stream of 3", "function", "packed", None, None, None)
    assert kernel.forms[0].launched == [(4, 2, 1, *rest, 4, 11, 4, 5), (6, 2, 1, *rest, 6, 13, 4, 5)]
    assert kernel.forms[1].launched == [(5, 2, 1, *rest, 5, 14, 4, 5)]


def test_whoever_watches_launches_is_told_of_all(hooks: list[object]) -> None:
    kernel = Kernel()
    own = Launcher(kernel)
    launch(own, 2, 0)
    hooks.append(print)
    launch(own, 2, 1)
    hooks.clear()
    launch(own, 2, 2)
    assert [b for _, _, b, _ in kernel.asked] == [0, 1]
    assert len(kernel.forms[0].launched) == 1


def test_what_is_compiled_for_whoever_watches_is_not_kept(hooks: list[object]) -> None:
    """A profiler may have another kernel compiled, which must not be launched when it has gone."""
    kernel = Kernel()
    own = Launcher(kernel)
    hooks.append(print)
    launch(own, 2, 0)
    instrumented, kernel.forms = kernel.forms[0], {}
    hooks.clear()
    for b in (1, 2):
        launch(own, 2, b)
    hooks.append(print)
    kernel.forms = {0: instrumented}
    launch(own, 2, 3)
    hooks.clear()
    launch(own, 2, 4)
    assert instrumented.launched == []
    assert [b for _, _, b, _ in kernel.asked] == [0, 1, 3]


@pytest.mark.parametrize(
    ("version", "is_known"), [("3.6.0", True), ("3.6.1+git", True), ("3.7.0", False), ("3.60", False)]
)
def test_only_versions_that_were_read_are_launched_directly(
    version: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    launcher._is_known.cache_clear()
    assert launcher._is_known() is is_known
    launcher._is_known.cache_clear()


def test_an_unknown_triton_is_asked_for_every_launch(hooks: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_is_known", lambda: False)
    kernel = Kernel()
    own = Launcher(kernel)
    launch(own, 2, 0)
    launch(own, 2, 1)
    assert len(kernel.asked) == 2


def test_so_is_the_interpreter(hooks: list[object]) -> None:
    asked = []

    class Interpreted(Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: asked.append(grid)

    own = Launcher(Interpreted())
    launch(own, 2, 0)
    launch(own, 2, 0)
    assert len(asked) == 2
