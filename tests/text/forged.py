"""Small tokenizers with the control tokens of known families, and templates in their style.

A vocabulary holds the 256 bytes and the merges of "im", "end", "user" and "<|", so that a marker
written as text has ids of its own. `Family.ids` is independent of the code under test: it encodes
text with a backend that has no added tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.text.parts import TokenizerParts
from engine.text.token_bytes import byte_alphabet
from engine.text.tokenizer import Tokenizer

_MERGES = [("<", "|"), ("|", ">"), ("i", "m"), ("e", "n"), ("en", "d"), ("u", "s"), ("us", "e")]


def _bytes_only() -> tokenizers.Tokenizer:
    vocab = {char: i for i, char in enumerate(byte_alphabet())}
    for left, right in _MERGES:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=_MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@dataclass(frozen=True)
class Family:
    """A family's control tokens, and a template in its style.

    Attributes
    ----------
    template : str
    special : tuple of str
        Tokens with ``special: true``.
    ordinary : tuple of str
        Added tokens with ``special: false``.
    turn : tuple of str
        Pieces of a prompt of one user message: the control tokens, the texts, and None for the
        content.
    """

    template: str
    special: tuple[str, ...]
    turn: tuple[str | None, ...]
    ordinary: tuple[str, ...] = ()

    @property
    def control(self) -> tuple[str, ...]:
        """All its control tokens."""
        return self.special + self.ordinary

    def tokenizer(self) -> Tokenizer:
        """Return a tokenizer."""
        backend = _bytes_only()
        backend.add_tokens(
            [AddedToken(t, normalized=False, special=t in self.special) for t in self.control]
        )
        named = {"bos_token": self.special[0], "eos_token": self.special[-1]}
        return Tokenizer(
            TokenizerParts(backend, special_tokens=named, chat_templates={"default": self.template})
        )

    def ids(self, *pieces: str) -> list[int]:
        """Return the ids of control tokens (whole pieces) and texts."""
        plain = _bytes_only()
        first = plain.get_vocab_size()
        found: list[int] = []
        for piece in pieces:
            is_control = piece in self.control
            found += [first + self.control.index(piece)] if is_control else plain.encode(piece).ids
        return found

    def prompt_ids(self, content: str) -> list[int]:
        """Return the ids of the prompt of one user message whose content is all text."""
        plain = _bytes_only()
        found: list[int] = []
        for piece in self.turn:
            found += plain.encode(content).ids if piece is None else self.ids(piece)
        return found


FAMILIES = {
    "chatml": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        (*("<|im_start|>", "user\n", None, "<|im_end|>", "\n"), "<|im_start|>", "assistant\n"),
    ),
    "llama3": Family(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>"
        "\n\n{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        (
            *("<|begin_of_text|>", "<|start_header_id|>", "user", "<|end_header_id|>", "\n\n"),
            *(None, "<|eot_id|>"),
        ),
    ),
    "gemma": Family(
        "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m['role'] + '\n' }}"
        "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}"
        "{% for part in m['content'] %}{{ part['text'] | trim }}{% endfor %}{% endif %}"
        "{{ '<end_of_turn>\n' }}{% endfor %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
        ("<bos>", "<start_of_turn>", "user\n", None, "<end_of_turn>", "\n"),
    ),
    "mistral": Family(
        "{{- bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}"
        "[/INST]{% else %}{{ m.content ~ eos_token }}{% endif %}{% endfor %}",
        ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "</s>"),
        ("<s>", "[INST]", None, "[/INST]"),
    ),
    "phi4_mini": Family(
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
        "{% endfor %}<|assistant|>",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        ("<|user|>", None, "<|end|>", "<|assistant|>"),
    ),
    "deepseek": Family(
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '<\uff5cUser\uff5c>' + m['content'] }}{% else %}{% set content = m['content'] %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{ '<\uff5cAssistant\uff5c>' + content + '<\uff5cend▁of▁sentence\uff5c>' }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}",
        ("<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"),
        (
            "<\uff5cbegin▁of▁sentence\uff5c>",
            "<\uff5cUser\uff5c>",
            None,
            "<\uff5cAssistant\uff5c>",
            "<think>",
            "\n",
        ),
        ordinary=("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>", "</think>"),
    ),
    "harmony": Family(
        "{% macro part(text) %}<|message|>{{ text }}<|end|>{% endmacro %}{% for m in messages %}"
        "<|start|>{{ m.role }}{{ part(m.content) }}{% endfor %}<|start|>assistant",
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
        ("<|start|>", "user", "<|message|>", None, "<|end|>", "<|start|>", "assistant"),
    ),
}
