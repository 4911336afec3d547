"""A whole server in processes, with line_server in place of HTTP: `python -m tests.support.serve_lines SETTINGS`.

SETTINGS is JSON: model, config, adapters, api_workers, slab_dir, exit_after_s. Prints one line of JSON when ready, with
the port; or the error that kept it from starting.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from interleaf.config import EngineConfig
from interleaf.engine.serving import AsyncEngine
from interleaf.engine.supervisor import serve
from interleaf.errors import InterleafError
from tests.support.line_server import ENTRY
from tests.support.waiting import WAIT_S


def main(settings: dict[str, Any]) -> int:
    listener = socket.socket()

    async def prepare(engine: AsyncEngine) -> None:
        for name, source in settings.get("adapters", {}).items():
            await engine.load_adapter(name, source)

    def listen() -> Sequence[socket.socket]:
        listener.bind(("127.0.0.1", 0))
        port[0] = listener.getsockname()[1]
        return [listener]

    def on_ready() -> None:
        print(json.dumps({"port": port[0], "pid": os.getpid()}), flush=True)

    port = [0]
    try:
        return serve(
            settings["model"],
            EngineConfig(**settings["config"]),
            entry=ENTRY,
            settings={},
            prepare=prepare,
            listen=listen,
            on_ready=on_ready,
            api_workers=settings.get("api_workers", 1),
            slab_dir=settings["slab_dir"],
            drain_timeout_s=WAIT_S,
            exit_after_s=settings.get("exit_after_s"),
        )
    except InterleafError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error), "bound": port[0] != 0}), flush=True)
        return 3


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
