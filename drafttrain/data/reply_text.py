"""The text of the tokens that follow a prompt.

Tokenizers that mark the start of a word (SentencePiece, Metaspace) decode the mark to a space, but drop it at the start of a
text. A reply that is decoded alone may thus lose its first space. Worked example, the prompt `a boy` and the reply `▁named`:

    alone        `named`      after the prompt it would be read as `a boynamed`
    following    ` named`     right here; after `[/INST]` some of these tokenizers read it as two spaces
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.data.prompts import encode_messages
from drafttrain.model.images import without_images
from drafttrain.targets.images import TEXT_ONLY, Images

TAIL = 32  # tokens of a prompt that are decoded with the tokens that follow
UNFINISHED = "\ufffd"  # a tokenizer decodes an incomplete character to this


def text_alone(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], special: bool = False) -> str:
    """The ids' text. special: with special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def text_following(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], ids: Sequence[int], special: bool = False) -> str:
    """The text that the ids add to that of the ids before them."""
    context = tail_of(tokenizer, before)
    context_text, full_text = (text_alone(tokenizer, token_ids, special) for token_ids in (context, [*context, *ids]))
    return full_text[len(context_text) :] if full_text.startswith(context_text) else text_alone(tokenizer, ids, special)


def tail_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """The last ids of a text, from a whole character on."""
    tail = without_images(list(ids[-TAIL:]))
    while tail and text_alone(tokenizer, tail, special=True).startswith(UNFINISHED):
        tail = tail[1:]
    return tail


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows one prompt."""

    tokenizer: PreTrainedTokenizerBase
    prompt: list[int]
    encode: Callable[[str], list[int]]  # ids of the prompt, followed by a reply of this text

    @staticmethod
    def of_messages(
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        images: Images = TEXT_ONLY,
        arguments: Mapping[str, Any] | None = None,
    ) -> Continuation:
        """Of a conversation whose ids are `prompt`. arguments: for the template."""
        return Continuation(
            tokenizer, list(prompt), lambda reply: encode_messages(tokenizer, messages, images, reply, arguments)
        )

    @staticmethod
    def of_ids(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> Continuation:
        """Of a plain text, given by its ids."""
        text = text_alone(tokenizer, without_images(list(prompt)), special=True)

        def encode(reply: str) -> list[int]:
            return list(tokenizer(text + reply, add_special_tokens=False, verbose=False)["input_ids"])

        return Continuation(tokenizer, encode(""), encode)

    def text(self, ids: Sequence[int]) -> str:
        """The text of these ids as a reply: the one that, written after the prompt, gives them again."""
        return text_following(self.tokenizer, self.context(ids), ids)

    def context(self, ids: Sequence[int]) -> list[int]:
        """The ids to decode before the reply `ids`, whose own text is to be taken off; none if the reply is decoded alone."""
        isolated_text, continued_text = text_alone(self.tokenizer, ids), text_following(self.tokenizer, self.prompt, ids)
        if isolated_text == continued_text or self._agreement(isolated_text, ids) >= self._agreement(continued_text, ids):
            return []
        return tail_of(self.tokenizer, self.prompt)

    def _agreement(self, text: str, ids: Sequence[int]) -> int:
        """How many of the first tokens of prompt and reply a reply of this text gives again."""
        try:
            reencoded = self.encode(text)
        except UserError:  # a template that refuses the reply
            return 0
        pairs = enumerate(zip(reencoded, [*self.prompt, *ids], strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(reencoded), len(self.prompt) + len(ids)))
