"""What the supervisor starts: `python -m interleaf.engine.roles ROLE REPORTS`. Imports what the role needs, no more.

Only the engine and the publisher import torch: an API process without it starts sooner and takes 200 MB less.
"""

from __future__ import annotations

import sys

from interleaf.engine.child import Parent


def main() -> int:
    """Be one of the processes. Returns: its exit code."""
    role, reports = sys.argv[1], int(sys.argv[2])
    match role:
        case "engine":
            from interleaf.engine import process

            return process.run_engine(Parent(reports))
        case "publisher":
            from interleaf.engine import publisher

            return publisher.run_publisher(Parent(reports, publisher.clear_up))
        case "api":
            from interleaf.engine import worker

            return worker.run_worker(Parent(reports))
    raise SystemExit(f"unknown role {role!r}")


if __name__ == "__main__":
    sys.exit(main())
