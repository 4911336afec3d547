"""`python -m interleaf`: the command line."""

from interleaf.cli import main

main()
