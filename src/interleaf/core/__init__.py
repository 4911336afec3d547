"""The nouns that every room speaks. No torch."""

from interleaf.core.adapter import (
    STACK_ROWS,
    AdapterUid,
    HostState,
    ModuleSpan,
    PooledLayout,
    StreamLayout,
    StreamOrder,
)
from interleaf.core.events import (
    NOT_TERMINAL,
    AdapterFound,
    Event,
    FinishReason,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    RequestWaiting,
    SequenceStart,
    TokenEvent,
    TokenLogprobs,
)
from interleaf.core.model import GROUP_MODULES, MODULE_GROUP, LoraGroup, ModelSpec, Module, RopeKind, RopeSpec
from interleaf.core.plan import AdapterLoad, Chunk, SeatGrow, SeatStart, StepPlan, StepResult
from interleaf.core.request import Request, SamplingParams

__all__ = [
    "GROUP_MODULES",
    "MODULE_GROUP",
    "NOT_TERMINAL",
    "STACK_ROWS",
    "AdapterFound",
    "AdapterLoad",
    "AdapterUid",
    "Chunk",
    "Event",
    "FinishReason",
    "HostState",
    "LoraGroup",
    "ModelSpec",
    "Module",
    "ModuleSpan",
    "PooledLayout",
    "Request",
    "RequestAborted",
    "RequestFailed",
    "RequestFinished",
    "RequestWaiting",
    "RopeKind",
    "RopeSpec",
    "SamplingParams",
    "SeatGrow",
    "SeatStart",
    "SequenceStart",
    "StepPlan",
    "StepResult",
    "StreamLayout",
    "StreamOrder",
    "TokenEvent",
    "TokenLogprobs",
]
