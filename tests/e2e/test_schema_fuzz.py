"""Schemathesis draws requests from the server's own OpenAPI document: whatever they are, no answer is a 5xx."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi import FastAPI

from interleaf.config import ServerConfig
from interleaf.engine.serving import AsyncEngine
from interleaf.engine.tokenizer import load_tokenizer
from interleaf.server.app import create_app
from tests.support.local_server import LocalServer
from tests.support.null_engine import NullEngine
from tests.support.tiny_text import save_tokenizer

REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WHOLES = ("n", "best_of", "top_k", "max_tokens", "min_tokens", "max_completion_tokens", "top_logprobs", "seed")
SECONDS = 180


@pytest.mark.long
def test_no_request_that_the_schema_allows_or_nearly_allows_gets_a_5xx(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)

    async def build() -> tuple[FastAPI, AsyncEngine]:
        engine = NullEngine(lambda prompt, index: [5, 6, 7], max_model_len=256, adapters=("red",))
        app = create_app(engine, load_tokenizer(str(tmp_path)), ServerConfig(model="tiny"))
        for name, body in app.openapi()["components"]["schemas"].items():
            if name in ("CompletionBody", "ChatBody"):  # what is drawn at random would seldom get past the checks
                body["properties"] |= {
                    "model": {"enum": ["tiny", "red"]},
                    **{name: {"type": "number", "minimum": 0.1, "maximum": 1} for name in REALS},
                    **{name: {"type": "integer", "minimum": 1, "maximum": 3} for name in WHOLES},
                }
                body["required"] = ["model", "prompt" if name == "CompletionBody" else "messages"]
        return app, engine

    with LocalServer(build) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "fuzz", f"{server.url}/openapi.json"]
        options = ["--checks=not_a_server_error", f"--max-time={SECONDS}", "--include-method=POST", "--no-color"]
        done = subprocess.run(
            command + options, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=SECONDS + 120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
