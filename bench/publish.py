"""What loading adapters costs those who wait for tokens: step times with and without a publisher at work.

    python -m bench.publish [--loads-per-s N] [--rank N] [--batch N] [--tokens N] [--rounds N]
        [--settings JSON] [--json PATH]

SmolLM2 decodes a steady batch. In half of the windows the publisher, a process as `interleaf serve` starts it, is asked
for ten adapters of 20 MB a second, each read from its folder, checked, digested, laid out and registered; names are
taken away again, so that the host tier stays as full as it is. A step's time is that of one turn of the engine's loop,
taken inside the engine's process, which is this one. Every round has one window of each kind, the order alternating.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from interleaf.config import EngineConfig
from interleaf.core import Event, ModelSpec, Module, SamplingParams
from interleaf.engine.channel import ENGINE_SOCKET, Endpoint
from interleaf.engine.child import Child
from interleaf.engine.messages import Boot
from interleaf.engine.process import EngineServer
from interleaf.engine.remote import RemoteEngine

DEFAULT_MODEL = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDERS, NAMES = 24, 12
"""Adapters on disk, and how many of them have a name at a time: each load finds its adapter unknown."""

OUTSTANDING = 2
WARM_TOKENS = 16
"""Of every sequence, before a window begins: prompts are computed and all adapters' names are withdrawn by then."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of steady decoding. Seconds are of the machine's monotonic clock, which all processes share."""

    loading: bool
    begin_s: float
    end_s: float
    loads: int


@dataclass(frozen=True, slots=True)
class Round:
    """One window of each kind. Milliseconds; loads are per second, and those that ended within the window."""

    quiet_p50: float
    quiet_p99: float
    loading_p50: float
    loading_p99: float
    loads_per_s: float


# ---------------------------------------------------------------- the engine's side: this process


def measure(args: argparse.Namespace, folder: Path) -> list[Round]:
    """Run engine, publisher and driver, and put the engine's times into the driver's windows."""
    run, slabs = folder / "run", Path(tempfile.mkdtemp(prefix="interleaf-", dir=args.slab_dir))
    run.mkdir()
    own = {"memory": args.memory, "max_num_seqs": args.batch, "adapter_host_memory": args.host_memory}
    config = EngineConfig(**own | json.loads(args.settings))
    boot = Boot(str(run), str(slabs), model=str(args.model), config=config)
    try:
        server = EngineServer(str(args.model), boot, Endpoint(str(run / ENGINE_SOCKET)))
        mb = write_adapters(folder / "adapters", server.parts.spec, args.rank) / 1e6
        print(
            f"{FOLDERS} adapters of rank {args.rank}, {mb:.1f} MB each; {os.cpu_count()} cores, "
            f"{torch.get_num_threads()} torch threads; {args.batch} sequences",
            flush=True,
        )
        publisher = Child("publisher", "publisher", boot)
        command = [sys.executable, "-m", "bench.publish", "--drive", str(folder), *sys.argv[1:]]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE)
        ended = threading.Event()
        threading.Thread(target=lambda: (driver.wait(), ended.set()), daemon=True).start()
        ends: list[tuple[float, float]] = []
        before = time.monotonic()
        while not ended.is_set():
            server.turn()
            now = time.monotonic()
            ends.append((now, 1e3 * (now - before)))
            before = now
        publisher.kill()
        publisher.close()
        server.stop()
        server.run()  # ends everything
    finally:
        shutil.rmtree(slabs)
    assert driver.stdout is not None
    windows = [Window(**json.loads(line)) for line in driver.stdout]
    assert driver.returncode == 0, driver.returncode
    assert len(windows) == 2 * args.rounds, windows
    return [round_of(ends, *windows[at : at + 2]) for at in range(0, len(windows), 2)]


def round_of(ends: list[tuple[float, float]], *windows: Window) -> Round:
    """One round's figures."""
    quiet, loading = sorted(windows, key=lambda window: window.loading)
    figures = []
    for window in (quiet, loading):
        times = [ms for end, ms in ends if window.begin_s <= end - ms / 1e3 and end <= window.end_s]
        figures += [statistics.median(times), statistics.quantiles(times, n=100, method="inclusive")[98]]
    return Round(*figures, loading.loads / (loading.end_s - loading.begin_s))


def write_adapters(folder: Path, spec: ModelSpec, rank: int) -> int:
    """PEFT folders of float32 adapters on every module. Returns: bytes of one adapter's file."""
    for number in range(FOLDERS):
        generator = torch.Generator().manual_seed(number)
        path = folder / str(number)
        path.mkdir(parents=True)
        tensors = {}
        for layer, module in itertools.product(range(spec.num_layers), Module):
            block = "mlp" if module in (Module.GATE, Module.UP, Module.DOWN) else "self_attn"
            key = f"base_model.model.model.layers.{layer}.{block}.{module}"
            shapes = {"A": (rank, spec.in_features(module)), "B": (spec.out_features(module), rank)}
            for half, shape in shapes.items():
                tensors[f"{key}.lora_{half}.weight"] = torch.randn(shape, generator=generator) * 0.02
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
        (path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": [str(m) for m in Module]}))
    return (folder / "0" / "adapter_model.safetensors").stat().st_size


# ---------------------------------------------------------------- the clients' side: the driver's process


async def drive(args: argparse.Namespace, folder: Path) -> None:
    """Ask for tokens and loads; print one line of JSON for each window."""
    engine = await RemoteEngine.connect(folder / "run")
    loader = Loader(engine, folder / "adapters", args.loads_per_s)
    await window(engine, args, loader)  # both warm up
    for turn in range(args.rounds):
        for loading in (False, True) if turn % 2 == 0 else (True, False):
            print(json.dumps(asdict(await window(engine, args, loader if loading else None))), flush=True)
    await engine.close()


async def window(engine: RemoteEngine, args: argparse.Namespace, loader: Loader | None) -> Window:
    """One batch from its first to its last token, loads within it."""
    params = SamplingParams(max_tokens=args.tokens + WARM_TOKENS, temperature=0, ignore_eos=True)
    streams = [counted(engine.generate(range(100 + at, 132 + at), params, None)) for at in range(args.batch)]
    warm = asyncio.gather(*(anext(stream) for stream in streams))
    await warm
    begin, loads = time.monotonic(), 0 if loader is None else loader.loads
    task = None if loader is None else asyncio.create_task(loader.run())
    await asyncio.wait([asyncio.create_task(anext(stream)) for stream in streams], return_when="FIRST_COMPLETED")
    done = Window(loader is not None, begin, time.monotonic(), 0 if loader is None else loader.loads - loads)
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    while (await engine.stats()).running_sequences:
        await asyncio.sleep(0.05)
    return done


async def counted(events: AsyncIterator[list[Event]]) -> AsyncIterator[None]:
    """Yields when a sequence is warm, and when it has ended."""
    tokens = 0
    async for batch in events:
        before, tokens = tokens, tokens + len(batch)
        if before < WARM_TOKENS <= tokens:
            yield
    yield


class Loader:
    """Asks for adapters at a steady rate, never for more than a few at a time.

    Attributes:
        loads: that have ended.
    """

    def __init__(self, engine: RemoteEngine, folder: Path, loads_per_s: float) -> None:
        self._engine = engine
        self._folder = folder
        self._period_s = 1 / loads_per_s
        self._numbers = itertools.count()
        self.loads = 0

    async def run(self) -> None:
        """Until cancelled; what is on its way then is waited for."""
        due, running = time.monotonic(), set[asyncio.Task[None]]()
        try:
            while True:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                due = max(due + self._period_s, time.monotonic() - self._period_s)
                if len(running) == OUTSTANDING:
                    _, running = await asyncio.wait(running, return_when="FIRST_COMPLETED")
                running.add(asyncio.create_task(self._load(next(self._numbers))))
        finally:
            await asyncio.gather(*running)

    async def _load(self, number: int) -> None:
        if number >= NAMES:
            await self._engine.unload_adapter(f"adapter-{number - NAMES}")
        await self._engine.load_adapter(f"adapter-{number}", str(self._folder / str(number % FOLDERS)))
        self.loads += 1


# ---------------------------------------------------------------- report


def report(rounds: list[Round]) -> None:
    """Medians over the rounds, and the spread of the ratios."""
    middle = {name: statistics.median(asdict(r)[name] for r in rounds) for name in asdict(rounds[0])}
    p50 = [r.loading_p50 / r.quiet_p50 for r in rounds]
    p99 = [r.loading_p99 / r.quiet_p99 for r in rounds]
    print(f"steps, no loads:   p50 {middle['quiet_p50']:.1f} ms, p99 {middle['quiet_p99']:.1f} ms")
    print(f"steps, with loads: p50 {middle['loading_p50']:.1f} ms, p99 {middle['loading_p99']:.1f} ms")
    print(f"loads a second: {middle['loads_per_s']:.1f} (least {min(r.loads_per_s for r in rounds):.1f})")
    for name, ratios in (("p50", p50), ("p99", p99)):
        print(f"{name} ratio: {statistics.median(ratios):.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f})")


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes with the run."""
    with tempfile.TemporaryDirectory(prefix="interleaf-bench-") as path:
        yield Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--loads-per-s", type=float, default=10.0)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters; 16 makes 20 MB in float32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="of every sequence in a window")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--settings", default="{}", help='of the engine, as JSON; for a GPU: \'{"device": "cuda"}\'')
    parser.add_argument("--slab-dir", default="/dev/shm")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drive:
        asyncio.run(drive(args, args.drive))
        return
    with scratch() as folder:
        rounds = measure(args, folder)
    report(rounds)
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in rounds], indent=1))


if __name__ == "__main__":
    main()
