"""Text to token ids and back, for whole texts and for streams. Knows the model's files, not the model.

Hugging Face's `tokenizers` does the work; transformers' PreTrainedTokenizerFast reads a folder's configuration and
renders chat templates. Neither imports any modelling code, nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from jinja2 import TemplateError
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from interleaf.errors import CheckpointError, ModelRejected, RequestRejected
from interleaf.weights.gguf_file import GgufFile
from interleaf.weights.locate import resolve_model

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_GGUF_RULES: dict[str, Callable[[bool], pre_tokenizers.PreTokenizer]] = {
    # Digits stand alone, each; what is between them is split as GPT-2 does.
    "smollm": lambda space: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=space)]
    ),
}
_UNREAD_FILES = ("tokenizer.model", "vocab.json", "tekken.json")


def load_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer of a folder, a .gguf file or a hub id; None if nothing there is one.

    Raises:
        CheckpointError: its files cannot be read, or are of a kind that is not.
        ModelRejected: a GGUF file's tokenizer is not supported.
    """
    path = resolve_model(model, with_weights=False)
    if path.suffix.lower() == ".gguf":
        return Tokenizer(_from_gguf(GgufFile(path)))
    if (path / "tokenizer.json").is_file():
        return Tokenizer(_from_folder(path))
    for name in _UNREAD_FILES:
        if (path / name).is_file():
            raise CheckpointError(f"{path}: has {name} but no tokenizer.json, the only form that is read")
    return None


class Tokenizer:
    """The tokenizer of one model. May be used by several threads.

    Attributes:
        vocab_size: ids are below it; the model's own vocabulary may be padded beyond.
        bos_token_id: None if the model has none.
        eos_token_ids: the tokenizer's end token, if it has one. What ends a sequence is the ModelSpec's to say.
    """

    def __init__(self, wrapped: PreTrainedTokenizerFast) -> None:
        self._wrapped = wrapped
        self._backend: BackendTokenizer = wrapped.backend_tokenizer
        # A training run's settings, which some tokenizer.json still carry: the engine limits lengths, and says so.
        self._backend.no_truncation()
        self._backend.no_padding()
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self.bos_token_id: int | None = wrapped.bos_token_id
        eos: int | None = wrapped.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        self._settling = _settling_tokens(self._backend, vocab)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text are recognised.

        Args:
            add_special_tokens: add what the model expects around a text (usually a begin token, or nothing).

        Raises: RequestRejected: the text is no valid Unicode.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as e:  # so tokenizers greets a lone surrogate, and anything that is no string
            raise RequestRejected(f"a text must be valid Unicode: {text[:40]!r}") from e
        return ids

    @property
    def has_chat_template(self) -> bool:
        return self._wrapped.chat_template is not None

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, by the model's chat template, which adds its special tokens itself.

        Args:
            messages: each a mapping with at least the strings "role" and "content".
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises: RequestRejected: the model has no template, a message is malformed, or the template refuses them.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text that `apply_chat` encodes."""
        if not self.has_chat_template:
            raise RequestRejected("messages were given, but the model has no chat template; give a text or token ids")
        for index, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                    raise RequestRejected(f'message {index} must be a mapping with strings "role" and "content"')
        if not messages:
            raise RequestRejected("messages must hold at least 1 message, got 0")
        try:
            text = self._wrapped.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as e:
            raise RequestRejected(f"the model's chat template refuses these messages: {e}") from e
        return str(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, ids beyond the vocabulary nothing.

        Spaces are left as they are (transformers' `clean_up_tokenization_spaces` is not applied).
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """A decoder for the tokens of one sequence, as they come."""
        return StreamDecoder(self, skip_special_tokens)

    def settles(self, token_id: int) -> bool:
        """Whether text up to and with this token can no longer be changed by a later one, unless it ends in U+FFFD."""
        return self._settling is None or token_id in self._settling


class StreamDecoder:
    """Text of one sequence while its tokens arrive.

    All that `push` returns, and then `flush`, joined, is `decode` of all tokens. Text once returned never changes, and
    no character is returned before its last byte is there.

    Decoders look at their neighbours (a first token loses its leading space), so a few tokens that have been returned
    already are decoded again before the new ones:

        ids   | returned, forgotten | returned, as context | pending |
              0                     _context               _pending
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._context = 0
        self._pending = 0

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        self._ids.append(token_id)
        if not self._tokenizer.settles(token_id):
            return ""
        text = self._pending_text()
        # An incomplete character decodes to U+FFFD. (A real one waits for the next token, too, which does no harm.)
        return "" if text.endswith(_REPLACEMENT) else self._advance(text)

    def flush(self) -> str:
        """What is left when the sequence has ended: bytes that never became a character, as U+FFFD."""
        return self._advance(self._pending_text())

    def _pending_text(self) -> str:
        known = self._tokenizer.decode(self._ids[self._context : self._pending], self._skip)
        return self._tokenizer.decode(self._ids[self._context :], self._skip)[len(known) :]

    def _advance(self, text: str) -> str:
        if text:  # tokens without text (skipped ones) are no context: what comes next would be taken for the beginning
            self._context, self._pending = self._pending, len(self._ids)
        return text


def _settling_tokens(backend: BackendTokenizer, vocab: Mapping[str, int]) -> frozenset[int] | None:
    """Tokens that end a run of bytes, for decoders that turn a whole run to U+FFFD if one byte of it is amiss.

    Llama 2 and Mistral write a rare character as tokens such as <0xE2>. What decodes to nothing (special tokens, when
    skipped; ids beyond the vocabulary) does not end a run. None: the decoder gathers no runs, so every token will do.
    """
    if "ByteFallback" not in repr(backend.decoder):
        return None
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    return frozenset(i for token, i in vocab.items() if i not in special and not _BYTE_TOKEN.fullmatch(token))


def _from_folder(folder: Path) -> PreTrainedTokenizerFast:
    try:
        wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # tokenizers raises plain Exception for a file that it cannot parse
        raise CheckpointError(f"{folder}: its tokenizer cannot be read ({type(e).__name__}: {e})") from e
    return wrapped


def _from_gguf(file: GgufFile) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer from the tokens, merges and settings in a GGUF file.

    The file only names the rule ("pre") that splits a text before BPE, llama.cpp knowing what it stands for. A wrong
    rule gives plausible, wrong ids, so a name that is not listed here is refused.
    """
    meta = file.with_prefix("tokenizer.ggml.")
    kind, rule = meta.get("model"), meta.get("pre")
    if kind != "gpt2" or rule not in _GGUF_RULES:
        known = ", ".join(map(repr, _GGUF_RULES))
        raise ModelRejected(
            str(file.path),
            [f"tokenizer {kind!r} with pre-tokenizer {rule!r} is not supported, only 'gpt2' with {known}"],
        )
    lacking = [key for key in ("tokens", "token_type", "merges") if key not in meta]
    if lacking:
        raise CheckpointError(f"{file.path}: lacks tokenizer.ggml.{', tokenizer.ggml.'.join(lacking)}")
    tokens: list[str] = meta["tokens"]
    kinds: list[int] = meta["token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["merges"]]
    backend = BackendTokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = _GGUF_RULES[rule](bool(meta.get("add_space_prefix", False)))
    backend.decoder = decoders.ByteLevel()
    # Tokens that are looked for in the text before anything else; "control" ones are left out when text is decoded.
    for special, kind in ((True, gguf.TokenType.CONTROL), (False, gguf.TokenType.USER_DEFINED)):
        added = [
            AddedToken(t, normalized=False, special=special) for t, k in zip(tokens, kinds, strict=True) if k == kind
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: meta.get(f"{key}_token_id") for name, key in named.items()}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        add_bos_token=bool(meta.get("add_bos_token", False)),
        add_eos_token=bool(meta.get("add_eos_token", False)),
        chat_template=file.get("tokenizer.chat_template"),
        **{f"{name}_token": tokens[i] for name, i in ids.items() if i is not None},
    )
