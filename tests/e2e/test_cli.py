"""The command line as it is typed: what it prints and how it exits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interleaf.cli import app
from tests.support.peft_folders import write_defective
from tests.support.tiny_models import make_model, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama3"), tmp_path_factory.mktemp("tiny") / "model")


def run(*words: object) -> tuple[int, str]:
    """Exit code, and everything printed on both streams with white space folded."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def test_generate_answers_with_the_base_model_and_every_adapter(smollm2_gguf: Path) -> None:
    code, text = run(
        "generate", smollm2_gguf, "--prompt", "The sky is", "--adapter", "noise=dummy:r=8,targets=all,seed=1",
        "--max-tokens", 4, "--memory", "512MiB",
    )  # fmt: skip
    assert code == 0
    assert text.startswith("base The sky is ")
    assert "noise The sky is " in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--adapter", "nonsense"], "--adapter must be NAME=PATH, got 'nonsense'"),
        (["--adapter", "x=nowhere"], "nowhere"),
        (["--adapter", "base=somewhere"], "`base` is the name of the base model"),
        (["--adapter", "x=a", "--adapter", "x=b"], "--adapter names 'x' twice: 'a' and 'b'"),
        (["--temperature", "-1"], "temperature must be"),
        (["--max-tokens", "0"], "max_tokens must be"),
        (["--memory", "1KiB"], "needs 16 pages and the pool has 0"),
        ([], "no tokenizer"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_a_code(folder: Path, words: list[str], message: str) -> None:
    code, text = run("generate", folder, "--prompt", "hi", *words)
    assert code == 2
    assert message in text
    assert "Traceback" not in text


def test_adapters_check_says_what_an_adapter_is_and_takes(folder: Path) -> None:
    code, text = run("adapters", "check", "dummy:r=4,targets=q+v,seed=1", "--model", folder)
    assert code == 0
    # Worked out by hand: A and B^T of q (64 -> 64) and v (64 -> 32), rank 4, in each of 3 layers; a lane has
    # 2 x 16 tokens x 2 heads x 16 = 1024 elements, so a stream of 4 * (128 + 96) = 896 takes one page.
    assert "ranks 4" in text
    assert "modules q_proj, v_proj" in text
    assert "pages 1 of 12,288 bytes (16 tokens" in text
    assert "bytes 12,288 in the pool, 10,752 of them its weights" in text
    assert "the KV cache of 16 tokens" in text


def test_adapters_check_lists_everything_that_is_wrong_and_exits_1(folder: Path, tmp_path: Path) -> None:
    code, text = run("adapters", "check", write_defective("dora", tmp_path / "a"), "--model", folder)
    assert code == 1
    assert "cannot be served" in text
    assert "use_dora" in text


def test_help_names_the_commands() -> None:
    code, text = run("--help")
    assert code == 0
    assert "generate" in text
    assert "adapters" in text


def test_serving_without_its_packages_says_which_to_install(folder: Path) -> None:
    code = "import sys; sys.modules['starlette'] = None; from interleaf.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "no module 'starlette'" in line
    assert "make serve" in line
