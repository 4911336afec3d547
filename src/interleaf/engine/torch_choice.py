"""The sampling kernels' task in plain torch: says what they must give, and lets a CPU stand in for a GPU.

Source: kernels/token_choice.py has the contract, sampling_math the rules.
"""

from __future__ import annotations

import torch

from interleaf.engine.sampling_math import Filters, draw, first_argmax, uniforms
from interleaf.kernels.token_choice import Choice


class TorchChooser:
    """As TokenChooser, on the CPU: looks at every row's state, whatever `choice` says."""

    def choose(
        self,
        logits: torch.Tensor,
        seats: torch.Tensor,
        state: torch.Tensor,
        last_token: torch.Tensor,
        choice: Choice,
    ) -> torch.Tensor:
        """Choose one token for each row. Args and semantics: as TokenChooser.choose."""
        vocab_size = logits.shape[1]
        key, outputs, top_k = state[seats, :3].T
        temperature, top_p, min_p = state[seats, 3:].view(torch.float64).T
        values = logits.float()
        token_ids = first_argmax(values)
        is_filtered = (top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0)
        filtered = ((temperature > 0.0) & is_filtered).nonzero()[:, 0]
        drawn = torch.cat([filtered, ((temperature > 0.0) & ~is_filtered).nonzero()[:, 0]])
        filters = Filters(
            top_k=top_k[filtered],
            top_p=top_p[filtered],
            min_p=min_p[filtered],
            nucleus=torch.zeros_like(filtered, dtype=torch.bool),
            num_nucleus=0,
        )
        token_ids[drawn] = draw(
            values[drawn],
            token_ids[drawn],
            temperature[drawn].float(),
            filters,
            uniforms(key[drawn], outputs[drawn]),
        )
        last_token[seats] = token_ids
        state[seats, 1] += 1
        return token_ids
