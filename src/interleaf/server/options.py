"""Every option of `interleaf serve`, once: its names, its kind, what it means. Limits are the config classes' own.

`--help` and the table in docs/operate.md are made from `OPTIONS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from interleaf.config import EngineConfig, ServerConfig

PREFIX = "INTERLEAF_"


class Kind(StrEnum):
    """How an option is written; the value is what `--help` shows."""

    TEXT = "TEXT"
    PATH = "PATH"
    WHOLE = "N"
    SECONDS = "SECONDS"
    SIZE = "SIZE"
    SWITCH = ""
    TEXTS = "TEXT ..."
    PATHS = "DIR ..."
    PAIRS = "NAME=PATH ..."

    @property
    def is_many(self) -> bool:
        return self in (Kind.TEXTS, Kind.PATHS, Kind.PAIRS)


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: its key in TOML, and the field of ServerConfig or EngineConfig.
        flag: on the command line.   variable: in the environment.
    """

    name: str
    kind: Kind
    group: str
    help: str
    singular: str | None = None

    @property
    def flag(self) -> str:
        return "--" + (self.singular or self.name).replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def default(self) -> object:
        """What holds when nobody says anything; None for `model`, which must be said."""
        fields = {f.name: f for config in (ServerConfig, EngineConfig) for f in dataclasses.fields(config)}
        default = fields[self.name].default
        return None if default is dataclasses.MISSING else default


def _group(name: str, *options: tuple[str, Kind, str]) -> tuple[Option, ...]:
    return tuple(
        Option(key, kind, name, text, singular="adapter" if key == "adapters" else None) for key, kind, text in options
    )


OPTIONS: tuple[Option, ...] = (
    *_group(
        "Model",
        ("model", Kind.PATH, "What to serve: a Hugging Face folder, a .gguf file, a hub id, or a config.json."),
        ("served_model_name", Kind.TEXT, "Name of the base model in requests; by default the last part of the path."),
        ("tokenizer", Kind.PATH, "A folder or hub id with the tokenizer, when the model's own is not the one to use."),
        ("dtype", Kind.TEXT, "Of weights, KV cache and adapters: auto, float32, bfloat16, float16."),
        ("load_format", Kind.TEXT, "auto, safetensors, gguf, or dummy (random weights)."),
    ),
    *_group(
        "Adapters",
        ("adapters", Kind.PAIRS, "An adapter to serve; repeat for more. One that cannot be served stops the start."),
        (
            "adapters_dir",
            Kind.PATH,
            "Serve every adapter folder in this one under its own name; those that cannot be served are logged and "
            "left out. It is also an allowed root, and relative paths of /v1/load_lora_adapter start here.",
        ),
        ("allow_adapter_root", Kind.PATHS, "A folder below which /v1/load_lora_adapter may read; repeat for more."),
        ("allow_runtime_loading", Kind.SWITCH, "Without an API key: clients on this machine may load and unload."),
        ("allow_dummy_adapters", Kind.SWITCH, "/v1/load_lora_adapter may make random ones (dummy:r=16,...)."),
        ("adapter_host_memory", Kind.SIZE, "Host memory for adapters; beyond it their folders are read again."),
        (
            "adapter_disk_dir",
            Kind.PATH,
            "Folder on a fast disk for copies of adapters that host memory has no room for: they come back sooner than "
            "from their own folders. Servers may share one.",
        ),
        ("adapter_disk_memory", Kind.SIZE, "What they may take there together."),
    ),
    *_group(
        "Engine",
        ("device", Kind.TEXT, "Where to compute: cpu, cuda or cuda:N."),
        ("attention", Kind.TEXT, "On a GPU: flashinfer, triton, or auto (the first where it can be had)."),
        (
            "memory",
            Kind.SIZE,
            "Budget of the page pool for KV cache and adapters, without the weights: 512MiB, 2GB; 1GiB by default. "
            "On a GPU also a fraction of its memory, weights and work space included; 0.9 by default.",
        ),
        (
            "memory_split",
            Kind.TEXT,
            "For comparison only: a share of the pool, over 0 and below 1, that nothing but adapters may use.",
        ),
        (
            "swap_memory",
            Kind.SIZE,
            "Host memory for what preempted requests have computed; 0: none. 0 on a CPU, 4GiB on a GPU.",
        ),
        ("page_tokens", Kind.WHOLE, "Tokens of KV in a page: 1, 2, 4, 8, 16, 32 or 64."),
        ("max_model_len", Kind.WHOLE, "Prompt + max_tokens at most; by default the model's context."),
        ("max_num_seqs", Kind.WHOLE, "Sequences that run at a time at most; 64, on a GPU 512."),
        (
            "max_batch_tokens",
            Kind.WHOLE,
            "Rows computed in one step at most, 512, on a GPU 8192; longer prompts are computed in chunks.",
        ),
        (
            "refill_seats",
            Kind.WHOLE,
            "Seats to be free before prompts are computed while others decode; 1, on a GPU a sixteenth of all.",
        ),
        ("max_graphs", Kind.WHOLE, "Captured decode steps that a GPU keeps; 0 captures none."),
        ("overlap", Kind.SWITCH, "Plan the next step while this one runs."),
        (
            "admission",
            Kind.TEXT,
            "What must fit before a request starts: optimistic (what is known), estimated (the expected peak), or "
            "conservative (all it may need: nothing is ever computed twice).",
        ),
        ("eviction", Kind.TEXT, "Which idle adapter or prefix leaves first: cost (the one worth least), or lru."),
        (
            "copy_rate",
            Kind.SIZE,
            "Bytes a second of copies to the pool, such as 20GB, that eviction and preemption reckon with. By default "
            "measured at start.",
        ),
        (
            "prefill_rate",
            Kind.WHOLE,
            "Prompt tokens a second that eviction and preemption reckon with. By default measured at start.",
        ),
        ("prefix_cache", Kind.SWITCH, "Requests of one adapter that begin alike share what they have in common."),
        ("max_loads", Kind.WHOLE, "Adapters on their way to the pool at most."),
        ("prefetch_loads", Kind.WHOLE, "Of those, how many may be for requests that cannot start yet; 0: none."),
        ("load_timeout", Kind.SECONDS, "An adapter that takes longer to come fails the requests that wait for it."),
        ("seed", Kind.WHOLE, "Makes draws of requests without a seed repeatable, and dummy weights."),
    ),
    *_group(
        "Network",
        ("host", Kind.TEXT, "Address to listen on. 0.0.0.0 is every interface: set an API key first."),
        ("port", Kind.WHOLE, "Port to listen on; 0 takes a free one and the ready line names it."),
        ("api_workers", Kind.WHOLE, "Processes that speak HTTP and make text; one engine serves them all."),
        ("cors_origin", Kind.TEXTS, "An origin whose web pages may call this server; repeat for more."),
    ),
    *_group(
        "Access",
        (
            "api_key",
            Kind.TEXTS,
            "A key that clients send as `Authorization: Bearer KEY`; repeat for more. Everybody on the machine sees "
            "arguments: prefer the environment or the file.",
        ),
        ("protect_metrics", Kind.SWITCH, "Ask for the key on /metrics too, which names adapters."),
    ),
    *_group(
        "Limits",
        ("max_waiting", Kind.WHOLE, "Requests that may wait for the engine; more are answered 429 with Retry-After."),
        ("max_connections", Kind.WHOLE, "Connections of one API process; more are answered 503."),
        ("max_body_bytes", Kind.SIZE, "A request's body at most; larger ones are answered 413."),
        ("max_header_bytes", Kind.SIZE, "A request's headers at most; larger ones are answered 431."),
        ("header_timeout", Kind.SECONDS, "Time for a connection's headers to arrive; then it is closed with 408."),
        ("body_timeout", Kind.SECONDS, "Time for a request's body to arrive; then it is answered 408."),
        ("keep_alive", Kind.SECONDS, "How long an idle connection stays open."),
    ),
    *_group(
        "Life and death",
        ("drain_timeout", Kind.SECONDS, "How long SIGTERM lets open requests go on. A second one ends them at once."),
        (
            "exit_after",
            Kind.SECONDS,
            "Exit this long after the engine died. By default /health says 503 until stopped.",
        ),
        ("slab_dir", Kind.PATH, "Folder, best one in memory, for adapters on their way to the engine."),
        (
            "publisher_threads",
            Kind.WHOLE,
            "Adapters registered at a time, and brought back at a time; by default one for every four cores.",
        ),
    ),
    *_group(
        "Logs and metrics",
        ("log_format", Kind.TEXT, "console, or json: one object a line."),
        ("log_level", Kind.TEXT, "debug, info, warning or error."),
        ("metrics_adapters", Kind.WHOLE, "Adapters with labels of their own in /metrics; the rest are `other`."),
    ),
)
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}


def options_table() -> str:
    """All options as one Markdown table: what docs/operate.md shows."""
    lines = ["| Flag | TOML key | Environment | Default | Meaning |", "|---|---|---|---|---|"]
    for option in OPTIONS:
        flag = "`MODEL` (argument)" if option.name == "model" else f"`{option.flag}`"
        key = "`[adapters]`" if option.kind is Kind.PAIRS else f"`{option.name}`"
        lines.append(f"| {flag} | {key} | `{option.variable}` | {shown_default(option)} | {option.help} |")
    return "\n".join(lines) + "\n"


def shown_default(option: Option) -> str:
    """The default in words of the table and of `--help`."""
    default = option.default
    if isinstance(default, bool):
        return "on" if default else "off"
    return "" if default in (None, ()) else str(default)
