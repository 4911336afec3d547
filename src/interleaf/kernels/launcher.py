"""Launches of Triton kernels that take the host little time. Knows how Triton launches; no kernel, no step.

`kernel[grid](...)` works out at every call for which of a kernel's compiled forms its arguments are: 16 us, where a
launch takes 5. A step that is launched kernel by kernel, or captured, has some 600 of them. Whoever can say cheaply
which form it will be keeps it here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

_KNOWN_TRITON = ("3.6.",)
"""Versions whose compiled kernels take what is given below. Others are asked for every launch in their public way."""

ALIGNMENT = 16
"""Triton compiles for addresses and strides that are multiples of it, and for others."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A compiled kernel, loaded on a device.

    Attributes:
        constants: what stands behind the arguments, in the order of the kernel's signature.
    """

    run: Any
    function: Any
    packed: Any
    device: int
    constants: tuple[object, ...]


class Launcher:
    """The launches of one kernel from one place.

    Args: kernel: a `triton.jit` function whose compile-time arguments are its last.
    """

    __slots__ = ("_forms", "_kernel")

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._forms: dict[Hashable, _Form] = {}

    def launch(
        self,
        kind: Hashable,
        grid: tuple[int, int, int],
        arguments: tuple[object, ...],
        constants: Mapping[str, object],
        options: Mapping[str, object],
    ) -> None:
        """Enqueue a launch on the current stream; compile the kernel first, if it is not.

        Args:
            kind: equal only for launches that Triton would compile alike: of equal constants and options, and whose
                arguments are alike in device and dtype, in being a multiple of ALIGNMENT (addresses and those integers
                that the kernel specialises on), and in being 1 (those integers).
            constants: of the compile-time parameters, all of them.
            options: `num_warps` and the like.
        """
        form = self._forms.get(kind)
        if form is None or _is_watched():
            compiled = self._kernel[grid](*arguments, **constants, **options)
            # The interpreter compiles nothing; and what is compiled for somebody who watches may be another kernel.
            if form is None and compiled is not None and _is_known() and not _is_watched():
                names = self._kernel.arg_names[len(arguments) :]
                self._forms[kind] = _Form(
                    compiled.run,
                    compiled.function,
                    compiled.packed_metadata,
                    _driver().get_current_device(),
                    tuple(constants[name] for name in names),
                )
            return
        form.run(
            *grid,
            _driver().get_current_stream(form.device),
            form.function,
            form.packed,
            None,  # what a hook would be told, and hooks before and after: there are none
            None,
            None,
            *arguments,
            *form.constants,
        )


@cache
def _is_known() -> bool:
    import triton

    return str(triton.__version__).startswith(_KNOWN_TRITON)


@cache
def _driver() -> Any:
    from triton.runtime import driver

    return driver.active


@cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def _is_watched() -> bool:
    """Whether somebody is to be told of launches, such as Triton's profiler."""
    runtime = _runtime()
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
