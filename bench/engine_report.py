"""How results are shown and kept: a line per run, a table, files of JSON. Measures nothing."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interleaf.errors import ConfigError

RECORDED = ("trace", "model", "adapters", "memory", "output_tokens_per_s", "floor_ratio", "runs", "commit", "versions")
"""Fields of a recorded row (docs/benchmarks/h200/engine.schema.json)."""


def line_of(figures: Mapping[str, Any]) -> str:
    """One run in a few lines, the first of which says most."""
    f = figures
    ratio = "-" if f["floor_ratio"] is None else f"{f['floor_ratio']:.2f} x its floor of {f['floor_s']:.1f} s"
    steps = f"{f['steps']} steps, {_share(f['graph_share'])} replay a graph"
    if f["captures"] or f["stand_ins"]:
        steps += f" ({f['captures']} captured meanwhile, {f['capture_s']:.1f} s; {f['stand_ins']} replay another's)"
    lines = [
        f"{f['output_tokens_per_s']:,.0f} tok/s   {f['requests_per_s']:.2f} req/s   {f['seconds']:.1f} s, {ratio}",
        f"    TTFT {_spread(f['ttft_s'], 's')}   latency {_spread(f['latency_s'], 's')}   "
        f"inter-token {_spread(f['itl_ms'], 'ms')}",
        f"    host {f['host_ms_per_step']:.2f} ms a step ({_spread(f['host_ms'], 'ms')}), the device starved after "
        f"{_share(f['starved_share'])}   {steps}",
    ]
    for kind, name in (("decode", "decode"), ("full_decode", "  the fullest of them"), ("mixed", "mixed")):
        if (k := f[kind]) is not None:
            lines.append(
                f"    {name}: {k['steps']} steps, {k['seconds']:.1f} s, {k['ms']:.2f} ms each, "
                f"floor {k['floor_ms']:.2f} ({k['floor_ratio']:.2f} x), host {k['host_ms']:.2f} ms, "
                f"{k['rows']:.0f} rows of {k['adapters']:.0f} adapters"
            )
    size = f["peak_adapter_pages"] * f["page_bytes"] / 1e9
    lines.append(
        f"    hits {_share(f['hit_rate'])}   loads {f['loads']} (again {f['reloads']})   adapters asked for "
        f"{f['distinct_adapters']}   peak {f['peak_adapter_pages']} adapter pages ({size:.1f} GB) + "
        f"{f['peak_kv_pages']} of KV, of {f['pool_pages']}   preemptions {f['preemptions']}"
    )
    lines += [f"    PROBLEM: {problem}" for problem in f["problems"]]
    return "\n".join(lines)


def summary(row: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row and its runs so far; medians over those that went well."""
    good = [run for run in runs if not run["problems"]]
    ratios = [run["floor_ratio"] for run in good if run["floor_ratio"] is not None]
    return {
        **row,
        "output_tokens_per_s": statistics.median(run["output_tokens_per_s"] for run in good) if good else None,
        "floor_ratio": statistics.median(ratios) if ratios else None,
        "runs": list(runs),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All rows, as Markdown."""
    lines = [
        "| trace | adapters (asked for) | memory | tok/s | runs | x floor | TTFT p50 / p99 s "
        "| inter-token p50 / p99 ms | host ms | graphs | hits | reloads |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        good = [run for run in row["runs"] if not run["problems"]]
        if not good:
            outcome = "failed" if row["runs"] else "not run"
            lines.append(f"| {row['trace']} | {row['adapters']} | {row['memory']} | {outcome} |" + " |" * 8)
            continue
        last = good[-1]
        rates = " ".join(f"{run['output_tokens_per_s']:,.0f}" for run in good)
        lines.append(
            f"| {row['trace']} | {row['adapters']} ({last['distinct_adapters']}) | {row['memory']} "
            f"| {row['output_tokens_per_s']:,.0f} | {rates} "
            f"| {_number(row['floor_ratio'])} | {_pair(last['ttft_s'])} | {_pair(last['itl_ms'])} "
            f"| {last['host_ms_per_step']:.2f} | {_share(last['graph_share'])} | {_share(last['hit_rate'])} "
            f"| {last['reloads']} |"
        )
    return "\n".join(lines)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Replace a file as a whole, so that whatever cuts the program off leaves a readable one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(path)


def joined(results: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of several files of results; the runs of a row that stands in more than one of them are put together.

    Raises: ConfigError: a file holds no results, or two have been made with other versions.
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for path in results:
        try:
            report = json.loads(path.read_text())
            for row in report["rows"]:
                key = _key(row)
                before = rows.get(key, {"versions": report["versions"], "runs": []})
                if before["versions"] != report["versions"]:
                    raise ConfigError(f"{path}: row {key} was run with other versions than before")
                rows[key] = summary({**row, "versions": report["versions"]}, [*before["runs"], *row["runs"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path}: not a file of results: {error!r}") from error
    return list(rows.values())


def record(results: Sequence[Path], into: Path, commit: str) -> tuple[int, int]:
    """Merge files of results into the recorded rows: rows of the same trace, model, adapters and memory are replaced.

    Rows without a good run are left out. Returns: rows added, and rows replaced. Raises: ConfigError: not results.
    """
    new = {_key(row): recorded(row, commit) for row in joined(results) if row["output_tokens_per_s"] is not None}
    kept = {_key(row): row for row in (json.loads(into.read_text()) if into.exists() else [])}
    added = len(new.keys() - kept.keys())
    into.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f" {json.dumps(row)}" for row in (kept | new).values())
    into.write_text(f"[\n{lines}\n]\n")
    return added, len(new) - added


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in RECORDED[:4])


def recorded(row: Mapping[str, Any], commit: str) -> dict[str, Any]:
    """What is kept of a row: medians, and the rate of each good run."""
    return {
        "trace": row["trace"],
        "model": row["model"],
        "adapters": row["adapters"],
        "memory": row["memory"],
        "output_tokens_per_s": round(row["output_tokens_per_s"], 1),
        "floor_ratio": None if row["floor_ratio"] is None else round(row["floor_ratio"], 3),
        "runs": [round(run["output_tokens_per_s"], 1) for run in row["runs"] if not run["problems"]],
        "commit": commit,
        "versions": row["versions"],
    }


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _spread(values: Mapping[str, float] | None, unit: str) -> str:
    if values is None:
        return "-"
    return f"{values['p50']:.3g} / {values['p90']:.3g} / {values['p99']:.3g} {unit}"


def _pair(values: Mapping[str, float] | None) -> str:
    return "-" if values is None else f"{values['p50']:.3g} / {values['p99']:.3g}"
