"""The command line: `interleaf serve`, `generate` and `adapters check`. Parses and prints; the rooms below work."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperCommand

from interleaf import __version__
from interleaf.errors import ConfigError, InterleafError
from interleaf.server.help_page import help_lines
from interleaf.server.options import OPTIONS, Kind

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
adapters_app = typer.Typer(help="Look at adapters.", no_args_is_help=True)
app.add_typer(adapters_app, name="adapters")


def _say_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Serve thousands of LoRA adapters from one base model."""


_HELP_WIDTH = 100
"""Columns of `serve --help` at most: longer lines are hard to read."""


def _whole(text: Any) -> Any:
    """A whole number; any other text is left to those who know the limits, and refuse it with them."""
    try:
        return int(text)
    except ValueError:
        return text


def _real(text: Any) -> Any:
    """A number; likewise."""
    try:
        return float(text)
    except ValueError:
        return text


Model = Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, a hub id, or a config.json.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
PageTokens = Annotated[int, typer.Option(help="Tokens of KV cache in a page.", parser=_whole, metavar="N")]
LoadFormat = Annotated[str, typer.Option(help="auto, safetensors, gguf, or dummy (random weights).")]


@app.command()
def generate(
    model: Model,
    prompt: Annotated[list[str], typer.Option(help="A text to continue; may be given several times.")],
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH of a PEFT folder, or NAME=dummy:r=16,targets=all,seed=7; several are allowed."),
    ] = None,
    use: Annotated[
        list[str] | None,
        typer.Option(help="Who answers: adapter names, or `base`. By default the base model and every adapter."),
    ] = None,
    chat: Annotated[bool, typer.Option(help="Put each prompt through the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Output tokens at most.", parser=_whole, metavar="N")] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 chooses the most probable token.", parser=_real, metavar="NUMBER")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Keep the most probable tokens that sum to this.", parser=_real, metavar="NUMBER")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.", parser=_whole, metavar="N")
    ] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes the draw repeatable.", parser=_whole, metavar="N")] = None,
    memory: Annotated[str, typer.Option(help="Budget of the page pool, such as 1GiB.")] = "1GiB",
    page_tokens: PageTokens = 16,
    max_model_len: Annotated[
        int | None, typer.Option(help="Prompt and output tokens at most.", parser=_whole, metavar="N")
    ] = None,
    dtype: Dtype = "auto",
    load_format: LoadFormat = "auto",
) -> None:
    """Answer prompts with the base model and any adapters, all in one batch."""
    from interleaf.core import SamplingParams
    from interleaf.engine.llm import LLM

    with _errors_as_messages():
        sources = _names_and_paths(adapter or [])
        names: list[str | None] = [None if name == "base" else name for name in use or ["base", *sources]]
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        )  # before the model loads: a bad value is known at once
        with _progress() as progress:
            llm = LLM(
                model,
                adapters=sources,
                progress=progress,
                memory=memory,
                page_tokens=page_tokens,
                max_model_len=max_model_len,
                dtype=dtype,
                load_format=load_format,
            )
        with llm:
            pairs = [(text, name) for text in prompt for name in names]
            prompts: list[Any] = [[{"role": "user", "content": text}] if chat else text for text, _ in pairs]
            outputs = llm.generate(prompts, params, [name for _, name in pairs])
        console = Console(highlight=False, soft_wrap=True)
        failed = False
        for (text, name), output in zip(pairs, outputs, strict=True):
            console.print(f"[bold]{name or 'base'}[/bold] ", end="")
            console.print(text, style="dim", markup=False)
            console.print(output.error or output.outputs[0].text.strip(), markup=False)
            failed = failed or output.error is not None
        if failed:
            raise typer.Exit(1)


def _serve(**given: Any) -> None:
    """Serve a model and its adapters over HTTP, as OpenAI's API does: an adapter's name is a `model`.

    On this machine only:

        interleaf serve models/SmolLM2-135M-Instruct.Q4_1.gguf \\
            --adapter pirate=examples/adapters/pirate

    To others: set INTERLEAF_API_KEY, and --host 0.0.0.0.

    Every option can also stand in a TOML file (--config interleaf.toml, there `max_num_seqs = 32`) and in the
    environment (INTERLEAF_MAX_NUM_SEQS=32). An option wins over the environment, and that over the file; what is
    unknown is refused. docs/operate.md is the operator's page.
    """
    from interleaf.server.settings import load_settings

    with _errors_as_messages(), ExitStack() as loading:
        settings = load_settings(given, os.environ, given.pop("config"))

        with _packages_of_the_server():  # slow to import: after what may be wrong with the settings
            from interleaf.server.host_memory import host_memory_bytes, host_memory_warnings
            from interleaf.server.logs import configure_logging, log_fields
            from interleaf.server.start import serve, warnings

        configure_logging(settings.server.log_format, settings.server.log_level)
        logger = logging.getLogger("interleaf")
        for warning in [*warnings(settings.server), *host_memory_warnings(settings.engine, host_memory_bytes())]:
            logger.warning(warning)
        progress = loading.enter_context(_progress())

        def ready(url: str) -> None:
            loading.close()
            logger.info("ready: %s answers at %s/v1, adapters by their names", settings.server.name, url)

        code = serve(settings, progress, ready)
        logger.info("stopped", extra=log_fields(exit_code=code))
    raise typer.Exit(code)


def _serve_signature() -> inspect.Signature:
    """The parameters of `serve`: one for each setting, all optional, so that what is not given can be told apart.

    Numbers are taken as texts: what is none is refused where the setting's limits are known.
    """
    annotations: dict[str, Any] = {"config": Annotated[str | None, typer.Option()]}
    for option in OPTIONS:
        if option.name == "model":
            annotations[option.name] = Annotated[str | None, typer.Argument()]
        elif option.kind is Kind.SWITCH:
            annotations[option.name] = Annotated[bool | None, typer.Option(option.flags.replace(" ", ""))]
        elif option.kind.is_many:
            annotations[option.name] = Annotated[list[str] | None, typer.Option(option.flag)]
        else:
            annotations[option.name] = Annotated[str | None, typer.Option(option.flag)]
    return inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )


class _Serve(TyperCommand):
    """`serve`, with a page of help that shows every name whole, which the library's tables do not."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See Typer; as there, the page is printed, and the formatter left empty."""
        console = Console(highlight=False, soft_wrap=True)
        console.width = console.width or _HELP_WIDTH  # COLUMNS=0 says that there is no terminal
        for line, is_heading in help_lines(inspect.getdoc(_serve) or "", min(console.width, _HELP_WIDTH)):
            console.print(line, style="bold" if is_heading else None, markup=False)


_serve.__signature__ = _serve_signature()  # type: ignore[attr-defined]
app.command("serve", cls=_Serve)(_serve)


@adapters_app.command("check")
def check(
    path: Annotated[str, typer.Argument(help="A PEFT folder, or dummy:r=16,targets=all,seed=7.")],
    model: Annotated[str, typer.Option(help="The model it is for: a folder, a .gguf file, a hub id or a config.json.")],
    page_tokens: PageTokens = 16,
    dtype: Dtype = "auto",
    load_format: LoadFormat = "auto",
) -> None:
    """Say what an adapter is and what it takes on this model (exit 0), or everything that is wrong with it (exit 1)."""
    from interleaf.engine.inspect_adapter import inspect_adapter
    from interleaf.errors import AdapterRejected

    with _errors_as_messages():
        console = Console(highlight=False, soft_wrap=True)
        try:
            lines = inspect_adapter(path, model, dtype=dtype, page_tokens=page_tokens, load_format=load_format)
        except AdapterRejected as rejected:
            console.print(f"{rejected.adapter} cannot be served:", markup=False)
            for problem in rejected.problems:
                console.print(f"  - {problem}", markup=False)
            raise typer.Exit(1) from None
        for key, value in lines:
            console.print(f"{key:<10} {value}", markup=False)


@contextmanager
def _errors_as_messages() -> Iterator[None]:
    """Errors that a caller can cause become one line and exit code 2; bugs keep their traceback."""
    try:
        yield
    except InterleafError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


@contextmanager
def _packages_of_the_server() -> Iterator[None]:
    """Raises: ConfigError: one of them is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise ConfigError(
            f"serving needs the packages of interleaf[server], there is no module {missing!r}: in a checkout run "
            "`make serve`, or `.venv/bin/pip install -c constraints.txt -e '.[server]'`"
        ) from error


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error for each thing that loads."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield update


def _names_and_paths(texts: list[str]) -> dict[str, str]:
    """Adapters by name, from NAME=PATH texts."""
    sources: dict[str, str] = {}
    for text in texts:
        name, separator, path = text.partition("=")
        if not separator or not name or not path:
            raise typer.BadParameter(f"--adapter must be NAME=PATH, got {text!r}")
        if name == "base":
            raise typer.BadParameter("--adapter base=...: `base` is the name of the base model")
        if name in sources:
            raise typer.BadParameter(f"--adapter names {name!r} twice: {sources[name]!r} and {path!r}")
        sources[name] = path
    return sources


def main() -> None:
    """Entry point of the `interleaf` command."""
    app()
