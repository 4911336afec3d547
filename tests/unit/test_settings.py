"""Settings of `interleaf serve`: the order of their sources, the names they know, and the page that lists them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from interleaf.cli import app
from interleaf.config import EngineConfig, ServerConfig
from interleaf.errors import ConfigError
from interleaf.server.options import OPTIONS, Kind, options_table
from interleaf.server.settings import load_settings

REPOSITORY = Path(__file__).resolve().parents[2]


def written(folder: Path, text: str) -> str:
    path = folder / "interleaf.toml"
    path.write_text(text, "utf-8")
    return str(path)


# --- layers -----------------------------------------------------------------------------------------------------------


def test_a_flag_wins_over_the_environment_that_over_the_file_and_that_over_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, 'model = "m"\nport = 1\nhost = "file"\nmax_waiting = 7\nmax_num_seqs = 5\n')
    environment = {"INTERLEAF_PORT": "2", "INTERLEAF_HOST": "environment", "PATH": "/bin"}
    settings = load_settings({"port": 3, "host": None, "api_key": []}, environment, file)
    server = settings.server
    assert (server.port, server.host, server.max_waiting, server.keep_alive) == (3, "environment", 7, 30.0)
    assert settings.engine.max_num_seqs == 5
    assert settings.engine.page_tokens == EngineConfig().page_tokens
    assert settings.sources["port"] == "--port"
    assert settings.sources["host"] == "INTERLEAF_HOST"
    assert file in settings.sources["max_waiting"]
    assert "keep_alive" not in settings.sources


def test_every_kind_of_value_reads_the_same_from_a_flag_the_environment_and_a_file(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        'model = "m"\napi_key = ["one", "two"]\ncors_origin = "https://a.example"\nallow_runtime_loading = true\n'
        'exit_after = 2.5\nmemory = "64MiB"\nmax_body_bytes = 1000\n[adapters]\na = "x/a"\nb = "dummy:r=4"\n',
    )
    environment = {
        "INTERLEAF_MODEL": "m",
        "INTERLEAF_API_KEY": "one,two",
        "INTERLEAF_CORS_ORIGIN": "https://a.example",
        "INTERLEAF_ALLOW_RUNTIME_LOADING": "true",
        "INTERLEAF_EXIT_AFTER": "2.5",
        "INTERLEAF_MEMORY": "64MiB",
        "INTERLEAF_MAX_BODY_BYTES": "1000",
        "INTERLEAF_ADAPTERS": "a=x/a,b=dummy:r=4",
    }
    flags = {
        "model": "m",
        "api_key": ["one", "two"],
        "cors_origin": ["https://a.example"],
        "allow_runtime_loading": True,
        "exit_after": 2.5,
        "memory": "64MiB",
        "max_body_bytes": "1000",
        "adapters": ["a=x/a", "b=dummy:r=4"],
    }
    from_file, from_environment = load_settings({}, {}, file), load_settings({}, environment)
    from_flags = load_settings(flags, {})
    assert from_file.server == from_environment.server == from_flags.server
    assert from_file.engine == from_environment.engine == from_flags.engine
    assert from_file.server.adapters == (("a", "x/a"), ("b", "dummy:r=4"))
    assert from_file.server.max_body == 1000


def test_the_environment_can_name_the_file_and_an_argument_names_another(tmp_path: Path) -> None:
    file = written(tmp_path, 'model = "from file"\n')
    assert load_settings({}, {"INTERLEAF_CONFIG": file}).server.model == "from file"
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: No such file"):
        load_settings({}, {"INTERLEAF_CONFIG": file}, "nowhere.toml")


def test_variables_of_the_test_suite_are_no_settings() -> None:
    assert load_settings({"model": "m"}, {"INTERLEAF_TEST_GGUF": "x"}).server.model == "m"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1\n", r"interleaf.toml: unknown setting 'prot'; did you mean 'port'\?"),
        ("port = \n", "interleaf.toml is no TOML"),
        (
            'port = "8000"\n',
            r"port must be a whole number from 0 to 65535, got '8000' \(from `port` in .*interleaf.toml\)",
        ),
        ("[adapters]\na = 3\n", "adapters must be pairs of a name and a path"),
        ("adapters = 3\n", "adapters must be a table of name = path, got 3"),
        ('api_key = [""]\n', "api_key must be a list of texts"),
        ("[engine]\nmemory = 3\n", "unknown setting 'engine'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings({"model": "m"}, {}, written(tmp_path, text))


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("INTERLEAF_PROT", "1", r"unknown setting 'INTERLEAF_PROT'; did you mean 'INTERLEAF_PORT'\?"),
        ("INTERLEAF_PORT", "many", r"port must be a whole number from 0 to 65535, got 'many' \(from INTERLEAF_PORT\)"),
        (
            "INTERLEAF_SEED",
            "9" * 5000,
            r"seed must be a whole number from .*, got '9{59}\.\.\. \(from INTERLEAF_SEED\)",
        ),
        ("INTERLEAF_MAX_LOADS", "2.5", "max_loads must be a whole number from 1 to 4096, got '2.5'"),
        ("INTERLEAF_PORT", "70000", r"port must be .*, got 70000 \(from INTERLEAF_PORT\)"),
        (
            "INTERLEAF_ALLOW_RUNTIME_LOADING",
            "maybe",
            r"allow_runtime_loading must be true or false, got 'maybe' \(from",
        ),
        ("INTERLEAF_EXIT_AFTER", "soon", "exit_after must be a number of seconds from 0 to 86400, got 'soon'"),
        ("INTERLEAF_EXIT_AFTER", "nan", "exit_after must be a number of seconds"),
        ("INTERLEAF_ADAPTERS", "pirate", "INTERLEAF_ADAPTERS must be NAME=PATH, got 'pirate'"),
        ("INTERLEAF_ADAPTERS", "a=x,a=y", "adapters names 'a' twice: 'x' and 'y'"),
        ("INTERLEAF_MEMORY", "lots", r"memory must be a size.*\(from INTERLEAF_MEMORY\)"),
        ("INTERLEAF_LOG_FORMAT", "xml", "log_format must be one of console, json, got 'xml'"),
        ("INTERLEAF_PORT", "tcp://10.0.0.1:8000", "Kubernetes"),
        ("INTERLEAF_SERVICE_HOST", "10.0.0.1", "enableServiceLinks: false"),
    ],
)
def test_what_is_wrong_in_the_environment_is_named_with_the_variable(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings({"model": "m"}, {variable: text})


def test_a_missing_model_is_said_with_all_three_ways_to_name_one() -> None:
    with pytest.raises(ConfigError, match=r"no model: .*argument.*INTERLEAF_MODEL.*TOML"):
        load_settings({}, {})


def test_keys_are_never_part_of_a_message() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(model="m", api_key=("secret-key", ""))
    assert "secret-key" not in str(caught.value)


def test_the_base_models_name_is_the_last_part_of_its_path_unless_it_is_given() -> None:
    names = {"a/b/Llama.gguf": "Llama", "org/model": "model", "folder/": "folder"}
    assert {model: ServerConfig(model=model).name for model in names} == names
    assert ServerConfig(model="a/b", served_model_name="c").name == "c"


# --- one list, three places -------------------------------------------------------------------------------------------


def test_every_setting_is_an_option_and_every_option_a_setting() -> None:
    fields = [f.name for config in (ServerConfig, EngineConfig) for f in dataclasses.fields(config)]
    assert sorted(option.name for option in OPTIONS) == sorted(fields)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_documented_default_may_be_set_and_all_of_them_together(device: str) -> None:
    """As charts do that list all variables. What stands for no value is in words."""
    environment = {"INTERLEAF_MODEL": "m", "INTERLEAF_DEVICE": device}
    for option in OPTIONS:
        if option.default and not option.unset and option.name != "device":
            on_cpu, _, on_gpu = option.default.partition(", on a GPU ")
            environment[option.variable] = on_gpu if on_gpu and device == "cuda" else on_cpu
    assert len(environment) > 30
    settings = load_settings({}, environment)
    assert settings.engine == EngineConfig(device=device)
    assert settings.server == ServerConfig(model="m")


def test_the_operators_page_has_the_table_that_the_code_makes() -> None:
    assert options_table() in (REPOSITORY / "docs" / "operate.md").read_text("utf-8")


def test_the_command_line_hands_every_flag_over_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def fake_load(flags: dict[str, Any], environment: Any, config_file: str | None) -> None:
        seen.update(flags, config=config_file)
        raise ConfigError("seen")

    monkeypatch.setattr("interleaf.server.settings.load_settings", fake_load)
    samples: dict[Kind, tuple[list[str], Any]] = {
        Kind.WHOLE: (["3"], "3"),  # as texts: those who know the limits read them
        Kind.SECONDS: (["2.5"], "2.5"),
        Kind.TEXTS: (["a", "b"], ["a", "b"]),
        Kind.PATHS: (["a", "b"], ["a", "b"]),
        Kind.PAIRS: (["a=b", "c=d"], ["a=b", "c=d"]),
    }
    words, expected = ["serve", "the-model", "--config", "x.toml"], {"model": "the-model", "config": "x.toml"}
    for option in OPTIONS:
        if option.name == "model":
            continue
        if option.kind is Kind.SWITCH:
            words.append(f"--no-{option.flag[2:]}")
            expected[option.name] = False  # type: ignore[assignment]
            continue
        texts, value = samples.get(option.kind, (["text"], "text"))
        for text in texts:
            words += [option.flag, text]
        expected[option.name] = value
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, seen) == (2, expected)
    assert "error: seen" in result.output


@pytest.mark.parametrize("lost", ["", ","])
def test_a_key_that_has_got_lost_on_its_way_does_not_open_the_server(lost: str) -> None:
    with pytest.raises(ConfigError, match="INTERLEAF_API_KEY"):
        load_settings({"model": "m"}, {"INTERLEAF_API_KEY": lost})
    assert load_settings({"model": "m"}, {}).server.api_key == ()
