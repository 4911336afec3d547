"""The text of `interleaf serve --help`: every name whole, with its unit and default, on a narrow terminal, too.

Knows options and a width; prints nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from interleaf.server.options import OPTIONS

UNITS = (
    "SIZE is bytes, or a size such as 512MiB (powers of 1024) or 2GB (powers of 1000). DIR, PATH and FILE are relative "
    "to the folder in which the server starts."
)


def help_lines(about: str, width: int) -> Iterator[tuple[str, bool]]:
    """Lines of the page, and whether each is a heading.

    Args:
        about: what the command does, in paragraphs; lines that are indented in it stay as they are.
        width: of a line at most; only a flag that is longer, or an indented line of `about`, is.
    """
    yield "Usage: interleaf serve [OPTIONS] MODEL", True
    for paragraph in [*about.split("\n\n"), UNITS]:
        yield "", False
        if paragraph.startswith(" "):
            yield from ((line, False) for line in paragraph.splitlines())
        else:
            yield from ((line, False) for line in _wrapped(" ".join(paragraph.split()), width, 0))
    group = ""
    for option in OPTIONS:
        if option.group != group:
            group = option.group
            yield "", False
            yield group, True
        if option.name == "model":
            yield "  MODEL", False
            yield from ((line, False) for line in _wrapped(option.help, width, 6))
            yield "  --config FILE", False
            yield from ((line, False) for line in _wrapped("A TOML file with settings.", width, 6))
            continue
        name = f"{option.flags} {option.metavar}".rstrip()
        default = f"  (default: {option.default})" if option.default else ""
        if len(name + default) + 2 <= width:
            yield f"  {name}{default}", False
        else:
            yield f"  {name}", False
            yield from ((line, False) for line in _wrapped(default.strip(), width, 6))
        yield from ((line, False) for line in _wrapped(option.help, width, 6))


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    """A text in lines, broken at blanks only: a flag or a path in it stays whole."""
    margin = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
