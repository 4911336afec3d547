"""Finds the tensors of a PEFT folder: one safetensors file, or several under an index. Knows no tensor's meaning."""

from __future__ import annotations

from pathlib import Path

from interleaf.adapters.json_file import Unreadable, read_object, regular_size
from interleaf.adapters.problems import Problems, shown
from interleaf.adapters.safetensors_file import SafetensorsFile, open_safetensors

WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
PICKLE_NAME = "adapter_model.bin"

_MAX_INDEX_BYTES = 64 * 2**20


def open_weights(folder: Path, problems: Problems) -> dict[str, SafetensorsFile]:
    """The file that holds each tensor, by the tensor's name; empty where `problems` says why.

    A pickle beside safetensors is ignored, as PEFT does, and never opened; alone it is refused.
    """
    single, index = _exists(folder / WEIGHTS_NAME), _exists(folder / INDEX_NAME)
    try:
        if single and index:
            raise Unreadable(f"the folder holds both {WEIGHTS_NAME} and {INDEX_NAME}: which one counts is not clear")
        if index:
            return _open_shards(folder, problems)
        if not single and _exists(folder / PICKLE_NAME):
            raise Unreadable(
                f"{PICKLE_NAME} is a pickle, which can run code when it is read: only {WEIGHTS_NAME} is supported"
            )
        file = open_safetensors(folder / WEIGHTS_NAME)
    except Unreadable as error:
        problems.add(str(error))
        return {}
    if not file.entries:
        problems.add(f"{WEIGHTS_NAME} holds no tensors")
    return dict.fromkeys(file.entries, file)


def _open_shards(folder: Path, problems: Problems) -> dict[str, SafetensorsFile]:
    """Open every shard. The index must name exactly the tensors that the shards hold, and only files of the folder."""
    weight_map = read_object(folder / INDEX_NAME, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise Unreadable(f"{INDEX_NAME}: weight_map must map tensor names to file names, got {shown(weight_map)}")
    files: dict[str, SafetensorsFile] = {}
    for name in dict.fromkeys(v if isinstance(v, str) else repr(v) for v in weight_map.values()):
        if Path(name).name != name or not name.endswith(".safetensors"):
            problems.add(f"{INDEX_NAME} names {shown(name)}, which is not a safetensors file of the folder")
            continue
        try:
            files[name] = open_safetensors(folder / name)
        except Unreadable as error:
            problems.add(str(error))
    found: dict[str, SafetensorsFile] = {}
    for tensor, name in weight_map.items():
        file = files.get(name) if isinstance(name, str) else None
        if file is not None and tensor in file.entries:
            found[tensor] = file
        elif file is not None:
            problems.group(f"{INDEX_NAME} names tensors that {shown(name)} does not hold", shown(tensor))
    for name, file in files.items():
        strays = (shown(tensor) for tensor in file.entries if weight_map.get(tensor) != name)
        problems.group_all(f"{shown(name)} holds tensors that {INDEX_NAME} does not name there", strays)
    return found


def _exists(path: Path) -> bool:
    """Whether anything stands there, be it unusable: what is wrong with it is then said by whoever opens it."""
    try:
        regular_size(path)
    except Unreadable:
        return path.is_symlink() or path.exists()
    return True
