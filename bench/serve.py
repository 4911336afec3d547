"""What serving costs with a real engine: `interleaf serve` against `LLM.generate` on the same requests.

    python -m bench.serve [--requests N] [--tokens N] [--rounds N] [--settings JSON] [--json PATH]

The server is the program itself, in its processes, over the built-in model and the example adapters; every request is
a streamed completion over a connection of its own, all at once. `LLM` lives in this process, with the same settings.
The load generator's own work is in the server's time. Every round runs both, the order alternating, and the other side
idles meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.http import DEFAULT_MODEL, wait_for
from interleaf import LLM, SamplingParams

ADAPTERS = Path(__file__).resolve().parents[1] / "examples" / "adapters"
SENTENCES = (
    "The sea is wide, and nobody who has seen it from a small boat calls it blue without a reason. Tell me more.",
    "A list of things that a careful gardener does before the first frost of the year, and why each of them helps:",
    "Once upon a time a baker found a coin in the dough. It was old and warm and it hummed, so the baker decided to",
    "Explain to somebody who has never been in a city how a tram knows where it has to go and when it must stop.",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, for both sides."""

    prompt: str
    adapter: str


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds for all requests, on either side, and requests whose texts are the same."""

    llm_s: float
    server_s: float
    same: int


def requests(count: int) -> list[Asked]:
    """Requests that take the adapters in turn."""
    names = sorted(path.parent.name for path in ADAPTERS.glob("*/adapter_config.json"))
    return [Asked(f"{at}. {SENTENCES[at % len(SENTENCES)]}", names[at % len(names)]) for at in range(count)]


def ask_llm(llm: LLM, asked: Sequence[Asked], tokens: int) -> list[str]:
    """All texts, by one call."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    outputs = llm.generate([one.prompt for one in asked], params, adapter=[one.adapter for one in asked])
    return [output.outputs[0].text for output in outputs]


async def ask_server(port: int, asked: Sequence[Asked], tokens: int) -> list[str]:
    """All texts, each from a stream of its own."""

    async def stream(one: Asked) -> bytes:
        body: dict[str, Any] = {"model": one.adapter, "prompt": one.prompt, "max_tokens": tokens, "temperature": 0}
        content = json.dumps(body | {"ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(content)}"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}\r\ncontent-type: application/json\r\n\r\n".encode() + content)
        answer = await reader.read(-1)
        writer.close()
        return answer

    return [text_of(answer) for answer in await asyncio.gather(*(stream(one) for one in asked))]


def text_of(answer: bytes) -> str:
    """The text in a streamed answer, as it came over the wire. Raises: AssertionError: it is no whole stream."""
    lines = answer.splitlines()
    assert lines[0].startswith(b"HTTP/1.1 200"), answer[:500]
    assert b"data: [DONE]" in lines, answer[-500:]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def measure(llm: LLM, port: int, asked: Sequence[Asked], tokens: int, rounds: int) -> list[Round]:
    """Both sides in turn, after one round that warms up."""
    found = []
    for turn in range(rounds + 1):
        seconds: dict[str, float] = {}
        texts: dict[str, list[str]] = {}
        for side in ("llm", "server") if turn % 2 else ("server", "llm"):
            begin = time.perf_counter()
            if side == "llm":
                texts[side] = ask_llm(llm, asked, tokens)
            else:
                texts[side] = asyncio.run(ask_server(port, asked, tokens))
            seconds[side] = time.perf_counter() - begin
        same = sum(a == b for a, b in zip(texts["llm"], texts["server"], strict=True))
        if turn:
            found.append(Round(seconds["llm"], seconds["server"], same))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEFAULT_MODEL))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", default='{"memory": "512MiB"}', help="of the engine, as JSON; for both sides")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = json.loads(args.settings)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [
        sys.executable,
        "-c",
        "from interleaf.cli import main; main()",
        "serve",
        args.model,
        "--adapters-dir",
        str(ADAPTERS),
        *flags,
    ]
    server = subprocess.Popen([*command, "--port", str(port), "--log-level", "warning"])
    try:
        wait_for(port)
        asked = requests(args.requests)
        adapters = {one.adapter: ADAPTERS / one.adapter for one in asked}
        with LLM(args.model, adapters=adapters, **settings) as llm:
            rounds = measure(llm, port, asked, args.tokens, args.rounds)
    finally:
        server.terminate()
        server.wait()
    total = args.requests * args.tokens
    ratios = [one.llm_s / one.server_s for one in rounds]
    print(f"{args.requests} requests over {len(adapters)} adapters, {args.tokens} tokens each, {args.rounds} rounds")
    for side, seconds in (("LLM", [r.llm_s for r in rounds]), ("server", [r.server_s for r in rounds])):
        speeds = sorted(total / s for s in seconds)
        print(f"{side:7} {statistics.median(speeds):6.1f} tokens/s ({speeds[0]:.1f}-{speeds[-1]:.1f})")
    print(f"server / LLM: {statistics.median(ratios):.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f})")
    print(f"the same text: {min(r.same for r in rounds)} of {args.requests} requests at least")
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in rounds], indent=1))


if __name__ == "__main__":
    main()
