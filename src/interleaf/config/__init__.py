"""The settings: how the engine runs, what the server serves. `engine` and `server` have the fields and their defaults,
`rules` what a value may be, `names` what is said of a name that is none. Reads no file and no environment.
"""

from interleaf.config.engine import (
    PAGE_TOKENS,
    Admission,
    Attention,
    Dtype,
    EngineConfig,
    Eviction,
    LoadFormat,
)
from interleaf.config.names import unknown_setting
from interleaf.config.rules import parse_bytes
from interleaf.config.server import LogFormat, LogLevel, ServerConfig

__all__ = [
    "PAGE_TOKENS",
    "Admission",
    "Attention",
    "Dtype",
    "EngineConfig",
    "Eviction",
    "LoadFormat",
    "LogFormat",
    "LogLevel",
    "ServerConfig",
    "parse_bytes",
    "unknown_setting",
]
