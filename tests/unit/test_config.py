"""Settings: defaults, limits, and the name of whatever is wrong."""

import pytest

from interleaf.config import EngineConfig, parse_bytes
from interleaf.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1GiB", 1024**3), ("2GB", 2 * 10**9), ("1.5 MiB", 3 * 2**19), ("512", 512), ("7b", 7), (4096, 4096)],
)
def test_sizes_are_read_in_powers_of_1024_and_of_1000(text: str | int, expected: int) -> None:
    assert parse_bytes("memory", text) == expected


@pytest.mark.parametrize("text", ["", "big", "1 parsec", "-1GiB", 0, -5, True, "0", "nan"])
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
        ({"seed": "x"}, "seed must be a whole number, got 'x'"),
        ({"memory": "1" + "0" * 400}, "memory is beyond every machine"),
        ({"max_num_seqs": 600}, "max_batch_tokens=512 is below max_num_seqs=600"),
        ({"memory": "lots"}, "memory must be a size"),
        ({"memory": 0}, "memory must be a positive number of bytes, got 0"),
        ({"memory": 0.9}, "memory=0.9: a share of the memory is for a GPU, and device is 'cpu'"),
        ({"memory": "0.9"}, "memory=0.9: a share of the memory is for a GPU"),
        ({"swap_memory": -1}, "swap_memory must be a positive number of bytes, got -1"),
        ({"swap_memory": False}, "swap_memory must be a positive number of bytes, got False"),
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
