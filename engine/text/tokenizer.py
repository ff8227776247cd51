"""Text to token ids and back: `load_tokenizer` and `Tokenizer`.

Three rules hold here and nowhere else:

- A token's bytes, not its text, are what is decoded: a character may be spread over tokens.
- Special tokens written in a text are parsed, so a rendered chat becomes the ids that were meant.
- A text that already begins with BOS gets no second one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, RequestError, TemplateError
from engine.text.chat_template import ChatTemplate
from engine.text.gguf_vocab import parts_from_gguf
from engine.text.hf_files import parts_from_directory
from engine.text.parts import TokenizerParts
from engine.text.token_bytes import TokenBytes, strip_spaces

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(
    source: str | os.PathLike[str] | Mapping[str, Any], *, chat_template: str | None = None
) -> Tokenizer:
    """Load the tokenizer of a model.

    Parameters
    ----------
    source : path or mapping
        A directory with ``tokenizer.json``, or the metadata of a .gguf file (key -> value).
    chat_template : str, optional
        Jinja source to use in place of the model's own templates.

    Raises
    ------
    ConfigError
        If something is missing, damaged or unknown; the message says what and where.
    """
    if isinstance(source, Mapping):
        parts = parts_from_gguf(source)
    else:
        directory = Path(source)
        if not directory.is_dir():
            raise ConfigError(f"a tokenizer is read from a directory; {directory} is none")
        parts = parts_from_directory(directory)
    return Tokenizer(parts, chat_template=chat_template)


class Tokenizer:
    """Text to token ids and back.

    Parameters
    ----------
    parts : TokenizerParts
        See `load_tokenizer`.
    chat_template : str, optional
        Jinja source to use in place of those of `parts`.

    Attributes
    ----------
    bos_token_id : int or None
    eos_token_ids : tuple of int
        Tokens that end a sequence, the tokenizer's own first, then those of the model.
    special_ids : frozenset of int
        Tokens that decoding leaves out.
    strip_left : int
        Spaces that decoding takes off the front of a text (sentencepiece puts one there).
    """

    def __init__(self, parts: TokenizerParts, *, chat_template: str | None = None) -> None:
        self._backend = parts.backend
        self._bytes = TokenBytes(parts.backend)
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.special_ids = self._bytes.special_ids
        self.strip_left = self._bytes.strip_left
        self._special_tokens = dict(parts.special_tokens)
        sources = parts.chat_templates if chat_template is None else {"default": chat_template}
        self._templates = {name: ChatTemplate(text) for name, text in sources.items()}

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model may have more rows, without text."""
        return self._bytes.vocab_size

    @property
    def max_token_chars(self) -> int:
        """Most characters of one token: a text of n tokens is at most n times as long."""
        return self._bytes.max_token_chars

    @property
    def eos_token_id(self) -> int | None:
        """The first of `eos_token_ids`."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template."""
        template = self._templates.get("default")
        return template.source if template else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`.

        Parameters
        ----------
        text : str
            Special tokens in it are parsed.
        add_special_tokens : bool
            Put BOS (and EOS) where the model expects them; a BOS that the text already begins
            with is not doubled.

        Raises
        ------
        RequestError
            If `text` is no str, or holds half of a surrogate pair.
        """
        if not isinstance(text, str):
            raise RequestError(f"text must be a str; got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"text must be valid Unicode; {error}") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        bos = self.bos_token_id
        doubled = add_special_tokens and bos is not None and ids[:2] == [bos, bos]
        return ids[1:] if doubled else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Ids without a token (a model's padded rows) have no text.

        Raises
        ------
        RequestError
            If an id is negative or no integer.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        try:
            data = b"".join([self._bytes[i] for i in ids if i not in skipped])
        except TypeError:
            raise RequestError(f"ids must be a sequence of token ids; got {ids!r:.80}") from None
        return strip_spaces(data.decode("utf-8", "replace"), self.strip_left)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that `token_id` stands for; none for an id without a token."""
        return self._bytes[token_id]

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it, or None."""
        return self._bytes.spelling(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt of a chat, as text, by the model's own template.

        Parameters
        ----------
        messages : sequence of dict
            Each with "role" and "content": a str or a list of ``{"type": "text", "text": ...}``.
        add_generation_prompt : bool
            End with the opening of the assistant's answer.
        tools : sequence of dict, optional
            JSON schemas of functions that the model may call.
        **kwargs
            Further variables of the template.

        Raises
        ------
        RequestError
            If the messages, the tools or the name of a variable are not acceptable.
        TemplateError
            If the model has no template, or its template fails.
        """
        return self._choose_template(tools is not None).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            special_tokens=self._special_tokens,
            variables=kwargs,
        )

    def template_variables(self, has_tools: bool) -> frozenset[str]:
        """Return which further variables the template reads that `apply_chat_template` chooses."""
        return self._choose_template(has_tools).variables

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Return the ids of a chat; takes what `apply_chat_template` takes.

        A template writes every special token itself, so none is added.
        """
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)

    def _choose_template(self, has_tools: bool) -> ChatTemplate:
        names = ("tool_use", "default") if has_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        have = f"; it has {', '.join(map(json.dumps, self._templates))}" if self._templates else ""
        raise TemplateError(
            f"the model has no default chat template{have}; give one to load_tokenizer, "
            "or complete a plain prompt"
        )
