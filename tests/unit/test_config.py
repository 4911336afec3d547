"""Settings: defaults, limits, and the name of whatever is wrong."""

import dataclasses
import enum
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interleaf.config import EngineConfig, ServerConfig, parse_bytes
from interleaf.errors import ConfigError
from interleaf.server.host_memory import host_memory_bytes, host_memory_warnings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1GiB", 1024**3),
        ("2GB", 2 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("4.1GB", 41 * 10**8),
        ("512", 512),
        ("7b", 7),
        (4096, 4096),
    ],
)
def test_sizes_are_read_in_powers_of_1024_and_of_1000(text: str | int, expected: int) -> None:
    assert parse_bytes("memory", text) == expected


@pytest.mark.parametrize("text", ["", "big", "1 parsec", "-1GiB", 0, -5, True, "0", "nan", "1.5", "0.2b", 1.5, None])
def test_what_is_no_size_is_refused_by_name_and_value(text: str | int) -> None:
    with pytest.raises(ConfigError, match="memory must be") as caught:
        parse_bytes("memory", text)
    assert f"got {text}" in str(caught.value).replace("'", "")


def test_an_unknown_setting_is_refused_and_the_nearest_known_one_named() -> None:
    with pytest.raises(ConfigError, match="'gpu_memory_utilization': here it is memory"):
        EngineConfig.from_mapping({"gpu_memory_utilization": 0.9})
    with pytest.raises(ConfigError, match=r"unknown setting 'page_token'; did you mean 'page_tokens'\?"):
        EngineConfig.from_mapping({"page_token": 16})
    with pytest.raises(ConfigError, match=r"unknown setting 'zzz'; known: dtype, "):
        EngineConfig.from_mapping({"zzz": 1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_tokens": 3}, "page_tokens must be one of 1, 2, 4, 8, 16, 32, 64, got 3"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"load_format": "pickle"}, "load_format must be one of .*, got 'pickle'"),
        ({"device": "tpu"}, "device must be .*, got 'tpu'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number from 1 to 65536, got 0"),
        ({"max_batch_tokens": 2.5}, "max_batch_tokens must be a whole number from 1 to .*, got 2.5"),
        ({"max_model_len": -1}, "max_model_len must be a whole number from 1 to .*, got -1"),
        ({"page_tokens": True}, "page_tokens must be one of .*, got True"),
        ({"page_tokens": 16.0}, "page_tokens must be one of .*, got 16.0"),
        ({"max_num_seqs": 2**40}, "max_num_seqs must be a whole number from 1 to 65536"),
        ({"overlap": "no"}, "overlap must be true or false, got 'no'"),
        ({"seed": "x"}, "seed must be a whole number from .*, got 'x'"),
        ({"max_num_seqs": 600}, "max_batch_tokens=512 is below max_num_seqs=600"),
        ({"memory": "lots"}, "memory must be a size"),
        ({"memory": 0.9}, "memory=0.9: a share of the memory is for a GPU, and device is 'cpu'"),
        ({"memory": "0.9"}, "memory=0.9: a share of the memory is for a GPU"),
        ({"load_timeout": 0}, "load_timeout must be a number of seconds over 0, at most 86400, got 0"),
        ({"load_timeout": "soon"}, "load_timeout must be a number of seconds over 0, at most 86400, got 'soon'"),
        ({"memory_split": 1.0}, "memory_split must be a share between 0 and 1, excluding both, got 1.0"),
        ({"memory_split": "half"}, "memory_split must be a share between 0 and 1, excluding both, got 'half'"),
        ({"adapter_disk_dir": ""}, "adapter_disk_dir must be a folder, got ''"),
        ({"seed": 2**63}, "seed must be a whole number from -9223372036854775807 to 9223372036854775807, got 9223"),
        ({"prefill_rate": 0}, "prefill_rate must be a whole number from 1 to 1099511627776, got 0"),
    ],
)
def test_every_setting_names_its_limit_and_the_value(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_mapping(settings)


def test_swap_memory_may_be_nothing_and_is_so_where_the_pool_is_in_the_host_s_memory() -> None:
    assert EngineConfig().swap_memory_bytes == 0
    assert EngineConfig(device="cuda").swap_memory_bytes == 4 * 2**30
    for nothing in (0, "0", " 0 "):
        assert EngineConfig(device="cuda", swap_memory=nothing).swap_memory_bytes == 0
    assert EngineConfig(swap_memory="1MiB").swap_memory_bytes == 2**20


def test_memory_is_kept_in_bytes() -> None:
    config = EngineConfig(memory="64MiB", adapter_host_memory=1000)
    assert (config.memory_bytes, config.adapter_host_memory_bytes) == (64 * 2**20, 1000)


SIZES = ("memory", "adapter_host_memory", "adapter_disk_memory", "swap_memory", "copy_rate")
LIMIT = 'a size such as "512MiB" or "2GB", over 0 and at most 1024TiB'


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [-1, "-1", "-2GiB", "lots", "", "1.5", False, 2**50 + 1, "2048TiB", "1" + "0" * 400])
def test_every_size_names_itself_its_limit_and_the_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_mapping({"adapter_disk_dir": "folder", name: value})
    none, share = ("0 for none, or " if name == "swap_memory" else "", "")
    if name == "memory":
        share = ", or on a GPU a share between 0 and 1, excluding both"
    message = str(caught.value)
    assert message.startswith(f"{name} must be {none}{LIMIT}{share}, got {str(repr(value))[:50]}")
    assert len(message) < 250, "a value of hundreds of digits is not repeated whole"


@pytest.mark.parametrize("name", SIZES)
def test_a_size_of_nothing_is_for_swapping_only(name: str) -> None:
    for nothing in (0, "0", "0GiB"):
        settings = {"adapter_disk_dir": "folder", name: nothing}
        if name == "swap_memory":
            assert EngineConfig.from_mapping(settings).swap_memory_bytes == 0
        else:
            with pytest.raises(ConfigError, match=f"{name} must be a size .*over 0"):
                EngineConfig.from_mapping(settings)


def test_a_budget_without_the_folder_that_it_limits_is_refused() -> None:
    with pytest.raises(ConfigError, match="adapter_disk_memory=1073741824 without adapter_disk_dir"):
        EngineConfig(adapter_disk_memory="1GiB")
    assert EngineConfig(adapter_disk_dir="folder").adapter_disk_memory_bytes == 16 * 2**30
    assert EngineConfig(adapter_disk_dir="folder", adapter_disk_memory="1GiB").adapter_disk_memory_bytes == 2**30
    assert EngineConfig().adapter_disk_memory_bytes == 0


def test_loads_ahead_of_need_are_among_all_loads() -> None:
    with pytest.raises(ConfigError, match="prefetch_loads=5 is over max_loads=4"):
        EngineConfig(max_loads=4, prefetch_loads=5)
    with pytest.raises(ConfigError, match="prefetch_loads=33 is over max_loads=32"):
        EngineConfig(prefetch_loads=33)
    assert EngineConfig(max_loads=4, prefetch_loads=4).prefetch_loads == 4
    found = {max_loads: EngineConfig(max_loads=max_loads).prefetch_loads for max_loads in (1, 8, 32)}
    assert found == {1: 1, 8: 8, 32: 8}, "who sets only max_loads contradicts nothing"


class Word(str, enum.Enum):  # noqa: UP042  # unlike StrEnum's, its members' str() is their name
    LRU = "lru"


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("max_num_seqs", np.int64(16), 16),
        ("memory", np.int32(4096), 4096),
        ("page_tokens", np.int64(16), 16),
        ("memory_split", np.float32(0.5), 0.5),
        ("memory_split", Fraction(1, 2), 0.5),
        ("load_timeout", 5, 5.0),
        ("load_timeout", np.float64(5), 5.0),
        ("eviction", Word.LRU, "lru"),
        ("eviction", np.str_("lru"), "lru"),
        ("memory", np.str_("4KiB"), 4096),
        ("adapter_disk_dir", Path("a/folder"), "a/folder"),
    ],
)
def test_numbers_texts_and_paths_of_other_libraries_are_kept_as_python_s_own(
    name: str, given: object, kept: object
) -> None:
    """So that they can be sent to another process as they are."""
    found = getattr(EngineConfig.from_mapping({name: given}), name)
    assert (type(found), found) == (type(kept), kept)


def test_a_server_s_paths_may_be_pathlib_s() -> None:
    config = ServerConfig(
        model=Path("m"),  # type: ignore[arg-type]
        adapters={"a": Path("x/a")},  # type: ignore[arg-type]
        adapters_dir=Path("x"),  # type: ignore[arg-type]
        allow_adapter_root=[Path("y")],  # type: ignore[arg-type]
    )
    assert (config.model, config.adapters, config.adapters_dir) == ("m", (("a", "x/a"),), "x")
    assert config.allow_adapter_root == ("y",)


HOSTILE = (
    b"1GiB", Decimal(1), 1j, float("nan"), float("inf"), 10**5000, -(10**5000), [], {}, np.bool_(True),
    np.array([1, 2]), np.array(5), "a\0b", Unspeakable(), object, range(3),
)  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: type(value).__name__)
def test_whatever_a_setting_is_given_it_is_kept_or_refused_by_name_in_a_short_line(value: object) -> None:
    for config, base in ((EngineConfig, {}), (ServerConfig, {"model": "m"})):
        for field in dataclasses.fields(config):
            message = f"{field.name} must be "
            try:
                config(**{**base, field.name: value})
            except ConfigError as error:
                message = str(error)
            assert message.startswith(f"{field.name} must be ")
            assert len(message) < 300


@pytest.mark.parametrize("settings", [{}, {"device": "cuda"}, {"adapter_disk_dir": "d", "max_loads": 2, "seed": 3}])
def test_a_configuration_made_again_of_its_own_values_is_the_same(settings: dict[str, Any]) -> None:
    config = EngineConfig(**settings)
    assert dataclasses.replace(config) == config


def test_a_budget_over_the_machine_s_memory_is_a_warning_that_names_both() -> None:
    assert host_memory_bytes() > 2**20
    config = EngineConfig(memory="3GiB", adapter_host_memory="900TiB", swap_memory=2**31 + 1)
    (adapters,) = host_memory_warnings(config, 2**32)
    assert adapters.startswith("adapter_host_memory=900TiB is more than the 4.0GiB of memory")
    over = [line.partition("=")[0] for line in host_memory_warnings(config, 2**31)]
    assert sorted(over) == ["adapter_host_memory", "memory", "swap_memory"]
    on_gpu = EngineConfig(device="cuda", memory="80GB", adapter_host_memory="1GiB", swap_memory=0)
    assert host_memory_warnings(on_gpu, 2**31) == [], "a GPU's pool is in its own memory"
