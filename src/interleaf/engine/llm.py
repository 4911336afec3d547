"""`LLM`: a model and its adapters in this process, for scripts and tests. Prompts in, finished outputs out."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from interleaf.config import EngineConfig
from interleaf.core import RequestFailed, SamplingParams, TokenEvent
from interleaf.engine.build import EngineParts, build_engine
from interleaf.engine.client import InProcessClient
from interleaf.engine.interrupts import InterruptsBetweenSteps
from interleaf.engine.output import Completion, RequestOutput
from interleaf.engine.tokenizer import Tokenizer, load_tokenizer
from interleaf.errors import AdapterRejected, ConfigError, RequestRejected
from interleaf.stats import EngineStats

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the messages of a chat (each with "role" and "content")."""


class LLM:
    """A base model that answers with any of its adapters, many in one batch.

    ```python
    llm = LLM("path-or-hub-id-or.gguf", adapters={"pirate": "examples/adapters/pirate"})
    outputs = llm.generate(["Where is the sea?"], SamplingParams(max_tokens=32, temperature=0), adapter="pirate")
    print(outputs[0].outputs[0].text)
    ```

    Args:
        model: a Hugging Face folder, a .gguf file, a hub id, or (load_format="dummy") a config.json.
        adapters: PEFT folders, or "dummy:r=16,targets=all,seed=7", by the names that requests use.
        tokenizer: where to read the tokenizer; by default from the model. Without one, prompts are token ids.
        progress: called with (what, done, total) while weights and adapters load.
        settings: fields of `interleaf.config.EngineConfig`.

    Raises: ConfigError, ModelRejected, CheckpointError, PoolTooSmall, AdapterError.

    To be used by one thread at a time. `close` (or a `with` block) releases memory and threads.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        config = EngineConfig.from_mapping(settings)
        if adapters is not None and not isinstance(adapters, Mapping):
            raise ConfigError(f"adapters must be a mapping of names to paths, got {adapters!r}")
        self._tokenizer = load_tokenizer(os.fspath(tokenizer if tokenizer is not None else model))
        self._parts = build_engine(os.fspath(model), config, progress)
        self._client = InProcessClient(self._parts)
        try:
            for done, (name, source) in enumerate((adapters or {}).items(), start=1):
                self.add_adapter(name, source)
                if progress is not None:
                    progress("adapters", done, len(adapters or {}))
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def parts(self) -> EngineParts:
        """The engine's rooms, for tests and tools that look inside."""
        return self._parts

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names that `generate` accepts."""
        return self._client.adapters()

    def add_adapter(self, name: str, source: str | os.PathLike[str]) -> None:
        """Register an adapter. Raises: AdapterRejected, AdapterNameTaken, PoolTooSmall; nothing changes then."""
        if not isinstance(source, str | os.PathLike):
            raise AdapterRejected(str(name), [f"its source must be a path or a text, got {source!r}"])
        self._client.add_adapter(name, os.fspath(source))

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter and free what it holds on every tier. Raises: AdapterNotFound."""
        self._client.remove_adapter(name)

    def stats(self) -> EngineStats:
        """Pages by owner, adapters, steps."""
        return self._client.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, all in one batch as far as memory allows.

        Args:
            prompts: one prompt, or a list of them.
            params: for all prompts, or one per prompt.
            adapter: a name for all prompts, or one per prompt; None is the base model.

        Returns: one output per prompt, in order. A request that fails on the way (an adapter's folder has vanished)
            says so in `RequestOutput.error`; the others are answered.

        Raises: RequestRejected, AdapterNotFound: for any of the prompts; then none has been started.
        """
        listed = _as_prompts(prompts)
        each_params = _one_each("params", SamplingParams() if params is None else params, len(listed), SamplingParams)
        each_adapter = _one_each("adapter", adapter, len(listed), (str, type(None)))
        token_ids = [self._encode(prompt) for prompt in listed]
        for position, request in enumerate(zip(token_ids, each_params, each_adapter, strict=True)):
            if request[1].stop and self._tokenizer is None:
                raise RequestRejected(f"prompt {position}: stop strings need a tokenizer, and the model has none")
            try:
                self._client.check(*request)
            except RequestRejected as error:
                raise type(error)(f"prompt {position}: {error}") from None

        requests: dict[str, list[Completion]] = {}
        errors: dict[str, str] = {}
        with InterruptsBetweenSteps() as interrupts:
            try:
                for request in zip(token_ids, each_params, each_adapter, strict=True):
                    id_ = self._client.submit(*request)
                    requests[id_] = [self._completion(index, request[1]) for index in range(request[1].n)]
                self._run(requests, errors, interrupts)
            except BaseException:  # an interrupt from the keyboard, too, leaves nothing running
                for id_ in requests:
                    self._client.abort(id_)
                self._drain()
                raise
        return [
            RequestOutput(
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=tuple(ids),
                adapter=name,
                outputs=tuple(completion.finish() for completion in completions),
                error=errors.get(id_),
            )
            for prompt, ids, name, (id_, completions) in zip(
                listed, token_ids, each_adapter, requests.items(), strict=True
            )
        ]

    def close(self) -> None:
        """Release memory and threads; the object is of no use afterwards."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], Mapping)):
            return [_as_int(token) for token in prompt]  # token ids; the client checks them one by one
        if self._tokenizer is None:
            raise RequestRejected("the model has no tokenizer: give prompts as lists of token ids")
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        return self._tokenizer.apply_chat(prompt)  # type: ignore[arg-type]

    def _completion(self, index: int, params: SamplingParams) -> Completion:
        return Completion(index, params, None if self._tokenizer is None else self._tokenizer.stream())

    def _run(
        self, requests: dict[str, list[Completion]], errors: dict[str, str], interrupts: InterruptsBetweenSteps
    ) -> None:
        num_open = len(requests)
        while num_open:
            interrupts.check()
            for event in self._client.poll():
                completions = requests.get(event.request_id)
                if completions is None:
                    continue  # the last words of a call that was interrupted
                if isinstance(event, TokenEvent):
                    if completions[event.index].push(event):
                        self._client.abort(event.request_id, event.index)
                    continue
                num_open -= 1
                if isinstance(event, RequestFailed):
                    errors[event.request_id] = event.reason

    def _drain(self) -> None:
        while self._client.has_work:
            self._client.poll()


def _as_int(token: Any) -> Any:
    """Whole numbers of other libraries as Python's; anything else as it is."""
    try:
        return token if isinstance(token, bool) else operator.index(token)
    except TypeError:
        return token


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestRejected(f"prompts must be a text, token ids, messages or a list of those, got {prompts!r}")
    if prompts and isinstance(prompts[0], int | Mapping):
        return [prompts]  # type: ignore[list-item]
    for position, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise RequestRejected(f"prompt {position} must be a text, token ids or messages, got {prompt!r}")
    return list(prompts)  # type: ignore[arg-type]


def _one_each(name: str, value: Any, count: int, kind: type | tuple[type, ...]) -> list[Any]:
    """`count` values from one for all or from a list of one each."""
    values = [value] * count if isinstance(value, kind) else value
    if not isinstance(values, list | tuple) or not all(isinstance(v, kind) for v in values):
        raise RequestRejected(f"{name} must be one value or a list of one per prompt, got {value!r}")
    if len(values) != count:
        raise RequestRejected(f"{name}: {len(values)} given for {count} prompts")
    return list(values)
