"""Make text.json: ids, texts and prompts that the engine's text code must reproduce.

    pip install transformers regex sentencepiece
    python tests/golden/make_text.py [SmolLM2-135M-Instruct.gguf]

The oracles are independent of the engine: byte-pair merging written here in plain Python over
the `regex` module, the sentencepiece library, and transformers' own tokenizers and chat
rendering. Not part of CI. Without the argument, the golden ids of SmolLM2 are kept as they are.
"""
# ruff: noqa: RUF001  (tokenizers are tested with look-alike characters)

from __future__ import annotations

import functools
import io
import itertools
import json
import sys
import tempfile
import unicodedata
from pathlib import Path

import regex
import sentencepiece
import tokenizers
import transformers
from text_templates import CHATS
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers.utils.chat_template_utils import render_jinja_template

TARGET = Path(__file__).with_name("text.json")

CORPUS = [
    "The quick brown fox jumps over the lazy dog, then it's there again; they're here, we've seen.",
    "In 1984 there were 123 people and 12345 more, about 3.14159 of them in room 101 or 2024.",
    "Über den Fluß fährt der Kahn; déjà vu, naïve café, señor, Łódź, Ελληνικά, русский язык.",
    "def main(argc, argv):\n    return argc + len(argv)  # comment\n\n\nclass FooBar:\n\tpass\n",
    "日本語のテキストと中文字符，還有한국어 문장 하나. Emoji 😀😀🎉👍🏽 too!!! ...???",
    "camelCase HTTPServer XMLParser isNaN iPhone don't DON'T won't I'LL you'd   spaces    here",
] * 3

TEXTS = [
    "",
    "Hello world",
    " Hello  world ",
    "There were 12345 people in 1984, 3.14159 in 101.",
    "it's they're WE'VE I'LL don't 'tis",
    "  multiple   spaces\tand\ttabs \n\n newlines\r\n\r\nend  ",
    "Über naïve café déjà vu",
    "cafe\u0301 in form D",
    "日本語のテキスト 한국어 中文",
    "emoji 😀🎉👍🏽👨‍👩‍👧 mixed x😀y",
    "HTTPServer camelCase XMLParser2 foo_bar FooBar123baz",
    "a=b+c; if (x<=10) { return ~y^2 | z; } // $5.00 `code`",
    "٣٤٥ ⅷ ½ ²³ ₇ 𝟘𝟙",
    "\u00a0nbsp\u2003em\u200bzero\ufeffbom",
    "<|im_start|>user\nHi 123<|im_end|>\n",
    "x<|im_end|>\n\ny<|im_start|>",
    "!!!???...---===",
    "\x00\x01 control \x7f",
    "mixedЯзыккириллица123abc",
    "a" * 40,
]

# Copied verbatim from the tokenizer.json of each family.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAMILIES = {
    # name: (expressions in turn, whole words first, form C, BOS)
    "gpt-2": ([GPT2], False, False, False),
    "smollm": ([r"\p{N}", GPT2], False, False, False),
    "llama-bpe": ([LLAMA3], True, False, True),
    "dbrx": ([LLAMA3], False, False, False),
    "qwen2": ([QWEN2], False, True, False),
    "tekken": ([TEKKEN], True, False, True),
    "gpt-4o": ([GPT4O], False, False, False),
    "default": ([r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"], False, False, False),
}


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(moved)) for b in range(256)]


LETTERS = byte_letters()


class PlainBPE:
    """Byte-pair encoding as described in its paper, one merge at a time."""

    def __init__(self, tokens, merges, types, family):
        self.patterns, self.whole_words, self.form_c, self.bos = family
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        special = [t for t, kind in zip(tokens, types, strict=True) if kind in (3, 4)]
        special.sort(key=len, reverse=True)
        self.special = regex.compile("|".join(map(regex.escape, special)))

    def encode(self, text: str) -> list[int]:
        ids, at = [], 0
        for match in self.special.finditer(text):
            ids += [*self.words(text[at : match.start()]), self.ids[match[0]]]
            at = match.end()
        return ids + self.words(text[at:])

    def words(self, text: str) -> list[int]:
        text = unicodedata.normalize("NFC", text) if self.form_c else text
        pieces = [text]
        for pattern in self.patterns:
            pieces = [cut for piece in pieces for cut in cuts(pattern, piece)]
        return [i for piece in pieces for i in self.word(piece)]

    @functools.lru_cache(None)  # noqa: B019
    def word(self, piece: str) -> list[int]:
        parts = [LETTERS[b] for b in piece.encode()]
        if self.whole_words and "".join(parts) in self.ids:
            return [self.ids["".join(parts)]]
        while len(parts) > 1:
            pairs = enumerate(itertools.pairwise(parts))
            rank, i = min((self.ranks.get(pair, 1 << 60), i) for i, pair in pairs)
            if rank == 1 << 60:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts]


def cuts(pattern: str, text: str) -> list[str]:
    """Return the matches of `pattern` and the text between them."""
    found, at = [], 0
    for match in regex.finditer(pattern, text):
        found += [text[at : match.start()], match[0]]
        at = match.end()
    return [piece for piece in [*found, text[at:]] if piece]


def train_byte_level() -> dict:
    """A small byte-level vocabulary, as .gguf metadata."""
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(CORPUS, trainer)
    model = json.loads(backend.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].get)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    unmerged = ["Hello", "Ġworld"]  # no merges produce these: only matched as whole words
    assert not set(unmerged) & set(learned)
    tokens = [*special, *learned, "<think>", "[PAD]", *unmerged]
    types = [3] * len(special) + [1] * len(learned) + [4, 5, 1, 1]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


def byte_level_cases(metadata: dict) -> dict:
    cases = {}
    for name, family in FAMILIES.items():
        oracle = PlainBPE(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.merges"],
            metadata["tokenizer.ggml.token_type"],
            family,
        )
        bos = [0] if family[3] else []
        cases[name] = [bos + oracle.encode(text) for text in TEXTS]
    return cases


def sentencepiece_cases(add_prefix: bool) -> dict:
    """A small sentencepiece BPE model: its vocabulary as .gguf metadata, its ids and texts."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=620,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_prefix,
        allow_whitespace_only_pieces=True,
        control_symbols=["<|user|>", "<|end|>"],
        minloglevel=2,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    count = sp.vocab_size()
    kinds = [(sp.is_unknown, 2), (sp.is_control, 3), (sp.is_unused, 5), (sp.is_byte, 6)]
    types = [next((kind for test, kind in kinds if test(i)), 1) for i in range(count)]
    texts = [t for t in TEXTS if "<|" not in t]
    ids = [sp.encode(text) for text in texts]
    return {
        "metadata": {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in range(count)],
            "tokenizer.ggml.scores": [round(sp.get_score(i), 3) for i in range(count)],
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.bos_token_id": sp.bos_id(),
            "tokenizer.ggml.eos_token_id": sp.eos_id(),
            "tokenizer.ggml.unknown_token_id": sp.unk_id(),
            "tokenizer.ggml.add_space_prefix": add_prefix,
        },
        "texts": texts,
        "ids": ids,
        "decoded": [sp.decode(one) for one in ids],
        # Later parts of a text, which are not at its start.
        "parts": [[one[k:], sp.decode(one[k:])] for one in ids for k in (1, 3) if len(one) > 8],
    }


def directories(metadata: dict) -> list[dict]:
    """Return model directories and the ids of transformers' AutoTokenizer."""
    vocab = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]
    found = []
    for name, config in {
        "plain": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
        "adds": {
            "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
            "eos_token": "<|im_end|>",
            "add_bos_token": False,  # no effect: tokenizer.json determines what is added
        },
        "more": {
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": {
                str(len(vocab)): {"content": "<|tool|>", "special": True},
                str(len(vocab) + 1): {"content": "[note]", "special": False, "normalized": False},
            },
        },
    }.items():
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(metadata["tokenizer.ggml.tokens"][:3])
        if name == "adds":
            backend.post_processor = processors.TemplateProcessing(
                single="<|endoftext|> $A <|im_end|>",
                special_tokens=[("<|endoftext|>", 0), ("<|im_end|>", 2)],
            )
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        files = {"tokenizer.json": json.loads(backend.to_str()), "tokenizer_config.json": config}
        files["tokenizer.json"]["model"]["vocab"] = files["tokenizer.json"]["model"]["merges"] = 0
        texts = [*TEXTS, "a<|tool|>b [note] c"]
        with tempfile.TemporaryDirectory() as folder:
            backend.save(f"{folder}/tokenizer.json")
            Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
            ids = [theirs(text)["input_ids"] for text in texts]
            found.append(
                {
                    "name": name,
                    "files": files,  # the vocabulary is that of byte_level
                    "texts": texts,
                    "ids": ids,
                    "decoded": [theirs.decode(i, skip_special_tokens=True) for i in ids],
                    "decoded_all": [theirs.decode(i, skip_special_tokens=False) for i in ids],
                }
            )
    return found


def chats() -> list[dict]:
    found = []
    for chat in CHATS:
        (prompt,), _ = render_jinja_template(
            [chat["messages"]],
            tools=chat.get("tools"),
            chat_template=chat["template"],
            add_generation_prompt=chat.get("add_generation_prompt", True),
            **chat.get("special_tokens", {}),
            **chat.get("variables", {}),
        )
        found.append({**chat, "prompt": prompt})
    return found


def smollm2(path: str) -> dict:
    """Return ids of the real vocabulary by the plain encoder, checked against `tokenizers`."""
    theirs = transformers.AutoTokenizer.from_pretrained(
        str(Path(path).parent), gguf_file=Path(path).name
    )
    backend = theirs.backend_tokenizer
    # transformers reads the vocabulary but not `pre`: this is the pipeline of the model's own
    # tokenizer.json.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [3] * 17 + [1] * (len(tokens) - 17)
    merges = [" ".join(pair) for pair in model["merges"]]
    plain = PlainBPE(tokens, merges, types, FAMILIES["smollm"])
    texts = [*TEXTS, *CORPUS[:6]]
    ids = [plain.encode(text) for text in texts]
    assert ids == [backend.encode(text, add_special_tokens=False).ids for text in texts]
    chat = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 12 * 34?"},
    ]
    prompt = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return {
        "texts": texts,
        "ids": ids,
        "chat": chat,
        "prompt": prompt,
        "prompt_ids": plain.encode(prompt),
    }


def main() -> None:
    metadata = train_byte_level()
    old = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    golden = {
        "made_with": {
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "sentencepiece": sentencepiece.__version__,
        },
        "byte_level": {
            "metadata": metadata,
            "texts": TEXTS,
            "ids": byte_level_cases(metadata),
        },
        "sentencepiece": [sentencepiece_cases(True), sentencepiece_cases(False)],
        "directories": directories(metadata),
        "chats": chats(),
        "smollm2": smollm2(sys.argv[1]) if len(sys.argv) > 1 else old.get("smollm2"),
    }
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=True, separators=(',', ':'))}"
        for key, value in golden.items()
    )
    TARGET.write_text("{\n" + lines + "\n}\n")
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
