"""Model directories: every file that is read, and the errors for damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from engine.errors import ConfigError
from engine.text.tokenizer import load_tokenizer

GOLDEN = json.loads(Path(__file__).parents[1].joinpath("golden/text.json").read_text())


def _write_directory(folder, case, vocabulary):
    files = json.loads(json.dumps(case["files"]))
    model = files["tokenizer.json"]["model"]
    model["vocab"] = {t: i for i, t in enumerate(vocabulary["tokenizer.ggml.tokens"])}
    model["merges"] = [merge.split(" ") for merge in vocabulary["tokenizer.ggml.merges"]]
    for name, content in files.items():
        folder.joinpath(name).write_text(json.dumps(content))
    return files


@pytest.mark.parametrize("case", GOLDEN["directories"], ids=lambda case: case["name"])
def test_directories_give_the_ids_of_transformers(case, tmp_path, golden):
    _write_directory(tmp_path, case, golden["byte_level"]["metadata"])
    tokenizer = load_tokenizer(tmp_path)
    for i, (text, ids) in enumerate(zip(case["texts"], case["ids"], strict=True)):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == case["decoded"][i]
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["decoded_all"][i]


@pytest.fixture
def directory(tmp_path, golden):
    """A model directory that tests may change."""
    _write_directory(tmp_path, golden["directories"][0], golden["byte_level"]["metadata"])
    return tmp_path


def _edit(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (content | changes).items() if v is not ...}))


def test_end_ids_come_from_the_tokenizer_and_the_model(directory):
    assert load_tokenizer(directory).eos_token_ids == (2,)
    _edit(directory / "generation_config.json", eos_token_id=[2, 0])
    _edit(directory / "config.json", eos_token_id=5, bos_token_id=1)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.eos_token_ids == (2, 0, 5)
    _edit(directory / "config.json", text_config={"eos_token_id": [5, 7], "bos_token_id": 3})
    assert load_tokenizer(directory).eos_token_ids == (2, 0, 5, 7)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.bos_token_id == 0  # the tokenizer's own bos_token takes precedence


def test_the_older_files_are_read_too(directory):
    _edit(directory / "tokenizer_config.json", bos_token=..., eos_token=...)
    _edit(directory / "special_tokens_map.json", eos_token={"content": "<|im_start|>"})
    _edit(directory / "added_tokens.json", **{"[late]": 617})
    tokenizer = load_tokenizer(directory)
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.encode("a[late]b")[1] == 617
    assert tokenizer.vocab_size == 618


BESIDE = json.loads(Path(__file__).parents[1].joinpath("golden/beside.json").read_text())


@pytest.mark.parametrize("case", BESIDE["cases"], ids=lambda case: case["name"])
def test_files_beside_tokenizer_json_are_read_as_transformers_does(case, tmp_path):
    """The values are AutoTokenizer's of transformers 5.24, by tests/golden/make_beside.py."""
    spec = BESIDE["base"] | {name: case[name] for name in ("added_tokens", "normalizer")}
    words = spec["model"]["vocab"]
    more = [word for word in case["vocab"] if word not in words]
    spec["model"] = spec["model"] | {
        "vocab": words | {word: len(words) + i for i, word in enumerate(more)}
    }
    for name, content in (case["files"] | {"tokenizer.json": spec}).items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    texts = BESIDE["texts"]
    assert [tokenizer.encode(text, False) for text in texts] == case["ids"]
    assert [tokenizer.encode(text) for text in texts] == case["ids_with_special"]
    assert [tokenizer.decode(ids) for ids in case["ids"]] == case["decoded"]
    found = [tokenizer.decode(ids, skip_special_tokens=False) for ids in case["ids"]]
    assert found == case["decoded_all"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (case["bos"], case["eos"])
    template = "".join("{{ " + name + " }}|" for name in case["named"])
    messages = [{"role": "user", "content": "Hi"}]
    prompt = load_tokenizer(tmp_path, chat_template=template).apply_chat_template(messages)
    assert prompt == "".join(f"{token}|" for token in case["named"].values())


def test_a_tokenizer_in_its_own_process_has_the_tokens_of_other_files(directory):
    regex = {"type": "Split", "pattern": {"Regex": "(q{3}){9,}"}, "invert": False}
    spec = json.loads((directory / "tokenizer.json").read_text())
    steps = [regex | {"behavior": "Isolated"}, spec["pre_tokenizer"]]
    config = {"eos_token": "<new>", "image_token": "<image>"}
    here = load_tokenizer_with(directory, config)
    step = {"type": "Sequence", "pretokenizers": steps}
    _edit(directory / "tokenizer.json", pre_tokenizer=step)
    there = load_tokenizer(directory)
    assert there.encode("a<image>b<new>") == here.encode("a<image>b<new>")
    assert here.token_to_id("<image>") in there.encode("a<image>b")
    _edit(directory / "tokenizer_config.json", split_special_tokens=True)
    assert here.token_to_id("<image>") not in load_tokenizer(directory).encode("a<image>b")


def load_tokenizer_with(directory, config):
    _edit(directory / "tokenizer_config.json", **config)
    return load_tokenizer(directory)


def test_an_id_that_tokenizer_json_contradicts_is_a_warning(directory, caplog):
    _edit(directory / "tokenizer_config.json", added_tokens_decoder={"9999": {"content": "<new>"}})
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("<new>") == [617]
    assert "<new>" in caplog.text and "9999" in caplog.text and "617" in caplog.text


def test_truncation_and_padding_of_training_are_off(directory):
    path = directory / "tokenizer.json"
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    _edit(path, truncation=truncation, padding=padding)
    assert 3 < len(load_tokenizer(directory).encode("one two three four five")) < 64


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: is not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"bos_token": 3}', "bos_token"),
        (
            "tokenizer_config.json",
            '{"additional_special_tokens": 5}',
            "additional_special_tokens must be a list",
        ),
        (
            "special_tokens_map.json",
            '{"additional_special_tokens": ["x", 5]}',
            r"additional_special_tokens\[1\]",
        ),
        ("tokenizer_config.json", '{"extra_special_tokens": [5]}', r"extra_special_tokens\[0\]"),
        ("tokenizer_config.json", '{"extra_special_tokens": {"x": 5}}', "x must be a string"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"9": {"content": 1}}}', "token 9"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "x"}}', "whole number"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', r"chat_template\[0\]"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "default", "template": null}]}',
            r"chat_template\[0\] must have strings as name and template; got",
        ),
        ("tokenizer_config.json", '{"chat_template": {"default": null}}', "an object of them; got"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id"),
        ("added_tokens.json", '{"x": -1}', "-1"),
    ],
)
def test_damaged_files_are_named(directory, name, content, message):
    (directory / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(directory)


def test_a_directory_without_tokenizer_json(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"tokenizer\.model alone is not enough"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="must be a directory"):
        load_tokenizer(tmp_path / "missing")


def test_a_decoder_that_is_not_incremental_is_refused(directory):
    _edit(
        directory / "tokenizer.json", decoder={"type": "WordPiece", "prefix": "#", "cleanup": 0 > 1}
    )
    with pytest.raises(ConfigError, match=rf"tokenizer of .*{directory.name}: .*WordPiece"):
        load_tokenizer(directory)
    _edit(directory / "tokenizer.json", decoder=None)
    with pytest.raises(ConfigError, match="must have a decoder"):
        load_tokenizer(directory)


def test_any_known_decoder_decodes_as_the_backend_does(directory):
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    never = metaspace | {"prepend_scheme": "never"}
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    pieces = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    model = {"type": "BPE", "merges": [], "fuse_unk": False, "byte_fallback": True}
    words = ["▁", "▁a", "b▁c", "d", "<0xC3>", "<0xA9>", "é", "▁▁"]
    model["vocab"] = {word: i for i, word in enumerate(words)}
    special = {"tokenizer_config.json": {"bos_token": None, "eos_token": None}}
    for name, content in special.items():
        (directory / name).write_text(json.dumps(content))
    for decoder in (metaspace, never, {"type": "Sequence", "decoders": pieces}):
        path = directory / "tokenizer.json"
        _edit(path, model=model, decoder=decoder, added_tokens=[], pre_tokenizer=None)
        backend, tokenizer = tokenizers.Tokenizer.from_file(str(path)), load_tokenizer(directory)
        # The backend's Metaspace strips all spaces of the first token, so none has two here.
        for ids in ([0], [1, 3], [0, 1], [1, 7], [3, 1], [4, 5, 6], [1, 2, 3, 1], [3, 7], []):
            assert tokenizer.decode(ids) == backend.decode(ids), (decoder, ids)


TEMPLATE = "F{{ eos_token }}{{ '' if tools }}"


def test_the_template_of_a_multimodal_model(directory):
    """Old releases wrote it to a file of its own; other places take precedence."""
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "M"}))
    messages = [{"role": "user", "content": "x"}]
    own = json.loads((directory / "tokenizer_config.json").read_text())
    _edit(directory / "tokenizer_config.json", chat_template="D")
    assert load_tokenizer(directory).apply_chat_template(messages) == "D"
    (directory / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in own.items() if key != "chat_template"})
    )
    assert load_tokenizer(directory).apply_chat_template(messages) == "M"
    (directory / "chat_template.jinja").write_text("F")
    assert load_tokenizer(directory).apply_chat_template(messages) == "F"


def test_templates_by_name_and_by_file(directory):
    entries = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T{{ tools }}"},
    ]
    _edit(directory / "tokenizer_config.json", chat_template=entries)
    messages = [{"role": "user", "content": "x"}]
    tokenizer = load_tokenizer(directory)
    assert tokenizer.apply_chat_template(messages) == "D"
    assert tokenizer.apply_chat_template(messages, tools=[{}]) == "T[{}]"
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    extra = directory / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("U{{ tools }}")
    tokenizer = load_tokenizer(directory)
    assert tokenizer.apply_chat_template(messages) == "F<|im_end|>"
    assert tokenizer.apply_chat_template(messages, tools=[{}]) == "U[{}]"
    assert tokenizer.chat_template == TEMPLATE
    (extra / "tool_use.jinja").unlink()
    only = load_tokenizer(directory)  # files replace all templates of tokenizer_config.json
    assert only.apply_chat_template(messages, tools=[{}]) == "F<|im_end|>"
    assert load_tokenizer(directory, chat_template="O").apply_chat_template(messages) == "O"


def test_templates_of_an_object(directory):
    """transformers keeps an object of templates by name as it is."""
    templates = {"default": "D", "tool_use": "T{{ tools }}"}
    _edit(directory / "tokenizer_config.json", chat_template=templates)
    tokenizer = load_tokenizer(directory)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == "D"
    assert tokenizer.apply_chat_template(messages, tools=[{}]) == "T[{}]"


def test_the_declared_format_of_answers(directory):
    """The newer key counts; other values than an object are no format."""
    template, schema = {"fields": {"content": {}}}, {"properties": {}}
    for config, wanted in (
        ({"response_schema": schema}, ("response_schema", schema)),
        ({"response_template": template}, ("response_template", template)),
        ({"response_template": "text"}, ("response_schema", schema)),
        ({"response_schema": None}, None),
    ):
        assert load_tokenizer_with(directory, config).response_format == wanted
