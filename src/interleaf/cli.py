"""The command line: `interleaf generate` and `interleaf adapters check`. Parses and prints; the rooms below work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from interleaf.errors import InterleafError

app = typer.Typer(
    help="Serve thousands of LoRA adapters from one base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
adapters_app = typer.Typer(help="Look at adapters.", no_args_is_help=True)
app.add_typer(adapters_app, name="adapters")

Model = Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, a hub id, or a config.json.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
PageTokens = Annotated[int, typer.Option(help="Tokens of KV cache in a page.")]
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
    max_tokens: Annotated[int, typer.Option(help="Output tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 chooses the most probable token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the most probable tokens that sum to this.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes the draw repeatable.")] = None,
    memory: Annotated[str, typer.Option(help="Budget of the page pool, such as 1GiB.")] = "1GiB",
    page_tokens: PageTokens = 16,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and output tokens at most.")] = None,
    dtype: Dtype = "auto",
    load_format: LoadFormat = "auto",
) -> None:
    """Answer prompts with the base model and any adapters, all in one batch."""
    from interleaf.core import SamplingParams
    from interleaf.engine.llm import LLM

    with _errors_as_messages():
        sources = dict(_name_and_path(text) for text in adapter or [])
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
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error for each thing that loads."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield update


def _name_and_path(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise typer.BadParameter(f"--adapter must be NAME=PATH, got {text!r}")
    return name, path


def main() -> None:
    """Entry point of the `interleaf` command."""
    app()
