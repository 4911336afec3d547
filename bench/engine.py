"""Throughput and latency of the whole engine on recorded traces, beside the least time the hardware allows.

    python -m bench.engine --model-config llama3-8b --adapters r16-all --trace saturated-llama3-8b-n150 [--repeat 2]
    python -m bench.engine --model-config llama3-8b --repeat 2 --row saturated-llama3-8b-n0:none \\
        --row saturated-llama3-8b-n150:r16-all --row saturated-llama3-8b-uniform-n600:r16-all:share=0.5 --json OUT
    python -m bench.engine --model-config llama3-8b --adapters r16-all --profile 16
    python -m bench.engine --record OUT --commit REVISION

Prompts are random tokens, every request yields exactly its output length, adapters are dummies in pinned host memory
when the timer starts and none is in the pool. docs/benchmarks/h200/engine.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from bench import engine_report as report
from bench.engine_adapters import HostArena
from bench.engine_cold import cold_start
from bench.engine_floor import ModelCosts
from bench.engine_loading import loading
from bench.engine_profile import profile
from bench.engine_rows import Row, adapter_set, asked_for, model_path, parse_row, parse_setting, read_trace, trace_path
from bench.engine_run import make_requests, measure, warm_up
from bench.engine_setup import PLAIN_POOL_BYTES, BenchEngine, read_spec
from interleaf.errors import ConfigError, ModelRejected, PoolTooSmall

RECORD = Path(__file__).parents[1] / "docs" / "benchmarks" / "h200" / "engine.json"

_SHARED_IMAGES_BYTES = 60 * 10**9
"""Rows of one set of adapters share their images as long as all of them together take no more host memory."""

_UNTOLD = frozenset({"load_format", "device", "seed", "memory"})
"""Settings that no name of a row shows; all others make it another row."""


@dataclass(slots=True)
class Session:
    """One process: its engine of the moment, and the results so far."""

    model: Path
    args: argparse.Namespace
    arena: HostArena
    begin_s: float = field(default_factory=time.perf_counter)
    engine: BenchEngine | None = None
    results: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.begin_s:6.1f} s] {text}", flush=True)

    @property
    def is_late(self) -> bool:
        """Whether no further run may begin."""
        return self.args.stop_after is not None and time.perf_counter() - self.begin_s > self.args.stop_after

    def build(self, settings: dict[str, Any]) -> BenchEngine:
        """An engine with those settings, in place of the one before."""
        self.close()
        self.engine = BenchEngine(self.model, settings, self.arena)
        parts = self.engine.parts
        gb = self.engine.num_pool_pages * parts.geometry.page_bytes / 1e9
        free = f", {torch.cuda.mem_get_info()[0] / 1e9:.1f} GB free" if parts.pool.data.is_cuda else ""
        self.say(
            f"engine of {self.model.stem} built in {self.engine.build_s:.1f} s, pool of {gb:.1f} GB{free}: {settings}"
        )
        return self.engine

    def close(self) -> None:
        """Release the engine, if there is one."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def record_of(self, row: Row, number: int) -> Path | None:
        """Where the steps of a run are to be recorded, if they are: a file of a folder that there is."""
        folder: Path | None = self.args.record_steps
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{row.trace_name}-{row.adapters}-{number}.jsonl"

    def write(self) -> None:
        """Write what is known so far."""
        if self.args.json:
            about = {"model": self.model.stem, "arguments": sys.argv[1:], "versions": versions(), **self.notes}
            report.write_json(self.args.json, {**about, "rows": self.results})

    def lay_out(self, engine: BenchEngine, rows: Sequence[Row]) -> list[dict[int, str]]:
        """Sources of the adapters of rows that use one set; the images of all of them are made now, if there is room.

        Returns: for each row; empty where images must be made row by row.
        """
        adapters = adapter_set(rows[0].adapters)
        if adapters is None:
            return [{} for _ in rows]
        wanted = [asked_for(read_trace(row.trace, row.limit)) or [0] for row in rows]
        union = sorted({index for indices in wanted for index in indices})
        geometry = engine.parts.geometry
        num_bytes = sum(engine.images.layout_for(adapters, index).pages for index in union) * geometry.page_bytes
        if num_bytes > _SHARED_IMAGES_BYTES and len(rows) > 1:
            return []
        begin = time.perf_counter()
        sources = engine.lay_out(adapters, union)
        took = time.perf_counter() - begin
        self.say(f"{len(union)} adapters of {adapters.name}, {num_bytes / 1e9:.1f} GB, laid out in {took:.1f} s")
        return [{index: sources[index] for index in indices} for indices in wanted]

    def run(self, engine: BenchEngine, row: Row, sources: dict[int, str]) -> None:
        """Warm up, and run a row as often as it asks."""
        spec, geometry = engine.parts.spec, engine.parts.geometry
        trace = read_trace(row.trace, row.limit)
        memory = str(engine.parts.config.memory)
        names = engine.register(sources)
        adapter_bytes = sum(engine.images.used_bytes_by_uid().values())
        engine.cap_pool(None)
        if row.share is not None:
            engine.cap_pool(PLAIN_POOL_BYTES + int(row.share * adapter_bytes))
            memory = f"13GB+{row.share:g}"
        others = {"limit": row.limit, **row.settings}
        told = (f"{name}={v}" for name, v in sorted(others.items()) if v is not None and name not in _UNTOLD)
        memory = ", ".join([memory, *told])
        about = {
            "trace": row.trace_name,
            "model": self.model.stem,
            "adapters": row.adapters,
            "memory": memory,
            "settings": row.settings,
            "adapter_bytes": adapter_bytes,
            "pool_bytes": engine.num_pool_pages * geometry.page_bytes,
        }
        requests = make_requests(trace, names, spec.vocab_size, self.args.seed)
        if self.args.warm_up:
            begin = time.perf_counter()
            warm_up(engine, requests, self.args.warm_up)
            about["warm_up_s"] = time.perf_counter() - begin
            self.say(f"{row.trace_name} {row.adapters} {memory}: warm after {about['warm_up_s']:.1f} s")
        costs = ModelCosts.of(spec, geometry.itemsize_bytes)
        runs: list[dict[str, Any]] = []
        self.results.append(report.summary(about, runs))
        for number in range(1, row.repeat + 1):
            if self.is_late:
                return
            engine.register(sources)
            runs.append(measure(engine, requests, costs, self.args.max_run, self.record_of(row, number)))
            self.say(f"{row.trace_name} {row.adapters} {memory} run {number}: {report.line_of(runs[-1])}")
            self.results[-1] = report.summary(about, runs)
            self.write()


def versions() -> dict[str, str]:
    """What the figures depend on, beside our own code."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "flashinfer-python"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found


def run_rows(session: Session, rows: Sequence[Row]) -> None:
    """All rows: those with the same settings on one engine, in their order."""
    order = list(dict.fromkeys(json.dumps(row.settings, sort_keys=True) for row in rows))
    rows = sorted(rows, key=lambda row: order.index(json.dumps(row.settings, sort_keys=True)))
    for _, same_engine in groupby(rows, key=lambda row: row.settings):
        grouped = list(same_engine)
        if session.is_late:
            break
        engine = session.build(grouped[0].settings)
        for _, same_adapters in groupby(grouped, key=lambda row: row.adapters):
            block = list(same_adapters)
            sources = [] if session.is_late else session.lay_out(engine, block)
            for position, row in enumerate(block):
                if session.is_late:
                    break
                session.run(engine, row, sources[position] if sources else session.lay_out(engine, [row])[0])
    if session.is_late:
        session.say("--stop-after is past: whatever was to come is left out")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-config", default="llama3-8b", help="a name in bench/models, or a config.json")
    parser.add_argument("--load-format", default="dummy", help="dummy weights, or auto for those at the path")
    parser.add_argument(
        "--row", action="append", default=[], metavar="TRACE:ADAPTERS[:OPTION=VALUE...]", help="one of several rows"
    )
    parser.add_argument("--plan", type=Path, help="a file of rows, one a line")
    parser.add_argument("--trace", help="one row's trace: a file, or a name in bench/traces")
    parser.add_argument("--adapters", default="none", help="none, s1, s2, s4, s5, s6, r<rank>-all or r<rank>-qkvo")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each row")
    parser.add_argument("--limit", type=int, help="take only so many requests of each trace")
    parser.add_argument("--pool-adapter-share", type=float, help="cap the pool at 13 GB + this share of the adapters")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device, help=f"{device} on this machine")
    parser.add_argument("--memory", help="of the pool: a size, or on a GPU a share of its memory")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-batch-tokens", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any other engine setting")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument("--warm-up", type=int, default=128, metavar="N", help="decode steps before each row; 0: none")
    parser.add_argument("--max-run", type=float, metavar="SECONDS", help="end a run that takes longer")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="begin no further run then")
    parser.add_argument("--cold-start", type=int, metavar="N", help="first tokens of N cold adapters and warm ones")
    parser.add_argument(
        "--loading", type=int, metavar="N", help="windows of N steps, beside copies of adapters and not"
    )
    parser.add_argument("--profile", type=int, metavar="N", help="where N decode steps and a mixed one spend time")
    parser.add_argument("--profile-rows", type=int, default=256, help="sequences that decode meanwhile")
    parser.add_argument("--profile-adapters", default="1,64,256", help="distinct adapters among them; 0: none")
    parser.add_argument(
        "--profile-prompts", type=parse_prompts, default="8x512", metavar="NxTOKENS", help="of the mixed step"
    )
    parser.add_argument("--profile-context", type=int, default=400, help="tokens of each sequence's prompt")
    parser.add_argument("--record-steps", type=Path, metavar="DIR", help="write every run's steps there, for sim fit")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there, after every run")
    parser.add_argument(
        "--record", type=Path, nargs="+", metavar="RESULTS", help="merge such files into --into, no more"
    )
    parser.add_argument(
        "--into", type=Path, default=RECORD, help="the file of recorded rows: docs/benchmarks/h200/engine.json"
    )
    parser.add_argument("--commit", help="the revision that --record notes")
    args = parser.parse_args(arguments)
    if args.record and not args.commit:
        parser.error("--record needs --commit")
    measures = (args.row, args.plan, args.trace, args.profile, args.cold_start, args.loading)
    if not (args.record or any(measures)):
        parser.error("nothing to do: give --trace, --row, --plan, --profile, --cold-start, --loading or --record")
    return args


def parse_prompts(text: str) -> tuple[int, int]:
    """How many prompts of how many tokens, as in 8x512."""
    count, _, tokens = text.partition("x")
    if not (count.isdigit() and tokens.isdigit() and int(count) and int(tokens)):
        raise argparse.ArgumentTypeError(f"must be a number of prompts, x, a number of tokens, got {text!r}")
    return int(count), int(tokens)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The engine settings that all rows begin with."""
    settings: dict[str, Any] = {"load_format": args.load_format, "device": args.device, "seed": args.seed}
    for name in ("memory", "max_num_seqs", "max_batch_tokens"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    for text in args.set:
        settings |= parse_setting(text)
    return settings


def rows_of(args: argparse.Namespace) -> list[Row]:
    """What the command line asks to be run. Raises: ConfigError."""
    defaults = Row(Path(), "none", args.repeat, args.pool_adapter_share, args.limit, settings_of(args))
    planned = args.plan.read_text().splitlines() if args.plan else []
    texts = [*(line.partition("#")[0].strip() for line in planned), *args.row]
    rows = [parse_row(text, defaults) for text in texts if text]
    if args.trace:
        rows.append(parse_row(f"{trace_path(args.trace)}:{args.adapters}", defaults))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print. Returns: the exit status, 1 if a run went wrong."""
    args = parse_arguments(arguments)
    if args.record:
        added, replaced = report.record(args.record, args.into, args.commit)
        print(report.table(report.joined(args.record)))
        print(f"{args.into}: {added} rows added, {replaced} replaced")
        return 0
    if args.profile and args.device == "cpu":
        raise ConfigError("--profile needs a GPU: it shows what the device does")
    model = model_path(args.model_config)
    read_spec(model)  # what cannot be served is refused before anything is built
    session = Session(model, args, HostArena(pin=args.device != "cpu"))
    try:
        run_rows(session, rows_of(args))
        if args.cold_start or args.loading or args.profile:
            engine = session.engine or session.build(settings_of(args))
            engine.cap_pool(None)
            if args.cold_start:
                session.notes["cold_start"] = cold_start(engine, args.adapters, args.cold_start, session.say)
            if args.loading:
                session.notes["loading"] = loading(engine, args.adapters, args.loading, session.say)
            if args.profile:
                counts = [int(count) for count in args.profile_adapters.split(",")]
                shape = args.profile_rows, args.profile_context, args.profile_prompts, args.profile
                session.notes["profile"] = [
                    profile(engine, args.adapters, count, *shape, session.say) for count in counts
                ]
        session.write()
    finally:
        session.close()
        session.arena.close()
    if session.results:
        print("\n" + report.table(session.results), flush=True)
    return int(any(run["problems"] for row in session.results for run in row["runs"]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, ModelRejected, PoolTooSmall) as error:
        sys.exit(f"{type(error).__name__}: {error}")
