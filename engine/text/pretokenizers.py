"""Pre-tokenizers by .gguf name: how to split text into words before byte-pair merging.

A .gguf file contains vocabulary and merges, but only the name of its pre-tokenizer
(``tokenizer.ggml.pre``). A wrong one would still yield valid ids that decode to the same text, but
the model's output would silently get worse. So a name missing from this table is an error.

Each entry is a list of regular expressions applied in turn: each splits every piece left by the
previous one into its matches and the text between them. They are the expressions of the family's
``tokenizer.json`` (Hugging Face), if one is published.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from engine.checks import shown
from engine.errors import ConfigError

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "find_pre_tokenizer"]


@dataclass(frozen=True)
class PreTokenizer:
    """A rule for splitting text, with related tokenizer settings.

    Attributes
    ----------
    patterns : tuple of str
        Regular expressions applied in turn (Oniguruma syntax).
    ignore_merges : bool
        Keep a word that is itself a token whole, regardless of the merges.
    add_bos : bool
        Whether to add BOS if the file does not say.
    nfc : bool
        Whether to normalise the text to Unicode NFC first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def backend(self) -> pre_tokenizers.PreTokenizer:
        """Return the `tokenizers` object; its last step maps bytes to GPT-2's alphabet."""
        cuts: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(cuts)

    def normalizer(self) -> normalizers.Normalizer | None:
        """Return the `tokenizers` normaliser to apply first, if any."""
        return normalizers.NFC() if self.nfc else None


# Words, each with an optional leading space; runs of digits; runs of anything else.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ONE_DIGIT = r"\p{N}"


def _gpt4(digits: str) -> str:
    """Return GPT-4's expression (cl100k): a symbol may precede a word; `digits` splits numbers."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _camel_case(suffix: str, digits: str) -> str:
    """Return GPT-4o's expression (o200k): words also end between lower and upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        f"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2_PRE = PreTokenizer((_GPT2,))
_DIGITS_PRE = PreTokenizer((_ONE_DIGIT, _GPT2))
_LLAMA3_PRE = PreTokenizer((_gpt4(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_GPT4_PRE = PreTokenizer((_gpt4(r"\p{N}{1,3}"),))
_QWEN2_PRE = PreTokenizer((_gpt4(r"\p{N}"),), nfc=True)
_TEKKEN_PRE = PreTokenizer((_camel_case("", r"\p{N}"),), ignore_merges=True, add_bos=True)
_GPT4O_PRE = PreTokenizer((_camel_case(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"),))
_DEFAULT_PRE = PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT_PRE,
    "gpt-2": _GPT2_PRE,
    "phi-2": _GPT2_PRE,
    "mpt": _GPT2_PRE,
    "olmo": _GPT2_PRE,
    "smollm": _DIGITS_PRE,
    "starcoder": _DIGITS_PRE,
    "refact": _DIGITS_PRE,
    "command-r": _DIGITS_PRE,
    "codeshell": _DIGITS_PRE,
    "exaone": _DIGITS_PRE,
    "minerva-7b": _DIGITS_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "llama-bpe": _LLAMA3_PRE,
    "falcon3": _LLAMA3_PRE,
    "dbrx": _GPT4_PRE,
    "smaug-bpe": _GPT4_PRE,
    "qwen2": _QWEN2_PRE,
    "deepseek-r1-qwen": _QWEN2_PRE,
    "tekken": _TEKKEN_PRE,
    "gpt-4o": _GPT4O_PRE,
    "llama4": _GPT4O_PRE,
}
"""Every supported value of ``tokenizer.ggml.pre``."""


def find_pre_tokenizer(name: object) -> PreTokenizer:
    """Return the pre-tokenizer called `name`.

    Raises
    ------
    ConfigError
        If `name` is unknown or None (the file names none); the message lists the known ones.

    Examples
    --------
    >>> find_pre_tokenizer("smollm").patterns[0]
    '\\\\p{N}'
    """
    known = ", ".join(sorted(PRE_TOKENIZERS))
    if name is None:
        raise ConfigError(
            "the file has no tokenizer.ggml.pre, so it is unknown how to split words; "
            f"set it to one of: {known}"
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ConfigError(f"tokenizer.ggml.pre must be one of {known}; got {shown(name)}")
    return PRE_TOKENIZERS[name]
