"""Every option of `interleaf serve`, once: its names, its kind, what it means. Limits are the config classes' own.

`--help` and the table in docs/operate.md are made from `OPTIONS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from interleaf.server.option import PREFIX, Kind, Option

__all__ = ["BY_NAME", "OPTIONS", "PREFIX", "Kind", "Option", "options_table"]


def _group(name: str, *options: Option) -> tuple[Option, ...]:
    return tuple(dataclasses.replace(option, group=name) for option in options)


OPTIONS: tuple[Option, ...] = (
    *_group(
        "Model",
        Option("model", Kind.PATH, "What to serve: a Hugging Face folder, a .gguf file, a hub id, or a config.json."),
        Option(
            "served_model_name",
            Kind.TEXT,
            "Name of the base model in requests.",
            "NAME",
            unset="the last part of the path",
        ),
        Option(
            "tokenizer",
            Kind.PATH,
            "A folder or hub id with the tokenizer, when the model's own is not the one to use.",
            unset="the model's own",
        ),
        Option(
            "dtype",
            Kind.TEXT,
            "Of weights, KV cache and adapters: auto, float32, bfloat16, float16. On a CPU auto is "
            "float32, else the checkpoint's own.",
            "DTYPE",
        ),
        Option("load_format", Kind.TEXT, "auto, safetensors, gguf, or dummy (random weights).", "FORMAT"),
    ),
    *_group(
        "Adapters",
        Option(
            "adapters",
            Kind.PAIRS,
            "An adapter to serve; repeat for more. One that cannot be served stops the start.",
            unset="none",
            singular="adapter",
        ),
        Option(
            "adapters_dir",
            Kind.PATH,
            "Serve every adapter folder in this one under its own name; those that cannot be served are logged and "
            "left out. It is also an allowed root, and relative paths of /v1/load_lora_adapter start here.",
            "DIR",
            unset="none",
        ),
        Option(
            "allow_adapter_root",
            Kind.PATHS,
            "A folder below which /v1/load_lora_adapter may read; repeat for more.",
            unset="none",
        ),
        Option(
            "allow_runtime_loading",
            Kind.SWITCH,
            "Without an API key: clients on this machine may load and unload.",
        ),
        Option("allow_dummy_adapters", Kind.SWITCH, "/v1/load_lora_adapter may make random ones (dummy:r=16,...)."),
        Option("adapter_host_memory", Kind.SIZE, "Host memory for adapters; beyond it their folders are read again."),
        Option(
            "adapter_disk_dir",
            Kind.PATH,
            "Folder on a fast disk for copies of adapters that host memory has no room for: they come back sooner than "
            "from their own folders. Servers may share one.",
            "DIR",
            unset="none",
        ),
        Option(
            "adapter_disk_memory",
            Kind.SIZE,
            "What they may take there together; refused without the folder.",
            unset="none; with the folder 16GiB",
        ),
    ),
    *_group(
        "Engine",
        Option("device", Kind.TEXT, "Where to compute: cpu, cuda or cuda:N.", "DEVICE"),
        Option(
            "attention", Kind.TEXT, "On a GPU: flashinfer, triton, or auto (the first where it can be had).", "NAME"
        ),
        Option(
            "memory",
            Kind.SIZE,
            "Budget of the page pool for KV cache and adapters, without the weights: 512MiB, 2GB. On a GPU also a "
            "share of its memory, weights and work space included.",
        ),
        Option(
            "memory_split",
            Kind.TEXT,
            "For comparison only: a share of the pool, over 0 and below 1, that nothing but adapters may use.",
            "SHARE",
            unset="none: they share it",
        ),
        Option(
            "swap_memory",
            Kind.SIZE,
            "Host memory for what preempted requests have computed; 0: none. Over 0 it must hold a page.",
        ),
        Option("page_tokens", Kind.WHOLE, "Tokens of KV in a page: 1, 2, 4, 8, 16, 32 or 64.", "TOKENS"),
        Option("max_model_len", Kind.WHOLE, "Prompt + max_tokens at most.", "TOKENS", unset="the model's context"),
        Option("max_num_seqs", Kind.WHOLE, "Sequences that run at a time at most.", "SEQUENCES"),
        Option(
            "max_batch_tokens",
            Kind.WHOLE,
            "Rows computed in one step at most; longer prompts are computed in chunks.",
            "TOKENS",
        ),
        Option(
            "refill_seats",
            Kind.WHOLE,
            "Seats to be free before prompts are computed while others decode; on a GPU a sixteenth of all.",
            "SEATS",
        ),
        Option("max_graphs", Kind.WHOLE, "Captured decode steps that a GPU keeps; 0 captures none.", "GRAPHS"),
        Option("overlap", Kind.SWITCH, "Plan the next step while this one runs."),
        Option(
            "admission",
            Kind.TEXT,
            "What must fit before a request starts: optimistic (what is known), estimated (the expected peak), or "
            "conservative (all it may need: nothing is ever computed twice).",
            "NAME",
        ),
        Option(
            "eviction",
            Kind.TEXT,
            "Which idle adapter or prefix leaves first: cost (the one worth least), or lru.",
            "NAME",
        ),
        Option(
            "copy_rate",
            Kind.SIZE,
            "Bytes a second of copies to the pool, such as 20GB, that eviction and preemption reckon with. More than "
            "there are makes a GPU's steps wait for copies.",
            "SIZE/SECOND",
            unset="measured at start",
        ),
        Option(
            "prefill_rate",
            Kind.WHOLE,
            "Prompt tokens a second that eviction and preemption reckon with.",
            "TOKENS/SECOND",
            unset="measured at start",
        ),
        Option("prefix_cache", Kind.SWITCH, "Requests of one adapter that begin alike share what they have in common."),
        Option("max_loads", Kind.WHOLE, "Adapters on their way to the pool at most.", "ADAPTERS"),
        Option(
            "prefetch_loads",
            Kind.WHOLE,
            "Of max_loads, how many may be for requests that cannot start yet; 0: none. Not set, never more than "
            "max_loads.",
            "ADAPTERS",
        ),
        Option(
            "load_timeout", Kind.SECONDS, "An adapter that takes longer to come fails the requests that wait for it."
        ),
        Option(
            "seed", Kind.WHOLE, "Makes draws of requests without a seed repeatable, and dummy weights.", unset="none"
        ),
    ),
    *_group(
        "Network",
        Option("host", Kind.TEXT, "Address to listen on. 0.0.0.0 is every interface: set an API key first.", "ADDRESS"),
        Option("port", Kind.WHOLE, "Port to listen on; 0 takes a free one and the ready line names it.", "PORT"),
        Option(
            "api_workers",
            Kind.WHOLE,
            "Processes that speak HTTP and make text; one engine serves them all.",
            "PROCESSES",
        ),
        Option(
            "cors_origin",
            Kind.TEXTS,
            "An origin whose web pages may call this server; repeat for more.",
            "ORIGIN",
            unset="none",
        ),
    ),
    *_group(
        "Access",
        Option(
            "api_key",
            Kind.TEXTS,
            "A key that clients send as `Authorization: Bearer KEY`; repeat for more. Everybody on the machine sees "
            "arguments: prefer the environment or the file.",
            "KEY",
            unset="none: everybody is served",
        ),
        Option("protect_metrics", Kind.SWITCH, "Ask for the key on /metrics too, which names adapters."),
    ),
    *_group(
        "Limits",
        Option(
            "max_waiting",
            Kind.WHOLE,
            "Requests that may wait for the engine; more are answered 429 with Retry-After.",
            "REQUESTS",
        ),
        Option(
            "max_connections",
            Kind.WHOLE,
            "Connections of one API process; more are answered 503.",
            "CONNECTIONS",
        ),
        Option("max_body_bytes", Kind.SIZE, "A request's body at most; larger ones are answered 413."),
        Option("max_header_bytes", Kind.SIZE, "A request's headers at most; larger ones are answered 431."),
        Option(
            "header_timeout",
            Kind.SECONDS,
            "Time for a connection's headers to arrive; then it is closed with 408.",
        ),
        Option("body_timeout", Kind.SECONDS, "Time for a request's body to arrive; then it is answered 408."),
        Option("keep_alive", Kind.SECONDS, "How long an idle connection stays open."),
    ),
    *_group(
        "Life and death",
        Option(
            "drain_timeout",
            Kind.SECONDS,
            "How long SIGTERM lets open requests go on. A second one ends them at once.",
        ),
        Option(
            "exit_after",
            Kind.SECONDS,
            "Exit this long after the engine died; until then /health says 503.",
            unset="never: until stopped",
        ),
        Option(
            "slab_dir",
            Kind.PATH,
            "Folder, best one in memory, for adapters on their way to the engine.",
            "DIR",
            unset="/dev/shm if it has 1GiB of room, else the temporary folder",
        ),
        Option(
            "publisher_threads",
            Kind.WHOLE,
            "Adapters registered at a time, and brought back at a time.",
            "THREADS",
            unset="one for every four cores, 8 at most",
        ),
    ),
    *_group(
        "Logs and metrics",
        Option("log_format", Kind.TEXT, "console, or json: one object a line.", "FORMAT"),
        Option("log_level", Kind.TEXT, "debug, info, warning or error.", "LEVEL"),
        Option(
            "metrics_adapters",
            Kind.WHOLE,
            "Adapters with labels of their own in /metrics; the rest are `other`.",
            "ADAPTERS",
        ),
    ),
)
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}


def options_table() -> str:
    """All options as one Markdown table: what docs/operate.md shows."""
    lines = ["| Flag | TOML key | Environment | Default | Meaning |", "|---|---|---|---|---|"]
    for option in OPTIONS:
        flag = "`MODEL` (argument)" if option.name == "model" else f"`{option.flag} {option.metavar}".rstrip() + "`"
        key = "`[adapters]`" if option.kind is Kind.PAIRS else f"`{option.name}`"
        lines.append(f"| {flag} | {key} | `{option.variable}` | {option.default} | {option.help} |")
    return "\n".join(lines) + "\n"
