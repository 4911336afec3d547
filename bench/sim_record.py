"""Turns a recorded run of an engine into the record of steps that `python -m interleaf.sim fit` reads.

A run's log has the plans and the moments at which the host had read each step. Where the device never waited for the
host, the time between two such moments is what the later step took.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bench.engine_floor import StepCost
from bench.engine_log import StepLog


def write_record(path: Path, log: StepLog, costs: Sequence[StepCost], token_bytes: int) -> int:
    """Write one line for each step that began when the one before it ended.

    Args:
        costs: of the log's plans (`bench.engine_floor.step_costs`).
        token_bytes: of KV of one token, over all layers.

    Returns: lines written. Left out are the first step, those that were launched after the one before had been read,
    and those without rows.
    """
    lines = []
    for index in range(1, min(len(log.done_s), len(costs))):
        cost = costs[index]
        if not cost.rows or log.launched_s[index] >= log.done_s[index - 1]:
            continue
        step = {
            "decode_rows": cost.decode_rows,
            "chunk_tokens": cost.rows - cost.decode_rows,
            "context_tokens": cost.kv_bytes // token_bytes + cost.rows,
            "adapter_bytes": cost.adapter_bytes,
            "seconds": log.done_s[index] - log.done_s[index - 1],
        }
        lines.append(json.dumps(step) + "\n")
    path.write_text("".join(lines), "utf-8")
    return len(lines)
