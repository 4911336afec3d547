"""A client of its own process that asks thousands of adapters at once, each on a connection of its own.

All connections are open before the first byte is sent: whatever a server says to so many, it says to all of them.
Prints, as JSON: answers by status, of those that failed by exception; what 200s and errors said, each once.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections import Counter

PROMPT = [5, 6, 7]
TOKENS = 2


def request(model: str) -> bytes:
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    content = json.dumps(body | {"return_token_ids": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def burst(port: int, count: int) -> dict[str, object]:
    outcomes: Counter[str] = Counter()
    said: Counter[str] = Counter()
    num_connected = 0
    all_connected = asyncio.Event()

    async def ask(model: str) -> None:
        nonlocal num_connected
        try:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            finally:
                num_connected += 1
                if num_connected == count:
                    all_connected.set()
            await all_connected.wait()
            writer.write(request(model))
            answer = await reader.read()
            writer.close()
        except OSError as error:
            outcomes[type(error).__name__] += 1
            return
        if not answer:
            outcomes["nothing"] += 1
            return
        head, _, content = answer.partition(b"\r\n\r\n")
        status, body = head.split()[1].decode(), json.loads(content)
        outcomes[status] += 1
        if status == "200":
            said[f"{len(body['choices'][0]['token_ids'])} tokens"] += 1
        else:
            code = "retry-after" if b"retry-after:" in head.lower() else "no retry-after"
            said[f"{status}, {code}, {body['error']['type']}"] += 1

    await asyncio.gather(*(ask(f"a{i}") for i in range(count)))
    return {"outcomes": outcomes, "said": said}


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(json.dumps(asyncio.run(burst(int(sys.argv[1]), int(sys.argv[2])))))
