"""From settings to a running server: address, warnings, first adapters, processes. Knows no endpoint.

    bind the address ─▶ engine, publisher ─▶ adapters ─▶ listen ─▶ API processes ─▶ ready

What can go wrong goes wrong before the port answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from interleaf.config import ServerConfig
from interleaf.engine import supervisor
from interleaf.engine.serving import AsyncEngine
from interleaf.errors import AdapterError, AdapterRejected, ConfigError, PoolTooSmall
from interleaf.server.open_files import raise_limit
from interleaf.server.roots import AdapterRoots
from interleaf.server.settings import Settings

Progress = Callable[[str, int, int], None]
logger = logging.getLogger(__name__)

_LOADS_AT_A_TIME = 16
"""Adapters that the publisher is asked for before the server starts: more than it works on at a time."""


def serve(settings: Settings, progress: Progress, on_ready: Callable[[str], None]) -> int:
    """Serve until a signal; to be called from the main thread. Returns: the exit code.

    Args:
        on_ready: called with the server's URL once it answers.

    Raises, before the port answers: ConfigError, ModelRejected, CheckpointError, PoolTooSmall, AdapterError.
    """
    config = settings.server
    AdapterRoots(config.allow_adapter_root, config.adapters_dir)  # what is no folder is said before a model is read
    raise_limit(config.max_connections)
    with bind(config) as listener:
        url = url_of(listener)
        return supervisor.serve(
            config.model,
            settings.engine,
            entry="interleaf.server.api:work",
            settings=dataclasses.asdict(config),
            prepare=lambda engine: load_adapters(engine, config, progress),
            listen=lambda: [listener],
            on_ready=lambda: on_ready(url),
            api_workers=config.api_workers,
            slab_dir=config.slab_dir,
            publisher_threads=config.publisher_threads,
            drain_timeout_s=config.drain_timeout,
            exit_after_s=config.exit_after,
            progress=progress,
        )


def bind(config: ServerConfig) -> socket.socket:
    """A socket that has its address but does not listen yet. Raises: ConfigError: it cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"host={config.host} port={config.port} cannot be had: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients of this machine reach a listening socket."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


async def load_adapters(engine: AsyncEngine, config: ServerConfig, progress: Progress) -> None:
    """Register what the settings name: each `--adapter`, then the folders of `--adapters-dir`.

    Raises: AdapterError, PoolTooSmall: one that was named cannot be served. Those of a folder are logged and left out.
    """
    named = dict(config.adapters)
    if config.name in named:
        raise ConfigError(f"adapters: the name {config.name!r} is the base model's (served_model_name)")
    found = {name: path for name, path in adapter_folders(config.adapters_dir).items() if name not in named}
    sources = {**named, **found}
    window = asyncio.Semaphore(_LOADS_AT_A_TIME)

    async def load(name: str, source: str) -> None:
        async with window:
            await engine.load_adapter(name, source)

    loads = {name: asyncio.ensure_future(load(name, source)) for name, source in sources.items()}
    try:
        for done, (name, loaded) in enumerate(loads.items(), start=1):
            try:
                await loaded
            except (AdapterError, PoolTooSmall) as error:
                if name in named:
                    raise
                problems = error.problems if isinstance(error, AdapterRejected) else (str(error),)
                logger.warning("adapter %r is left out: %s", name, "; ".join(problems))
            progress("adapters", done, len(loads))
    finally:
        for loaded in loads.values():
            loaded.cancel()
        await asyncio.gather(*loads.values(), return_exceptions=True)


def adapter_folders(folder: str | None) -> dict[str, str]:
    """Adapter folders directly inside a folder, by name. The base of `--adapters-dir`."""
    if folder is None:
        return {}
    found = sorted(path.parent for path in Path(folder).glob("*/adapter_config.json"))
    return {path.name: str(path) for path in found}


def warnings(config: ServerConfig) -> list[str]:
    """What an operator should know about these settings before strangers find out."""
    is_local = config.host in ("127.0.0.1", "localhost", "::1")
    found = []
    if not config.api_key and not is_local:
        found.append(f"host={config.host} is reachable from other machines and no api_key is set: everybody is served")
    if "*" in config.cors_origin and not config.api_key:
        found.append("cors_origin=* without an api_key: any web page in a browser that reaches this server can use it")
    if any(len(key) < 16 for key in config.api_key):
        found.append("an api_key has fewer than 16 characters and could be guessed")
    return found
