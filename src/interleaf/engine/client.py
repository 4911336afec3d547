"""How the rest of the program reaches an engine: names and token ids in, events out.

`EngineClient` is all that a server or `LLM` may know of an engine. `InProcessClient` runs it in the caller's thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from interleaf.core import NOT_TERMINAL, AdapterUid, Event, PooledLayout, Request, SamplingParams
from interleaf.errors import PoolTooSmall, RequestRejected
from interleaf.memory.allocator import OwnerKind
from interleaf.memory.prefix import PrefixCounts
from interleaf.stats import EngineStats, PoolStats

if TYPE_CHECKING:  # it imports torch, and processes that only check requests have none
    from interleaf.engine.build import EngineParts

_FETCH_WAIT_S = 0.05
"""Longest wait for the host tier before the engine is asked again."""


class EngineClient(Protocol):
    """An engine, wherever it runs. Every submitted request ends in exactly one terminal event."""

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted."""

    @property
    def has_work(self) -> bool:
        """Whether requests are open, or steps on their way."""

    def adapters(self) -> tuple[str, ...]:
        """Names that requests can use, in the order they were registered."""

    def has_adapter(self, name: str) -> bool:
        """Whether requests can use a name."""

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams, adapter: str | None) -> None:
        """Whether a request would be accepted now. Raises: RequestRejected, AdapterNotFound."""

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        cache_salt: str | None = None,
    ) -> str:
        """Accept a request; it shares cached prefixes only with those of the same salt.

        Returns: its id. Raises: RequestRejected, AdapterNotFound, EngineDead.
        """

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences."""

    def poll(self) -> list[Event]:
        """What has happened since the last call; waits a little when nothing has."""

    def add_adapter(self, name: str, source: str) -> AdapterUid:
        """Register an adapter under a name. Raises: AdapterRejected, AdapterNameTaken, PoolTooSmall."""

    def remove_adapter(self, name: str) -> None:
        """Take a name away; running requests keep the adapter. Raises: AdapterNotFound."""

    def stats(self) -> EngineStats:
        """The engine at this moment."""

    def close(self) -> None:
        """End every request and release everything."""


def check_request(prompt_token_ids: Sequence[int], params: SamplingParams, vocab_size: int, max_model_len: int) -> None:
    """Whether a model can be asked this. Raises: RequestRejected: it names the limit and the value."""
    if not prompt_token_ids:
        raise RequestRejected("the prompt has no tokens, at least 1 is needed")
    if len(prompt_token_ids) + params.max_tokens > max_model_len:
        raise RequestRejected(
            f"prompt of {len(prompt_token_ids)} tokens + max_tokens={params.max_tokens} is over the limit of "
            f"max_model_len={max_model_len} tokens"
        )
    for what, ids in (("prompt", prompt_token_ids), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise RequestRejected(f"{what}: token id {token!r} is not from 0 to {vocab_size - 1}")


class InProcessClient:
    """An engine in the caller's thread: `poll` runs one step. Not thread-safe.

    Args:
        tell_waits_after_s: a RequestWaiting tells of each request that has had no seat for so long; None: nobody asks.
    """

    def __init__(self, parts: EngineParts, *, tell_waits_after_s: float | None = None) -> None:
        self._parts = parts
        self._random = random.Random(parts.config.seed)
        self._adapters_in_use: dict[str, AdapterUid | None] = {}
        self._num_submitted = 0
        parts.registry.on_unused = self._forget
        if tell_waits_after_s is not None:
            parts.scheduler.tell_long_waits(tell_waits_after_s)

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted."""
        return self._parts.engine.is_alive

    @property
    def has_work(self) -> bool:
        """Whether requests are open, or steps on their way."""
        return self._parts.engine.has_work

    def adapters(self) -> tuple[str, ...]:
        """Names that requests can use, in the order they were registered."""
        return self._parts.registry.names()

    def has_adapter(self, name: str) -> bool:
        """Whether requests can use a name."""
        return self._parts.registry.has_name(name)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams, adapter: str | None) -> None:
        """Whether a request would be accepted now. Raises: RequestRejected, AdapterNotFound."""
        check_request(prompt_token_ids, params, self._parts.spec.vocab_size, self._parts.max_model_len)
        if adapter is not None:
            self._parts.registry.uid(adapter)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> str:
        """Accept a request, under an id of the caller's choice that no open one has, if any is given.

        Returns: its id. Raises: RequestRejected, AdapterNotFound, EngineDead.
        """
        self.check(prompt_token_ids, params, adapter)
        uid = None if adapter is None else self._parts.registry.acquire(adapter)
        request = Request(
            id=request_id or f"request-{self._num_submitted}",
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            adapter=uid,
            arrival_s=time.monotonic(),
            cache_salt=cache_salt,
        )
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= set(self._parts.spec.eos_token_ids)
        seed = self._random.getrandbits(62) if params.seed is None else params.seed
        try:
            self._parts.engine.submit(request, stop_ids, seed)
        except BaseException:
            if uid is not None:
                self._parts.registry.release(uid)
            raise
        self._num_submitted += 1
        self._adapters_in_use[request.id] = uid
        return request.id

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences."""
        self._parts.engine.abort(request_id, index)

    @property
    def spare_s(self) -> float:
        """Seconds for which `poll` may be put off for the sake of requests that come meanwhile (see Engine)."""
        return self._parts.engine.spare_s

    def poll(self) -> list[Event]:
        """Run one step. Waits a little when all that is open waits for adapters to be read."""
        engine = self._parts.engine
        events = engine.step()
        for event in events:
            if not isinstance(event, NOT_TERMINAL):  # terminal: it alone releases the adapter
                uid = self._adapters_in_use.pop(event.request_id)
                if uid is not None:
                    self._parts.registry.release(uid)
        if engine.is_stalled and engine.has_work and not events:
            self._parts.store.wait_for_fetch(_FETCH_WAIT_S)
        return events

    def add_adapter(self, name: str, source: str) -> AdapterUid:
        """Register an adapter under a name.

        Raises: AdapterRejected, AdapterNameTaken; PoolTooSmall: it would not fit beside the longest sequence.
        """
        parts = self._parts
        parts.engine.require_alive()
        parts.registry.check_name(name)
        uid = parts.store.add(source)
        try:
            self._require_fit(name, parts.store.layout(uid))
            parts.registry.publish(name, uid)
        except BaseException:
            if not parts.registry.knows(uid):
                parts.store.remove(uid)
            raise
        return uid

    def remove_adapter(self, name: str) -> None:
        """Take a name away; running requests keep the adapter. Raises: AdapterNotFound."""
        self._parts.registry.withdraw(name)

    def stats(self) -> EngineStats:
        """The engine at this moment."""
        parts = self._parts
        counts = parts.residency.counts
        disk = parts.store.disk_counts
        prefixes = PrefixCounts() if parts.prefixes is None else parts.prefixes.counts
        resumed, swap = parts.scheduler.resumed, parts.scheduler.swap
        return EngineStats(
            pool=PoolStats(
                total_pages=parts.allocator.num_pages,
                free_pages=parts.allocator.num_free_pages,
                kv_pages=parts.allocator.num_used_pages(OwnerKind.KV),
                adapter_pages=parts.allocator.num_used_pages(OwnerKind.ADAPTER),
                peak_kv_pages=parts.allocator.num_peak_pages(OwnerKind.KV),
                peak_adapter_pages=parts.allocator.num_peak_pages(OwnerKind.ADAPTER),
                page_bytes=parts.geometry.page_bytes,
                prefix_pages=parts.allocator.num_used_pages(OwnerKind.PREFIX),
                peak_prefix_pages=parts.allocator.num_peak_pages(OwnerKind.PREFIX),
            ),
            resident_adapters=len(parts.residency.resident()),
            registered_adapters=len(parts.registry),
            running_sequences=parts.scheduler.num_running,
            waiting_sequences=parts.scheduler.num_waiting,
            adapter_hits=counts.hits,
            adapter_misses=counts.misses,
            adapter_loads=counts.loads,
            adapter_evictions=counts.evictions,
            adapter_failed_loads=counts.failed_loads,
            preemptions=parts.scheduler.num_preemptions,
            steps=parts.engine.num_steps,
            computed_tokens=parts.engine.num_computed_tokens,
            output_tokens=parts.engine.num_output_tokens,
            waiting_by_reason={reason.value: n for reason, n in parts.scheduler.waiting_by_reason().items()},
            adapter_late_prefetches=counts.late_prefetches,
            adapter_prefetches=counts.prefetches,
            adapter_prefetches_unused=counts.prefetched_unused,
            prefix_hit_tokens=prefixes.hit_tokens,
            prefix_miss_tokens=prefixes.computed_tokens,
            load_counts=tuple(counts.load_times),
            load_s=counts.load_s,
            adapter_pages=self._pages_by_name(),
            resumed_kept=resumed.kept,
            resumed_swapped=resumed.swapped,
            resumed_recomputed=resumed.recomputed,
            recomputed_tokens=resumed.recomputed_tokens,
            swap_out_pages=swap.counts.out_pages,
            swap_in_pages=swap.counts.in_pages,
            swap_slots=swap.num_slots,
            swap_used_slots=swap.num_used_slots,
            adapter_disk_bytes=disk.bytes,
            adapter_disk_files=disk.files,
            adapter_disk_hits=disk.hits,
            adapter_disk_writes=disk.writes,
            adapter_disk_errors=disk.errors,
            copy_rate=parts.rates.copy,
            prefill_rate=parts.rates.prefill,
        )

    def _pages_by_name(self) -> dict[str, int]:
        pages = self._parts.residency.pages_by_adapter()
        names = self._parts.registry.first_names(pages)
        return {names[uid]: count for uid, count in pages.items() if uid in names}

    def close(self) -> None:
        """End every request and release everything."""
        self._parts.close()

    def _forget(self, uid: AdapterUid) -> None:
        """An adapter has no names and no requests left: it goes on every tier."""
        self._parts.scheduler.forget_adapter(uid)
        self._parts.store.remove(uid)

    def _require_fit(self, name: str, layout: PooledLayout) -> None:
        """Whatever is accepted can run alone: any adapter fits beside the longest sequence, or in its own share."""
        geometry, total = self._parts.geometry, self._parts.allocator.num_pages
        if self._parts.allocator.are_split:
            share, split = self._parts.allocator.adapters.num_pages, self._parts.config.memory_split
            if layout.pages > share:
                how = f"memory_split={split} of {total} pages, {geometry.page_bytes} bytes each"
                where = "the adapters' share of the pool"
                raise PoolTooSmall(f"adapter {name!r}", layout.pages, share, how, where=where)
            return
        longest = geometry.pages_for_tokens(self._parts.max_model_len)
        if layout.pages + longest > total:
            raise PoolTooSmall(
                f"adapter {name!r}",
                layout.pages + longest,
                total,
                f"{layout.pages} for itself + {longest} for a sequence of max_model_len={self._parts.max_model_len} "
                f"tokens, {geometry.page_bytes} bytes each; memory of at least "
                f"{(layout.pages + longest) * geometry.page_bytes} bytes would do",
            )
