"""The simulator's command line: `python -m interleaf.sim run | fit`. Parses and prints; the modules beside it work."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TextIO

import typer

from interleaf.config import parse_bytes
from interleaf.errors import ConfigError, InterleafError
from interleaf.sim import fit as fitting
from interleaf.sim import report
from interleaf.sim.cost import DEFAULT_OVERHEAD_S, CostModel, Linear, StepWork, roofline
from interleaf.sim.hardware import GPUS, find_gpu
from interleaf.sim.shapes import MODELS, TARGETS, AdapterShape, ModelShape, model_shape
from interleaf.sim.simulate import simulate
from interleaf.sim.workload import draw, read_trace
from interleaf.sim.world import Settings, build_world

app = typer.Typer(
    help="Run the engine's own scheduler under a fake clock: how many adapters, how much memory, what latency.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_WORKLOAD, _MACHINE, _ENGINE = "Workload", "Machine", "Engine"


@app.command()
def run(
    trace: Annotated[
        Path | None, typer.Option(help="A trace of JSON lines instead of a drawn workload.", rich_help_panel=_WORKLOAD)
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests drawn.", rich_help_panel=_WORKLOAD)] = 10_000,
    num_adapters: Annotated[int, typer.Option(help="Adapters.", rich_help_panel=_WORKLOAD)] = 1000,
    arrivals: Annotated[
        str, typer.Option(help="once, poisson:RATE or bursts:RATE (a second).", rich_help_panel=_WORKLOAD)
    ] = "poisson:20",
    popularity: Annotated[str, typer.Option(help="uniform or zipf:A.", rich_help_panel=_WORKLOAD)] = "zipf:1",
    prompt: Annotated[
        str, typer.Option(help="fixed:N, uniform:LOW-HIGH or lognormal:MEAN tokens.", rich_help_panel=_WORKLOAD)
    ] = "lognormal:85",
    output: Annotated[str, typer.Option(help="Likewise.", rich_help_panel=_WORKLOAD)] = "lognormal:165",
    base_share: Annotated[
        float, typer.Option(help="Share of requests for the base model.", rich_help_panel=_WORKLOAD)
    ] = 0.0,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="What requests declare; they end earlier by an end token. By default they declare their length.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the drawn workload.", rich_help_panel=_WORKLOAD)] = 0,
    warm_up: Annotated[
        float, typer.Option(help="Share of the requests that figures leave out.", rich_help_panel=_WORKLOAD)
    ] = 0.1,
    model: Annotated[
        str, typer.Option(help=f"{', '.join(MODELS)}, or a config.json.", rich_help_panel=_MACHINE)
    ] = "llama3-8b",
    gpu: Annotated[str, typer.Option(help=", ".join(GPUS), rich_help_panel=_MACHINE)] = "h200",
    gpus: Annotated[int, typer.Option(help="That share the model.", rich_help_panel=_MACHINE)] = 1,
    overhead: Annotated[
        float, typer.Option(help="Seconds of a step beside the roofline.", rich_help_panel=_MACHINE)
    ] = DEFAULT_OVERHEAD_S,
    cost: Annotated[
        Path | None, typer.Option(help="Rates that `fit --save` wrote, for the roofline.", rich_help_panel=_MACHINE)
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(help="For adapters, such as 64GB; by default all fit.", rich_help_panel=_MACHINE),
    ] = None,
    disk_rate: Annotated[
        str, typer.Option(help="Bytes a second at which the others are read.", rich_help_panel=_MACHINE)
    ] = "2GB",
    ranks: Annotated[
        str, typer.Option(help="Of the adapters, in turn: 16 or 64,32,16,8.", rich_help_panel=_ENGINE)
    ] = "16",
    targets: Annotated[str, typer.Option(help=f"{', '.join(TARGETS)}.", rich_help_panel=_ENGINE)] = "all",
    pool: Annotated[
        str | None,
        typer.Option(help="Bytes of the page pool; by default what the weights leave.", rich_help_panel=_ENGINE),
    ] = None,
    memory_split: Annotated[
        float | None,
        typer.Option(
            help="Share of the pool that only adapters may use; by default they share it with KV.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    page_tokens: Annotated[int, typer.Option(help="Tokens of KV in a page.", rich_help_panel=_ENGINE)] = 16,
    max_num_seqs: Annotated[int, typer.Option(help="Seats.", rich_help_panel=_ENGINE)] = 256,
    max_batch_tokens: Annotated[int, typer.Option(help="Rows of a step at most.", rich_help_panel=_ENGINE)] = 8192,
    refill_seats: Annotated[
        int | None, typer.Option(help="Seats that are refilled together; a sixteenth of all.", rich_help_panel=_ENGINE)
    ] = None,
    admission: Annotated[
        str, typer.Option(help="optimistic, estimated or conservative.", rich_help_panel=_ENGINE)
    ] = "estimated",
    eviction: Annotated[str, typer.Option(help="cost or lru.", rich_help_panel=_ENGINE)] = "cost",
    prefetch_loads: Annotated[
        int, typer.Option(help="Adapters on their way at most for requests without a seat.", rich_help_panel=_ENGINE)
    ] = 8,
    max_loads: Annotated[int, typer.Option(help="Adapters on their way at most.", rich_help_panel=_ENGINE)] = 32,
    prefix_cache: Annotated[
        bool, typer.Option(help="Sequences that begin alike share pages.", rich_help_panel=_ENGINE)
    ] = False,
    swap_memory: Annotated[
        str, typer.Option(help="Host memory for pages of preempted sequences; 0: none.", rich_help_panel=_ENGINE)
    ] = "4GiB",
    overlap: Annotated[bool, typer.Option(help="Plan the next step while one runs.", rich_help_panel=_ENGINE)] = True,
    record: Annotated[Path | None, typer.Option(help="Write every step's work and time, as `fit` reads it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Serve a workload and say what it came to: tokens a second, TTFT, waits, hits, loads."""
    with _errors_as_messages(), ExitStack() as files:
        if trace is not None:
            workload = read_trace(trace)
        else:
            workload = draw(
                num_requests=requests,
                num_adapters=num_adapters,
                arrivals=arrivals,
                popularity=popularity,
                prompt=prompt,
                output=output,
                base_share=base_share,
                seed=seed,
            )
        if not 0 <= warm_up < 1:
            raise ConfigError(f"warm-up must be a share from 0 to below 1, got {warm_up}")
        shape = model_shape(model, page_tokens=page_tokens, world=gpus)
        device = find_gpu(gpu)
        settings = Settings(
            pool_pages=None if pool is None else shape.geometry.pages_for_bytes(parse_bytes("pool", pool)),
            memory_split=memory_split,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            refill_seats=refill_seats,
            admission=admission,
            eviction=eviction,
            prefetch_loads=prefetch_loads,
            max_loads=max_loads,
            prefix_cache=prefix_cache,
            swap_memory_bytes=parse_bytes("swap_memory", swap_memory, may_be_zero=True),
            overlap=overlap,
            host_memory_bytes=None if host_memory is None else parse_bytes("host_memory", host_memory),
            disk_bytes_s=parse_bytes("disk_rate", disk_rate),
        )
        steps: CostModel = roofline(device, shape, overhead) if cost is None else Linear.load(cost)
        world = build_world(
            workload,
            model=shape,
            gpu=device,
            adapters=_adapters(shape, workload.num_adapters, ranks, targets),
            settings=settings,
            cost=steps,
            record=None if record is None else _Recorder(files.enter_context(record.open("w", encoding="utf-8"))),
        )
        outcome = simulate(world, workload, warm_up=int(len(workload) * warm_up), max_tokens=max_tokens)
        found = report.figures(outcome, workload)
        print(json.dumps(asdict(found), indent=2) if as_json else report.as_text(found))


@app.command("fit")
def fit_record(
    record: Annotated[Path, typer.Argument(help="Steps as JSON lines; docs/simulator.md describes them.")],
    save: Annotated[Path | None, typer.Option(help="Write the rates, for `run --cost`.")] = None,
) -> None:
    """Find the rates of a cost model in an engine's record of steps."""
    with _errors_as_messages():
        found = fitting.fit(*fitting.read_record(record))
        print(fitting.as_text(found))
        if save is not None:
            found.cost.save(save)


def _adapters(shape: ModelShape, count: int, ranks: str, targets: str) -> list[AdapterShape]:
    """One shape each, the ranks in turn."""
    if targets not in TARGETS:
        raise ConfigError(f"targets must be one of {', '.join(TARGETS)}, got {targets!r}")
    parts = ranks.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= 4096 for part in parts):
        raise ConfigError(f"ranks must be whole numbers from 1 to 4096 joined by commas, got {ranks!r}")
    shapes = [shape.adapter(int(part), TARGETS[targets]) for part in parts]
    return [shapes[index % len(shapes)] for index in range(count)]


class _Recorder:
    """Writes steps as `fit` reads them."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __call__(self, work: StepWork, seconds: float) -> None:
        self._file.write(json.dumps(asdict(work) | {"seconds": seconds}) + "\n")


@contextmanager
def _errors_as_messages() -> Iterator[None]:
    """Errors that a caller can cause become one line and exit code 2; bugs keep their traceback."""
    try:
        yield
    except InterleafError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def main() -> None:
    """Entry point of `python -m interleaf.sim`."""
    app()
