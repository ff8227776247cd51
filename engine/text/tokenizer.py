"""`load_tokenizer` and `Tokenizer`: encode text to token ids, and decode them.

Three rules are implemented only here:

- Decoding concatenates the tokens' bytes, not their texts: a character may span several tokens.
- Special tokens written in a text are parsed, so that a rendered chat yields the intended ids.
- BOS is not added to a text that already starts with it; a BOS written by the user stays.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from engine.checks import checked_text, shown_with_type
from engine.errors import ConfigError, RequestError, TemplateError
from engine.model_files import excerpt
from engine.text.chat_template import ChatTemplate
from engine.text.content_marks import ContentMarks, choose_marks
from engine.text.control_tokens import ControlFinder, Spans, TwinEncoder, control_tokens
from engine.text.encode_worker import WorkerEncoder, encode_here
from engine.text.gguf_vocab import parts_from_gguf
from engine.text.hf_files import parts_from_directory
from engine.text.parts import TokenizerParts
from engine.text.token_bytes import TokenBytes, strip_spaces

__all__ = ["ChatPrompt", "Tokenizer", "load_tokenizer"]

MAX_DECODED_IDS = 1 << 24  # maximum ids returned by `encode` (MAX_IDS of encode_worker.py)


def load_tokenizer(
    source: str | os.PathLike[str] | Mapping[str, Any], *, chat_template: str | None = None
) -> Tokenizer:
    """Load a model's tokenizer.

    Parameters
    ----------
    source : path or mapping
        Directory with ``tokenizer.json``, or the metadata of a .gguf file (key -> value).
    chat_template : str, optional
        Jinja source to use instead of the model's own templates.

    Raises
    ------
    ConfigError
        If anything is missing, damaged or unsupported; the message says what and where.
    """
    if isinstance(source, Mapping):
        parts = parts_from_gguf(source)
    else:
        directory = Path(source)
        if not os.path.isdir(directory):
            got = excerpt(directory)
            raise ConfigError(f"source must be a directory or .gguf metadata; got {got}")
        parts = parts_from_directory(directory)
    try:
        return Tokenizer(parts, chat_template=chat_template)
    except ConfigError as error:
        place = "the .gguf file" if isinstance(source, Mapping) else excerpt(Path(source))
        raise ConfigError(f"tokenizer of {place}: {error}") from error


class _Control(NamedTuple):
    """Control tokens of a chat template."""

    marks: ContentMarks
    find: Callable[[str], Spans]
    encode: Callable[[str, bool, Spans], tuple[list[int], bool]]


class ChatPrompt(NamedTuple):
    """A rendered conversation.

    Attributes
    ----------
    text : str
    spans : sequence of (int, int), optional
        Start and end of each control token in `text`, all others being ordinary text; None if
        `text` spells no others.
    control : optional
        How to encode around `spans`.
    """

    text: str
    spans: Spans | None = None
    control: _Control | None = None


def _unmarked(marked: str, control: _Control) -> ChatPrompt:
    """Return a prompt without its marks, with the places of the template's control tokens."""
    text = control.marks.unmark(marked)
    if text == marked:
        return ChatPrompt(text)
    own = control.find(marked)  # marks are in no token
    return ChatPrompt(text, None if control.find(text) == own else own, control)


class Tokenizer:
    """Encodes text to token ids, and decodes them.

    Parameters
    ----------
    parts : TokenizerParts
        See `load_tokenizer`.
    chat_template : str, optional
        Jinja source to use instead of the templates in `parts`.

    Attributes
    ----------
    bos_token_id : int or None
    eos_token_ids : tuple of int
        Tokens that end a sequence: first the tokenizer's own, then the model's.
    special_ids : frozenset of int
        Tokens omitted by `skip_special_tokens`.
    strip_left : int
        Number of leading spaces that decoding strips from a text (sentencepiece adds one).
    response_format : (str, mapping) or None
        How the model's answers are read, as it declares it: "response_template" or
        "response_schema", and its value.
    """

    def __init__(self, parts: TokenizerParts, *, chat_template: str | None = None) -> None:
        self._backend = parts.backend
        self._encode = parts.encoder or functools.partial(encode_here, parts.backend)
        self._bytes = TokenBytes(parts.backend)
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.special_ids = self._bytes.special_ids
        self.strip_left = self._bytes.strip_left
        self._special_tokens = dict(parts.special_tokens)
        sources = parts.chat_templates if chat_template is None else {"default": chat_template}
        self._listed_control = parts.chat_control_tokens
        self.response_format = parts.response_format
        self._controls: dict[str, _Control] = {}
        self._templates = {name: ChatTemplate(text) for name, text in sources.items()}

    @property
    def vocab_size(self) -> int:
        """Largest id plus one; a model's embedding may be padded to more rows."""
        return self._bytes.vocab_size

    @property
    def max_token_chars(self) -> int:
        """Maximum characters per token; bounds the length of a text of n tokens."""
        return self._bytes.max_token_chars

    @property
    def eos_token_id(self) -> int | None:
        """The first of `eos_token_ids`."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of the named special tokens that the model has: "bos_token", "eos_token", ..."""
        return dict(self._special_tokens)

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template."""
        template = self._templates.get("default")
        return template.source if template else None

    def encode(
        self, text: str, add_special_tokens: bool = True, *, text_pair: str | None = None
    ) -> list[int]:
        """Encode `text` to token ids.

        Parameters
        ----------
        text : str
            Special tokens written in it are parsed.
        add_special_tokens : bool
            Add BOS (and EOS) if the model expects them; BOS is not added if the text already starts
            with it.
        text_pair : str, optional
            A second text, behind the first as the model's files write pairs.

        Raises
        ------
        RequestError
            If `text` is not a str, contains an unpaired surrogate, or exceeds the limits of
            `engine.text.encode_worker`.
        """
        text = checked_text("text", text)
        if not isinstance(add_special_tokens, bool):
            got = shown_with_type(add_special_tokens)
            raise RequestError(f"add_special_tokens must be True or False; got {got}")
        if text_pair is not None:
            text_pair = checked_text("text_pair", text_pair)
            return self._without_second_bos(*self._encode(text, add_special_tokens, text_pair))
        return self._without_second_bos(*self._encode(text, add_special_tokens))

    def _without_second_bos(self, ids: list[int], is_added: bool) -> list[int]:
        # Only an added BOS is dropped; a second one written in the text stays.
        return ids[1:] if is_added and ids[0] == self.bos_token_id else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decode `ids` to text; invalid UTF-8 becomes U+FFFD.

        Ids without a token (padding rows of the embedding) decode to nothing.

        Raises
        ------
        RequestError
            If an id is negative or not an integer, or there are more than 2^24.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        try:
            given = list(itertools.islice(ids, MAX_DECODED_IDS + 1))  # may be endless
            if len(given) > MAX_DECODED_IDS:
                raise RequestError(f"ids must have at most {MAX_DECODED_IDS} entries; got more")
            data = b"".join([self._bytes[i] for i in given if i not in skipped])
        except TypeError:
            raise RequestError(
                f"ids must be a sequence of token ids; got {shown_with_type(ids)}"
            ) from None
        return strip_spaces(data.decode("utf-8", "replace"), self.strip_left)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of `token_id`; b"" if the id has no token.

        Raises
        ------
        RequestError
            If the id is negative or not an integer.
        """
        try:
            return self._bytes[token_id]
        except TypeError:  # unhashable
            raise RequestError(
                f"token_id must be an integer; got {shown_with_type(token_id)}"
            ) from None

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as spelled in the vocabulary, or None.

        Raises
        ------
        RequestError
            If the id is negative or not an integer.
        """
        return self._bytes.spelling(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as spelled in the vocabulary, or None.

        Raises
        ------
        RequestError
            If `token` is not a str, or contains an unpaired surrogate.
        """
        token_id: int | None = self._backend.token_to_id(checked_text("token", token))
        return token_id

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render a conversation to a prompt with the model's template.

        Parameters
        ----------
        messages : sequence of dict
            Each holds "role" and "content": a str or a list of ``{"type": "text", "text": ...}``.
        add_generation_prompt : bool, optional
            End the prompt with the start of the assistant's reply; by default True, unless
            `continue_final_message` is.
        tools : sequence of dict, optional
            JSON schemas of functions the model may call.
        continue_final_message : bool
            End the prompt with the text of the last message, so that the model continues it.
        **kwargs
            Additional template variables.

        Raises
        ------
        RequestError
            If the messages, the tools or a variable's name are invalid.
        TemplateError
            If the model has no template, or the template fails.
        """
        return self._choose_template(tools is not None).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            special_tokens=self._special_tokens,
            variables=kwargs,
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        allow_special_in_content: bool = False,
        **kwargs: Any,
    ) -> ChatPrompt:
        """Render a conversation, telling the template's control tokens from the conversation's.

        Parameters
        ----------
        messages, **kwargs
            See `apply_chat_template`.
        allow_special_in_content : bool
            Read control tokens in the texts of messages, tools and variables, too, as
            transformers does; otherwise these are ordinary text.

        Raises
        ------
        RequestError, TemplateError
            As `apply_chat_template`.
        """
        template = self._choose_template(kwargs.get("tools") is not None)
        if allow_special_in_content or self._backend.encode_special_tokens:
            return ChatPrompt(self.apply_chat_template(messages, **kwargs))
        control = self._control(template.source, template.literals)
        marked = template.render(
            messages,
            add_generation_prompt=kwargs.pop("add_generation_prompt", None),
            continue_final_message=kwargs.pop("continue_final_message", False),
            tools=kwargs.pop("tools", None),
            special_tokens=self._special_tokens,
            variables=kwargs,
            marks=control.marks,
        )
        return _unmarked(marked, control)

    def fill(self, template: str, **contents: str) -> ChatPrompt:
        """Put texts into a template; control tokens in them are ordinary text.

        Parameters
        ----------
        template : str
            Its own control tokens are read; ``{name}`` stands for a text.
        **contents : str
            The texts.

        Raises
        ------
        RequestError
            If a text is not a str, or contains an unpaired surrogate.
        """
        parts = [(literal, name) for literal, name, _, _ in Formatter().parse(template)]
        control = self._control(template, [literal for literal, _ in parts])
        marked = ""
        for literal, name in parts:
            marked += literal
            if name is not None:
                marked += control.marks.mark(checked_text(name, contents[name]))
        if self._backend.encode_special_tokens:
            return ChatPrompt(control.marks.unmark(marked))
        return _unmarked(marked, control)

    def encode_prompt(self, prompt: ChatPrompt, add_special_tokens: bool = False) -> list[int]:
        """Encode a conversation that `render_chat` rendered.

        Parameters
        ----------
        prompt : ChatPrompt
        add_special_tokens : bool
            See `encode`; chat templates usually write BOS themselves.

        Raises
        ------
        RequestError
            As `encode`.
        """
        if prompt.spans is None or prompt.control is None:
            return self.encode(prompt.text, add_special_tokens)
        text = checked_text("text", prompt.text)
        encoded = prompt.control.encode(text, bool(add_special_tokens), prompt.spans)
        return self._without_second_bos(*encoded)

    def template_variables(self, has_tools: bool) -> frozenset[str]:
        """Return the variables read by the template that `apply_chat_template` would choose."""
        return self._choose_template(has_tools).variables

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        allow_special_in_content: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Return a conversation's token ids; for the arguments see `render_chat`.

        No special tokens are added: the template writes them all.
        """
        allow = allow_special_in_content
        return self.encode_prompt(
            self.render_chat(messages, allow_special_in_content=allow, **kwargs)
        )

    def _control(self, source: str, literals: Sequence[str]) -> _Control:
        """Return the control tokens of a template, which is known by its source."""
        found = self._controls.get(source)
        if found is None:
            tokens = control_tokens(self._backend, literals, self._listed_control)
            marks = choose_marks(tokens, literals)
            encode: Callable[[str, bool, Spans], tuple[list[int], bool]]
            if isinstance(self._encode, WorkerEncoder):
                encode = functools.partial(self._encode.encode_spans, tokens=tokens)
            else:
                encode = TwinEncoder(self._backend, tokens)
            found = _Control(marks, ControlFinder(self._backend, tokens), encode)
            self._controls[source] = found
        return found

    def _choose_template(self, has_tools: bool) -> ChatTemplate:
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self._templates:
                return self._templates[name]
        names = excerpt(", ".join(map(json.dumps, self._templates)))
        have = f"; it has {names}" if names else ""
        raise TemplateError(
            f"the model has no default chat template{have}; give one to load_tokenizer "
            "(chat_template=) or to the server (--chat-template), or complete a plain prompt"
        )
