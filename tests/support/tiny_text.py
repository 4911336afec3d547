"""A tokenizer for the tiny models: byte-level BPE over exactly their vocabulary, with a chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_models import VOCAB

CORPUS = [
    "The sea is wide, and nobody who has seen it from a small boat calls it blue without a reason.",
    "A café in Zürich sells crème brûlée; naïve guests pay 12 € for it 🎉 and say: déjà vu!",
    '{"role": "user", "content": "Where is the sea?"}\n0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ\n\n',
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and its companions. Ids 0 to 2 are special, as the tiny models' configuration says."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator(CORPUS * 4, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
