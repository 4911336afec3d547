"""`interleaf serve --help` on a narrow terminal, and what is said of numbers that are none."""

import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interleaf.cli import app
from interleaf.config import EngineConfig
from interleaf.server.help_page import help_lines
from interleaf.server.option import shown_bytes
from interleaf.server.options import BY_NAME, OPTIONS, Kind


def page(columns: int) -> str:
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": str(columns), "TERM": "dumb"})
    assert result.exit_code == 0
    return result.output


def entries(text: str) -> dict[str, str]:
    """What the page says of each option, in one line, by its flag."""
    found = {}
    for entry in re.split(r"\n(?=  --?[a-z]|  MODEL|\n)", text):
        if words := entry.split():
            found[words[0]] = " ".join(words)
    return found


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_every_option_stands_there_whole_with_its_unit_its_default_and_its_meaning(columns: int) -> None:
    found = entries(page(columns))
    for option in OPTIONS:
        if option.name == "model":
            assert found["MODEL"] == f"MODEL {option.help}"
            continue
        default = f" (default: {option.default})" if option.default else ""
        assert found[option.flag] == f"{option.flags} {option.metavar}".rstrip() + f"{default} {option.help}"
    assert "--config" in found


def test_every_option_has_a_unit_or_is_a_switch_and_says_what_holds_without_it() -> None:
    for option in OPTIONS:
        assert option.metavar or option.kind is Kind.SWITCH, option.name
        assert option.default or option.name in ("model",), option.name
        assert "by default" not in option.help.lower(), f"{option.name}: its default is said twice"


def test_no_line_is_wider_than_the_terminal() -> None:
    assert [line for line in page(80).splitlines() if len(line) > 80] == []
    assert max(map(len, page(200).splitlines())) <= 100, "long lines are hard to read"


def test_a_terminal_without_columns_gets_a_page_too() -> None:
    assert page(0) == page(100)


def test_options_stand_in_their_groups() -> None:
    lines = [line for line, _ in help_lines("About.", 80)]
    headings = [line for line, is_heading in help_lines("About.", 80) if is_heading][1:]
    assert headings == list(dict.fromkeys(option.group for option in OPTIONS))
    under = ""
    for line in lines:
        under = line if line in headings else under
        if found := re.match(r"  (--[a-z-]+)", line):
            names = [option for option in OPTIONS if option.flag == found[1]]
            assert [option.group for option in names] == [under] if names else found[1] == "--config"


def test_defaults_are_those_of_the_settings_on_both_devices() -> None:
    on_cpu, on_gpu = EngineConfig(), EngineConfig(device="cuda")
    assert BY_NAME["memory"].default == f"{shown_bytes(on_cpu.memory_bytes)}, on a GPU {on_gpu.memory_fraction}"
    assert BY_NAME["max_num_seqs"].default == f"{on_cpu.max_num_seqs}, on a GPU {on_gpu.max_num_seqs}"
    assert BY_NAME["swap_memory"].default == f"0, on a GPU {shown_bytes(on_gpu.swap_memory_bytes)}"
    disk = EngineConfig(adapter_disk_dir="folder")
    assert (
        BY_NAME["adapter_disk_memory"].default == f"none; with the folder {shown_bytes(disk.adapter_disk_memory_bytes)}"
    )
    assert BY_NAME["keep_alive"].default == "30"
    assert BY_NAME["device"].default == "cpu"


def test_sizes_are_shown_in_the_largest_unit_that_divides_them() -> None:
    shown = [shown_bytes(size) for size in (0, 1000, 1024, 3 * 2**20, 2**30, 5 * 2**40, 2**30 + 1)]
    assert shown == ["0", "1000", "1KiB", "3MiB", "1GiB", "5TiB", "1073741825"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "http"], "port must be a whole number from 0 to 65535, got 'http' (from --port)"),
        (["--port", "-1"], "port must be a whole number from 0 to 65535, got -1 (from --port)"),
        (["--max-num-seqs", "1.5"], "max_num_seqs must be a whole number from 1 to 65536, got '1.5'"),
        (["--keep-alive", "long"], "keep_alive must be a number of seconds from 0 to 86400, got 'long'"),
        (["--load-timeout", "inf"], "load_timeout must be a number of seconds over 0, at most 86400, got inf"),
        (["--swap-memory", "-1"], "swap_memory must be 0 for none, or a size such as"),
        (["--memory-split", "2"], "memory_split must be a share between 0 and 1, excluding both, got '2' (from"),
        (["--prefetch-loads", "40"], "prefetch_loads=40 is over max_loads=32"),
        (["--adapter-disk-memory", "1GiB"], "adapter_disk_memory=1073741824 without adapter_disk_dir"),
    ],
)
def test_serve_refuses_a_value_in_one_line_with_its_limits(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", "model", *words])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-tokens", "many"], "max_tokens must be a whole number >= 1, got 'many'"),
        (["--max-tokens", "2.5"], "max_tokens must be a whole number >= 1, got '2.5'"),
        (["--temperature", "hot"], "temperature must be a number from 0 to 100, got 'hot'"),
        (["--top-p", "0"], "top_p must be a number in (0, 1], got 0.0"),
        (["--top-k", "x"], "top_k must be a whole number >= 0, got 'x'"),
        (["--page-tokens", "x"], "page_tokens must be one of 1, 2, 4, 8, 16, 32, 64, got 'x'"),
        (["--max-model-len", "x"], "max_model_len must be a whole number from 1 to 2147483648, got 'x'"),
    ],
)
def test_generate_refuses_a_number_in_one_line_with_its_limits(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["generate", "model", "--prompt", "hi", *words])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_numbers_of_generate_that_are_not_given_stay_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Llm:
        def __init__(self, *given: object, **settings: object) -> None:
            seen.extend((settings["page_tokens"], settings["max_model_len"]))
            raise AssertionError("seen")

    monkeypatch.setattr("interleaf.engine.llm.LLM", Llm)
    result = CliRunner().invoke(app, ["generate", "model", "--prompt", "hi", "--max-tokens", "3"])
    assert isinstance(result.exception, AssertionError)
    assert seen == [16, None]


def test_the_command_says_its_version() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"{project['version']}\n")
