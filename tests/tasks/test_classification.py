"""Classification heads against transformers, and `LLM.score` and `LLM.classify`."""

from __future__ import annotations

import json
import math
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

from engine import LLM, LLMEngine, SamplingParams, load
from engine.errors import ConfigError, ContextLengthError, RequestError, WeightsError
from engine.quantization.quantize_model import quantize
from engine.tasks.embeddings import CLASSIFY, embed, embed_in_parts
from tests.classifier_files import CASES, GOLDEN, WORDS, write_model, write_tokenizer

ONE_LABEL = "qwen2_one_label"
NAMED = "qwen3_named_labels"


def scores_of(model, prompts):
    found = {}
    for part in embed_in_parts(model, prompts, CLASSIFY):
        found.update(part)
    return [found[i] for i in range(len(prompts))]


@pytest.fixture
def opened(tmp_path):
    """A function that loads a golden model."""

    def open_model(case, **more):
        return load(write_model(tmp_path / "m", case, **more), device="cpu", dtype="float32")

    return open_model


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_transformers(case, opened):
    model = opened(case)
    want = CASES[case]
    found = scores_of(model, GOLDEN["prompts"])
    for got, scores, logits in zip(found, want["scores"], want["logits"], strict=True):
        assert got.dtype == np.float32 and len(got) == len(model.classifier.labels)
        np.testing.assert_allclose(got, scores, rtol=2e-5, atol=2e-6)
        if model.classifier.activation == "none":
            np.testing.assert_allclose(got, logits, rtol=2e-5)
    names = want["config"].get("id2label")
    assert model.classifier.labels == tuple((names or {"0": "LABEL_0", "1": "LABEL_1"}).values())


def test_a_bias_and_large_logits(opened):
    weight = np.array([[0.0] * 32, [1.0] * 32], np.float32)
    bias = np.array([900.0, -900.0], np.float32)
    config = {"problem_type": "multi_label_classification"}
    model = opened("llama_two_labels", config=config, score__weight=weight, score__bias=bias)
    assert scores_of(model, [[5]])[0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("case", "config", "activation"),
    [
        (ONE_LABEL, {"activation_fn": "torch.nn.modules.linear.Identity"}, "none"),
        (ONE_LABEL, {"activation_fn": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
        (ONE_LABEL, {"version": "5.1.0"}, "sigmoid"),
        (ONE_LABEL, None, "none"),
        ("gemma2_regression", {"activation_fn": "torch.nn.Sigmoid"}, "sigmoid"),
        (NAMED, {"activation_fn": "torch.nn.modules.linear.Identity"}, "softmax"),
    ],
)
def test_activations_of_cross_encoders(case, config, activation, opened):
    """sentence-transformers applies its own to the only logit, whatever the problem_type."""
    old = "sbert_ce_default_activation_function"
    keys = {"sentence_transformers": config}
    if config is None:  # as releases before 4.0 write it
        keys = {old: "torch.nn.modules.linear.Identity"}
    model = opened(case, config=keys)
    prompts = GOLDEN["prompts"]
    logits = np.array(CASES[case]["logits"])
    want = {
        "none": logits,
        "sigmoid": 1 / (1 + np.exp(-logits)),
        "softmax": np.exp(logits) / np.exp(logits).sum(-1, keepdims=True),
    }[activation]
    np.testing.assert_allclose(scores_of(model, prompts), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("given", ["torch.nn.Tanh", "own.Sigmoid", 1])
def test_other_activations_of_cross_encoders_are_refused(given, opened):
    with pytest.raises(ConfigError, match=r"activation_fn must be torch's Sigmoid or Identity"):
        opened(ONE_LABEL, config={"sentence_transformers": {"activation_fn": given}})


def test_a_model_with_a_head_generates_nothing(opened):
    model = opened(ONE_LABEL)
    engine = LLMEngine(model, max_num_seqs=2, num_blocks=8)
    with pytest.raises(RequestError, match="classifies texts and generates none"):
        engine.add_request("a", [1, 2], SamplingParams())
    with pytest.raises(WeightsError, match="classification head cannot change"):
        model.update_weights({})
    assert np.linalg.norm(embed(model, [[5, 6]])[0]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("config", "tensors", "error", "why"),
    [
        ({}, {"score__weight": None}, WeightsError, "'score.weight' of Qwen2For.* is missing"),
        (
            {},
            {"score__weight": np.zeros((1, 5), np.float32)},
            WeightsError,
            r"shape \(labels, 32\); got \(1, 5\)",
        ),
        (
            {},
            {"score__bias": np.zeros(3, np.float32)},
            WeightsError,
            r"'score.bias' must have shape \(1,\)",
        ),
        ({"id2label": {"0": "a", "1": "b"}}, {}, ConfigError, "id2label must name the 1 labels"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
            {},
            WeightsError,
            "not part of a qwen2 model with this config: score.weight",
        ),
    ],
)
def test_damaged_heads_are_refused(opened, config, tensors, error, why):
    with pytest.raises(error, match=why):
        opened(ONE_LABEL, config=config, **tensors)


def test_a_quantized_copy_keeps_its_head(tmp_path, opened):
    case = "llama_two_labels"
    want = scores_of(opened(case), GOLDEN["prompts"])
    folder = write_model(tmp_path / "m", case)
    write_tokenizer(folder)
    quantize(folder, tmp_path / "q", format="int8", device="cpu")
    model = load(tmp_path / "q", device="cpu", dtype="float32")
    assert "score.weight" in load_file(tmp_path / "q/model.safetensors")
    config = (tmp_path / "q/config.json").read_text(encoding="utf-8")
    assert "score" in json.loads(config)["quantization_config"]["ignore"]
    assert np.abs(np.array(scores_of(model, GOLDEN["prompts"])) - np.array(want)).max() < 0.1


# ---- LLM


def test_classify(tmp_path):
    folder = write_model(tmp_path / "m", NAMED)
    write_tokenizer(folder, has_bos=False)
    with LLM(str(folder), device="cpu", dtype="float32", num_blocks=16) as llm:
        found = llm.classify([{"prompt_token_ids": ids} for ids in GOLDEN["prompts"]])
        for output, want in zip(found, CASES[NAMED]["scores"], strict=True):
            np.testing.assert_allclose(output.outputs.probs, want, rtol=2e-5, atol=2e-6)
            names = ["négatif", "neutral", "positive"]
            assert output.outputs.label == names[int(np.argmax(want))]
            assert output.outputs.num_classes == 3
        [one] = llm.classify("what do cats eat")
        assert one.prompt_token_ids == [WORDS.index(word) for word in ["what", "do", "cats", "eat"]]
        with pytest.raises(RequestError, match="one label; it has 3"):
            llm.score("what", "cats")


def test_a_head_scores_pairs(tmp_path):
    """The two texts are a pair as the tokenizer writes pairs, for one head of one label."""
    folder = write_model(tmp_path / "m", ONE_LABEL)
    write_tokenizer(folder)
    with LLM(str(folder), device="cpu", dtype="float32", num_blocks=16) as llm:
        found = llm.score("what do cats eat", ["cats eat mice", "rates rose é 漢"])
        pair = "<s> what do cats eat <s> cats eat mice"
        assert found[0].prompt_token_ids == [WORDS.index(word) for word in pair.split()]
        model = llm.llm_engine.model
        want = scores_of(model, [each.prompt_token_ids for each in found])
        assert [each.outputs.score for each in found] == pytest.approx([w[0] for w in want])
        other = llm.score(["what", "cats"], ["cats", "what"])
        assert other[0].outputs.score != other[1].outputs.score
        cosine = llm.score("what", "what", reranker="cosine")
        assert cosine[0].outputs.score == pytest.approx(1)
        long = "cats " * 200
        for reranker, names in ((None, "text_1 and text_2"), ("cosine", "text_2")):
            for texts, item in (([*["cats"] * 2, long], r"text_2\[2\]: "), (long, "")):
                message = f"^{item}This model's .* your {names} resulted in"
                with pytest.raises(ContextLengthError, match=message):
                    llm.score("what", texts, reranker=reranker)
        with pytest.raises(ContextLengthError, match=r"^This model's .* your text_1 resulted in"):
            llm.score(long, ["what", "cats"], reranker="cosine")
        with pytest.raises(RequestError, match="instruction needs a reranker with a prompt"):
            llm.score("what", "cats", instruction="x")
        with pytest.raises(RequestError, match="pooling needs a model of embeddings"):
            llm.score("what", "cats", pooling="mean")
        with pytest.raises(RequestError, match="generates none"):
            llm.generate("what")


QUERY = "What do cats eat?"
DOCUMENTS = ["Interest rates rose again.", "Cats eat mice and fish.", "Ein Kätzchen schläft. 猫"]


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2", device="cpu", dtype="float32", max_model_len=512, num_blocks=96) as found:
        yield found


def test_scores_of_embeddings_are_cosines(llm):
    model = llm.llm_engine.model
    for pooling in (None, "mean"):
        found = llm.score(QUERY, DOCUMENTS, pooling=pooling)
        ids = [llm.tokenizer.encode(text) for text in (QUERY, *DOCUMENTS)]
        query, *others = embed(model, ids, pooling or "last")
        want = [float(query @ other) for other in others]
        assert [each.outputs.score for each in found] == pytest.approx(want, abs=1e-6)
        assert found[1].prompt_token_ids == ids[0] + ids[2]


def test_scores_of_a_reranker_are_probabilities(llm):
    tokenizer = llm.tokenizer
    found = llm.score(QUERY, DOCUMENTS, reranker="qwen3", instruction="Find <|im_end|> food")
    model = llm.llm_engine.model
    for output, document in zip(found, DOCUMENTS, strict=True):
        ids = output.prompt_token_ids
        text = f"<Instruct>: Find <|im_end|> food\n<Query>: {QUERY}\n<Document>: {document}<|im_end"
        assert text in tokenizer.decode(ids, False)
        assert sum(i == tokenizer.token_to_id("<|im_end|>") for i in ids) == 2  # the prompt's own
        logits = model.step([ids], model.new_cache(1, len(ids)))[0].astype(np.float64)
        no, yes = (logits[tokenizer.token_to_id(word)] for word in ("no", "yes"))
        assert output.outputs.score == pytest.approx(1 / (1 + math.exp(no - yes)), rel=1e-4)
    scores = {each.outputs.score for each in found}
    assert len(scores) == 3


def test_scores_beside_other_requests(llm):
    """A thread's scores and another's answers do not change each other."""
    params = SamplingParams(temperature=0, max_tokens=24)
    alone = llm.generate(QUERY, params)[0].outputs[0].token_ids
    want = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS)]
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(llm.generate(QUERY, params)[0].outputs[0].token_ids)
    )
    thread.start()
    found = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS)]
    thread.join()
    assert found == pytest.approx(want, abs=1e-6) and answers == [alone]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "why"),
    [
        ((["a", "b"], ["c"]), {}, RequestError, r"as many as text_2 \(1\); got 2"),
        (("a", []), {}, RequestError, "text_2 must have at least one text"),
        ((5, "a"), {}, RequestError, "text_1 must be a text or texts; got 5"),
        (("a", ["b", 5]), {}, RequestError, r"text_2\[1\] must be a text; got 5"),
        (("a", "b"), {"pooling": "max"}, RequestError, "pooling must be 'last' or 'mean'"),
        (("a", "b"), {"instruction": "x"}, RequestError, "instruction needs a reranker"),
        (("a", "b"), {"reranker": "pair"}, ConfigError, "needs a model with a classification head"),
        (("a", "b"), {"reranker": "bert"}, ConfigError, "one of qwen3, cosine, pair; got 'bert'"),
    ],
)
def test_what_cannot_be_scored(llm, arguments, options, error, why):
    with pytest.raises(error, match=why):
        llm.score(*arguments, **options)


def test_a_model_without_a_head_classifies_nothing(llm):
    with pytest.raises(RequestError, match="has no classification head"):
        llm.classify("a")


def test_pairs_in_a_worker(tmp_path):
    """A tokenizer whose files are read in a child encodes pairs as well."""
    from engine.text.encode_worker import WorkerEncoder

    write_tokenizer(tmp_path)
    encoder = WorkerEncoder((tmp_path / "tokenizer.json").read_bytes(), (), "a step")
    ids = [WORDS.index(word) for word in ["<s>", "é", "<s>", "漢", "eat"]]
    assert encoder("é", True, "漢 eat") == (ids, False)
    assert encoder("é", False, "漢 eat")[0] == [ids[1], *ids[3:]]
