"""The pool's storage: one tensor, and the ways to look at it. Knows shapes; not who owns a page."""

from __future__ import annotations

import torch

from interleaf.memory.geometry import PageGeometry


class PagePool:
    """Storage of KV pages and adapter pages alike.

    Attributes:
        data: [P, L, 2, page_tokens, kv_heads, head_dim].
        lanes: [P, L, lane_elems], the same memory as LoRA sees it.
    """

    def __init__(
        self, geometry: PageGeometry, num_pages: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        assert dtype.itemsize == geometry.itemsize_bytes, f"{dtype} is not {geometry.itemsize_bytes} bytes wide"
        g = geometry
        self.geometry = geometry
        # Zeroed, so that the memory is there once the engine has started: a budget that the machine cannot give fails
        # now and not in the middle of a step.
        self.data = torch.zeros(
            num_pages, g.num_layers, 2, g.page_tokens, g.num_kv_heads, g.head_dim, dtype=dtype, device=device
        )
        self.lanes = self.data.view(num_pages, g.num_layers, g.lane_elems)

    @property
    def num_pages(self) -> int:
        return self.data.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def kv_blocks(self) -> LayerRows:
        """K or V of one layer of one page, as rows of page_tokens * kv_heads * head_dim elements."""
        g = self.geometry
        return LayerRows(self.data.view(-1, g.page_tokens * g.num_kv_heads * g.head_dim), g.num_layers, 1)

    def kv_slots(self) -> LayerRows:
        """K or V of one layer of one token, as rows of kv_heads * head_dim elements."""
        g = self.geometry
        return LayerRows(self.data.view(-1, g.num_kv_heads * g.head_dim), g.num_layers, g.page_tokens)


class LayerRows:
    """The pool as a matrix whose row numbers are the same for every layer, and for K and V.

    Row `page * rows_per_page + i` of `k[l]` is the i-th row of layer l's K in that page: each view begins where its
    layer does in page 0, so a layer is an offset that the view already holds, and one index array serves a whole step.

    Attributes:
        rows_per_page: distance between the same row of two neighbouring pages.
        key_to_value: distance from a row of K to the same row of V, in a view of K.
        k, v: one view per layer; rows other than those named above belong to other layers.
    """

    def __init__(self, rows: torch.Tensor, num_layers: int, rows_per_half: int) -> None:
        self.rows_per_page = num_layers * 2 * rows_per_half
        self.key_to_value = rows_per_half
        self.k = [rows[2 * layer * rows_per_half :] for layer in range(num_layers)]
        self.v = [rows[(2 * layer + 1) * rows_per_half :] for layer in range(num_layers)]
