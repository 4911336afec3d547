"""An image in a file: a header, then its bytes from the next multiple of 4096. Knows no folder and no process."""

from __future__ import annotations

import hashlib
from typing import BinaryIO

import msgspec
import torch

from interleaf.adapters.image import AdapterImage
from interleaf.adapters.json_file import Unreadable
from interleaf.core import AdapterUid, PooledLayout
from interleaf.memory.geometry import PageGeometry

_ALIGNMENT = 4096
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 64 * 2**20


class ImageHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a file says of its image.

    Attributes:
        source: what the adapter can be made of again; empty where that is kept elsewhere.
        digest: sha256 of the image's bytes; empty for a file that goes from one process to another and is gone.
    """

    uid: AdapterUid
    source: str
    layout: PooledLayout
    dtype: str
    digest: bytes = b""


def make_header(uid: AdapterUid, source: str, image: AdapterImage) -> bytes:
    """All of a file that comes before its image, with the image's digest."""
    digest = hashlib.sha256(image_bytes(image.data)).digest()
    return encode_header(ImageHeader(uid, source, image.layout, str(image.data.dtype), digest))


def encode_header(header: ImageHeader) -> bytes:
    """A header as it stands in a file, up to where the image begins."""
    encoded = msgspec.msgpack.encode(header)
    return (len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded).ljust(_first_byte(len(encoded)), b"\0")


def read_header(file: BinaryIO, num_bytes: int, geometry: PageGeometry, dtype: torch.dtype) -> tuple[ImageHeader, int]:
    """What an image's file holds, and the byte at which the image begins.

    Args:
        num_bytes: of the file.

    Raises: Unreadable: it is no image of this geometry and dtype, whole.   OSError.
    """
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > min(num_bytes, _MAX_HEADER_BYTES):
        raise Unreadable("it is no image of an adapter")
    try:
        header = msgspec.msgpack.decode(file.read(length), type=ImageHeader)
    except msgspec.MsgspecError as error:
        raise Unreadable(f"it is no image of an adapter: {error}") from None
    first, shape = _first_byte(length), image_shape(header.layout, geometry)
    elems = shape[0] * shape[1] * shape[2]
    if header.dtype != str(dtype) or (elems and num_bytes != first + elems * dtype.itemsize):
        raise Unreadable(f"it holds {num_bytes} bytes of {header.dtype}, not {shape} {dtype}")
    return header, first


def image_shape(layout: PooledLayout, geometry: PageGeometry) -> tuple[int, int, int]:
    """Of an image's data."""
    return layout.pages, geometry.num_layers, geometry.lane_elems


def image_bytes(data: torch.Tensor) -> memoryview:
    """An image's data as bytes, in place if it is contiguous."""
    view: memoryview = data.contiguous().view(torch.uint8).numpy().reshape(-1).data
    return view


def _first_byte(header_bytes: int) -> int:
    """Where the image begins."""
    return -(-(_LENGTH_BYTES + header_bytes) // _ALIGNMENT) * _ALIGNMENT
