"""Opens whatever names an adapter: a PEFT folder, or a recipe for one of random weights. Knows no page."""

from __future__ import annotations

from pathlib import Path

from interleaf.adapters.dummy import DUMMY_PREFIX, make_dummy
from interleaf.adapters.parsed import ParsedAdapter
from interleaf.adapters.peft import parse_folder
from interleaf.core import ModelSpec


def open_adapter(source: str, spec: ModelSpec) -> ParsedAdapter:
    """Read and check the adapter that `source` names: a folder, or "dummy:r=16,targets=all,seed=7".

    Raises: AdapterRejected: with every problem found.
    """
    if source.startswith(DUMMY_PREFIX):
        return make_dummy(source, spec)
    return parse_folder(Path(source), spec)
