"""`python -m interleaf.sim`."""

from interleaf.sim.cli import main

main()
