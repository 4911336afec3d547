"""The exception tree. Every error that a caller can cause is one of these.

    InterleafError
    ├── ConfigError               a setting is unknown, out of range, or contradicts another
    ├── ModelRejected             a model's configuration asks for something that is not supported
    ├── CheckpointError           the files of a model are missing, truncated or contradict its configuration
    ├── PoolTooSmall              the pool cannot hold what it must be able to hold; carries the arithmetic
    ├── OutOfPages                an allocation did not fit right now; carries wanted and free
    ├── AdapterError
    │   ├── AdapterRejected       an adapter cannot be served; lists every problem found
    │   ├── AdapterNotFound       no adapter of that name is registered
    │   ├── AdapterNameTaken      the name is registered already, with other contents
    │   ├── AdapterLoadFailed     a registered adapter could not be brought back into memory
    │   └── AdaptersUnavailable   whoever reads adapters has died meanwhile; trying again helps
    ├── RequestRejected           a request is malformed or over a limit; nothing was accepted
    │   └── InvalidSamplingParams
    └── EngineDead                the step loop has failed; the cause is chained

Messages name the thing, the limit and the value, and the numbers stay on the exception as attributes.
"""

from __future__ import annotations

from collections.abc import Sequence


class InterleafError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(InterleafError, ValueError):
    """A setting is unknown, out of range, or contradicts another setting."""


class ModelRejected(InterleafError):
    """A model's configuration asks for something that is not supported. Lists every problem."""

    def __init__(self, model: str, problems: Sequence[str]) -> None:
        self.model = model
        self.problems = tuple(problems)
        super().__init__(f"{model}: " + "; ".join(self.problems))


class CheckpointError(InterleafError):
    """The files of a model are missing, truncated, or contradict its configuration."""


class PoolTooSmall(InterleafError):
    """The pool cannot hold something that it must be able to hold.

    Attributes:
        needed_pages: pages that the thing takes.
        total_pages: pages that the pool has, or the share of it that the thing may use.
    """

    def __init__(
        self, what: str, needed_pages: int, total_pages: int, arithmetic: str, *, where: str = "the pool"
    ) -> None:
        self.needed_pages = needed_pages
        self.total_pages = total_pages
        super().__init__(f"{what} needs {needed_pages} pages and {where} has {total_pages}: {arithmetic}")


class OutOfPages(InterleafError):
    """An allocation did not fit at this moment. Nothing was allocated.

    Attributes:
        wanted: pages asked for.
        free: pages that were free.
    """

    def __init__(self, wanted: int, free: int) -> None:
        self.wanted = wanted
        self.free = free
        super().__init__(f"{wanted} pages wanted, {free} free")


class AdapterError(InterleafError):
    """Something is wrong with one adapter. No other adapter is affected."""


class AdapterRejected(AdapterError):
    """An adapter cannot be served. No state has changed.

    Attributes:
        adapter: the name or path that was given.
        problems: every problem found, one sentence each.
    """

    def __init__(self, adapter: str, problems: Sequence[str]) -> None:
        self.adapter = adapter
        self.problems = tuple(problems)
        super().__init__(f"{adapter}: " + "; ".join(self.problems))


class AdapterNotFound(AdapterError, LookupError):
    """No adapter of that name is registered."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no adapter named {name!r} is registered")


class AdapterNameTaken(AdapterError):
    """The name is registered already, with other contents."""

    def __init__(self, name: str, uid: str) -> None:
        self.name = name
        self.uid = uid
        super().__init__(f"the name {name!r} is taken by adapter {uid[:12]}")


class AdapterLoadFailed(AdapterError):
    """A registered adapter could not be brought back into memory; its requests fail, no others do."""

    def __init__(self, uid: str, reason: str) -> None:
        self.uid = uid
        self.reason = reason
        super().__init__(f"adapter {uid[:12]}: {reason}")


class AdaptersUnavailable(AdapterError):
    """Whoever reads adapters has died while it was at this, or is not back in time. Trying again does no harm."""


class RequestRejected(InterleafError, ValueError):
    """A request is malformed or over a limit. Nothing was accepted."""


class InvalidSamplingParams(RequestRejected):
    """A sampling parameter is out of range. Names the parameter, the limit and the value."""


class EngineDead(InterleafError, RuntimeError):
    """The step loop has failed and every request has been ended; the cause is chained."""
