"""Where a setting's value comes from: flag over environment over TOML file over default. Knows no limits of values."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interleaf.config import EngineConfig, ServerConfig, unknown_setting
from interleaf.config.rules import shown
from interleaf.errors import ConfigError
from interleaf.server.options import BY_NAME, OPTIONS, PREFIX, Kind, Option

CONFIG_VARIABLE = "INTERLEAF_CONFIG"
TESTS_PREFIX = "INTERLEAF_TEST_"
"""Variables of the test suite; never settings."""
_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything `interleaf serve` was told.

    Attributes:
        sources: for each setting that is no default, who gave it.
    """

    engine: EngineConfig
    server: ServerConfig
    sources: Mapping[str, str]


def load_settings(flags: Mapping[str, Any], environment: Mapping[str, str], config_file: str | None = None) -> Settings:
    """Settings from all layers: flags over environment over TOML file over defaults.

    Args:
        flags: by option name; None and empty lists mean "not given".
        config_file: the TOML file; None takes the one that INTERLEAF_CONFIG names, if it does.

    Raises: ConfigError: a key is unknown, or a value is out of range; says where it came from.
    """
    file = config_file or environment.get(CONFIG_VARIABLE) or None
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers = [_from_file(Path(file))] if file else []
    layers += [_from_environment(environment), _from_flags(flags)]
    for layer in layers:
        for name, (value, source) in layer.items():
            values[name], sources[name] = value, source
    if "model" not in values:
        raise ConfigError(
            f"no model: name one as the argument, in {BY_NAME['model'].variable}, or as `model` in the TOML file"
        )
    engine_names = {f.name for f in dataclasses.fields(EngineConfig)}
    try:
        server = ServerConfig(**{name: value for name, value in values.items() if name not in engine_names})
        engine = EngineConfig(**{name: value for name, value in values.items() if name in engine_names})
    except ConfigError as error:
        blamed = str(error).partition(" ")[0].partition("=")[0]
        giver = sources.get(blamed)
        raise ConfigError(f"{error} (from {giver})" if giver else str(error)) from None
    return Settings(engine, server, sources)


def _from_file(path: Path) -> dict[str, tuple[Any, str]]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings file {path} is no TOML: {error}") from None
    found = {}
    for key, value in table.items():
        if key not in BY_NAME:
            raise ConfigError(f"{path}: {unknown_setting(key, list(BY_NAME))}")
        if BY_NAME[key].kind in (Kind.TEXTS, Kind.PATHS) and isinstance(value, str):
            value = [value]
        found[key] = (value, f"`{key}` in {path}")
    return found


def _from_environment(environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    variables = {option.variable: option for option in OPTIONS}
    found = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable.startswith(TESTS_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if _is_service_link(variable, text):
            raise ConfigError(
                f"{variable}={text} is what Kubernetes sets for a Service named `interleaf`, and no setting: "
                "put `enableServiceLinks: false` in the pod's spec, or give the Service another name"
            )
        if variable not in variables:
            raise ConfigError(f"environment: {unknown_setting(variable, [*variables, CONFIG_VARIABLE])}")
        option = variables[variable]
        value = _parse(option, text, variable)
        if option.name == "api_key" and not value:  # a secret that has got lost must not open the server
            raise ConfigError(f"{variable} is set and holds no key: to serve everybody, unset it")
        found[option.name] = (value, variable)
    return found


def _is_service_link(variable: str, text: str) -> bool:
    rest = variable.removeprefix(PREFIX)
    return rest.startswith(("SERVICE_HOST", "SERVICE_PORT", "PORT_")) or (rest == "PORT" and "://" in text)


def _from_flags(flags: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    found = {}
    for name, given in flags.items():
        if given is None or given == [] or given == ():
            continue
        option = BY_NAME[name]
        value = [_pair(text, option.flag) for text in given] if option.kind is Kind.PAIRS else _number(option, given)
        found[name] = (value, "the argument" if name == "model" else option.flag)
    return found


def _parse(option: Option, text: str, source: str) -> Any:
    """A value from an environment variable's text; lists are separated by commas."""
    if option.kind is Kind.PAIRS:
        return [_pair(item, source) for item in text.split(",") if item]
    if option.kind.is_many:
        return [item for item in text.split(",") if item]
    if option.kind is Kind.SWITCH:
        return _SWITCH.get(text.lower(), text)
    return _number(option, text)


def _number(option: Option, given: Any) -> Any:
    """The number that a text is, if the setting wants one; what is none is refused with the setting's limits, later."""
    kind = {Kind.WHOLE: int, Kind.SECONDS: float}.get(option.kind)
    if kind is None or not isinstance(given, str):
        return given
    try:
        return kind(given)
    except ValueError:
        return given


def _pair(text: str, source: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise ConfigError(f"{source} must be NAME=PATH, got {shown(text)}")
    return name, path
