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

from engine import env
from engine.checks import shown
from engine.errors import ConfigError

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "find_pre_tokenizer"]

PUNCTUATION = "runs of punctuation"
"""In place of an expression: runs of what `tokenizers` takes for punctuation."""


@dataclass(frozen=True)
class PreTokenizer:
    """A rule for splitting text, with related tokenizer settings.

    Attributes
    ----------
    patterns : tuple of str
        Regular expressions applied in turn (Oniguruma syntax), or `PUNCTUATION`.
    ignore_merges : bool
        Keep a word that is itself a token whole, regardless of the merges.
    add_bos : bool
        Whether to add BOS if the file does not say.
    nfc : bool
        Whether to normalise the text to Unicode NFC first.
    byte_patterns : tuple of str
        Regular expressions applied after bytes became characters of GPT-2's alphabet.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False
    byte_patterns: tuple[str, ...] = ()

    def backend(self) -> pre_tokenizers.PreTokenizer:
        """Return the `tokenizers` object, which also maps bytes to GPT-2's alphabet."""
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        steps = [*map(_split, self.patterns), to_bytes, *map(_split, self.byte_patterns)]
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        """Return the `tokenizers` normaliser to apply first, if any."""
        return normalizers.NFC() if self.nfc else None


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == PUNCTUATION:
        return pre_tokenizers.Punctuation(behavior="contiguous")
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


# Words, each with an optional leading space; runs of digits; runs of anything else.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ONE_DIGIT = r"\p{N}"


def _gpt4(digits: str, letters: str = r"\p{L}", symbols: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """Return GPT-4's expression (cl100k): a symbol may precede a word; `digits` splits numbers."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?{symbols}|\s*[\r\n]+|\s+(?!\S)|\s+"
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


def _ranges(text: str) -> str:
    """Return the inside of a class of the code points in `text`: "41-5A B5"."""
    ends = [one.split("-") for one in text.split()]
    return "".join("-".join(f"\\x{{{end}}}" for end in pair) for pair in ends)


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CJK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
# DeepSeek LLM's letters: those of scripts with upper and lower case, in hexadecimal.
_CASED = _ranges(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943 "
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ASIAN_SYMBOLS = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"

_GPT2_PRE = PreTokenizer((_GPT2,))
_NEOX_PRE = PreTokenizer((_GPT2,), nfc=True)
_DIGITS_PRE = PreTokenizer((_ONE_DIGIT, _GPT2))
_COHERE_PRE = PreTokenizer((_ONE_DIGIT, _GPT2), nfc=True)
_LLAMA3_PRE = PreTokenizer((_gpt4(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_GPT4_PRE = PreTokenizer((_gpt4(r"\p{N}{1,3}"),))
_GPT4_ONE_DIGIT_PRE = PreTokenizer((_gpt4(r"\p{N}"),))
_QWEN2_PRE = PreTokenizer((_gpt4(r"\p{N}"),), nfc=True)
_QWEN35_PRE = PreTokenizer(
    (_gpt4(r"\p{N}", r"\p{L}\p{M}", r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), nfc=True
)
_TEKKEN_PRE = PreTokenizer((_camel_case("", r"\p{N}"),), ignore_merges=True, add_bos=True)
_GPT4O_PRE = PreTokenizer((_camel_case(_CONTRACTION, r"\p{N}{1,3}"),))
_TINY_AYA_PRE = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O_PRE.patterns))
_FALCON3_PRE = PreTokenizer((PUNCTUATION, _GPT2), byte_patterns=(_ONE_DIGIT,))
_VIKING_PRE = PreTokenizer(
    (r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+", _ONE_DIGIT)
)
_SEED_CODER_PRE = PreTokenizer((_gpt4(r"\p{N}", symbols=r"[^\s\p{L}\p{N}\r\n]+"),))
_SUPERBPE_PRE = PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))
_MINICPM5_PRE = PreTokenizer((r"\p{N}{1,3}", _gpt4(r"\p{N}+")), ignore_merges=True)
_DEEPSEEK_CODER_PRE = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _ONE_DIGIT))
_DEEPSEEK_LLM_PRE = PreTokenizer((
    *(r"[\r\n]", rf"\s?[{_CASED}]+", _ASIAN_SYMBOLS, r"\s+$"),
    *(_CJK, _ONE_DIGIT),
))  # fmt: skip
_DEEPSEEK_V3_PRE = PreTokenizer(
    (r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+", _DEEPSEEK_V3)
)
_DEFAULT_PRE = PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT_PRE,
    **dict.fromkeys(("gpt-2", "phi-2", "trillion", "mellum", "a.x-4.0"), _GPT2_PRE),
    "granite-docling": _GPT2_PRE,
    **dict.fromkeys(("mpt", "olmo"), _NEOX_PRE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _DIGITS_PRE),
    **dict.fromkeys(("exaone", "minerva-7b"), _DIGITS_PRE),
    "command-r": _COHERE_PRE,
    "tiny_aya": _TINY_AYA_PRE,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "pixtral", "midm-2.0"), _LLAMA3_PRE),
    "falcon3": _FALCON3_PRE,
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _GPT4_PRE),
    "megrez": _GPT4_ONE_DIGIT_PRE,
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2", "stablelm2"), _QWEN2_PRE),
    "qwen35": _QWEN35_PRE,
    "tekken": _TEKKEN_PRE,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O_PRE),
    "deepseek-llm": _DEEPSEEK_LLM_PRE,
    "deepseek-coder": _DEEPSEEK_CODER_PRE,
    "deepseek-v3": _DEEPSEEK_V3_PRE,
    "viking": _VIKING_PRE,
    "seed-coder": _SEED_CODER_PRE,
    "superbpe": _SUPERBPE_PRE,
    "minicpm5": _MINICPM5_PRE,
}
"""Every supported value of ``tokenizer.ggml.pre``."""


def find_pre_tokenizer(name: object) -> PreTokenizer:
    """Return the pre-tokenizer called `name`, or the one that ENGINE_PRE_TOKENIZER names.

    Raises
    ------
    ConfigError
        If the name is unknown or None (the file names none); the message lists the known ones.

    Examples
    --------
    >>> find_pre_tokenizer("smollm").patterns[0]
    '\\\\p{N}'
    """
    known = ", ".join(sorted(PRE_TOKENIZERS))
    chosen = env.pre_tokenizer()
    if chosen is not None:
        if chosen not in PRE_TOKENIZERS:
            raise ConfigError(f"ENGINE_PRE_TOKENIZER must be one of {known}; got {shown(chosen)}")
        return PRE_TOKENIZERS[chosen]
    if name is None:
        raise ConfigError(
            "the file has no tokenizer.ggml.pre, so it is unknown how to split words; set "
            f"ENGINE_PRE_TOKENIZER to one of: {known}"
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"tokenizer.ggml.pre must be one of {known}; got {shown(name)} (if one of these "
            "splits words as the model's tokenizer.json does, set ENGINE_PRE_TOKENIZER to it)"
        )
    return PRE_TOKENIZERS[name]
