"""/score and /rerank: cosine of embeddings, and a reranker's answer against the model's logits."""

from __future__ import annotations

import contextlib
import math

import httpx
import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.errors import ConfigError
from engine.llm_engine import LLMEngine
from engine.model import load
from engine.server.app import build_app
from engine.server.server_config import ServerConfig, key_hash
from engine.tasks import rerankers
from engine.tasks.embeddings import CLASSIFY, embed_in_parts
from tests.classifier_files import CASES, GOLDEN, WORDS, write_model, write_tokenizer
from tests.server.serving import CannedClient, serve

QUERY = "What do cats eat?"
DOCUMENTS = ["Interest rates rose again.", "Cats eat mice and fish.", "A kitten is asleep."]
OPTIONS = {"max_num_seqs": 8, "max_model_len": 512, "num_blocks": 256}


@pytest.fixture(scope="module")
def http(real_server):
    with httpx.Client(base_url=real_server.url, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def reranker():
    """A server that asks smollm2 as if it were Qwen3-Reranker; it is no good one."""
    model = load("smollm2", device="cpu", dtype="float32")
    config = ServerConfig(reranker="qwen3", served_model_name=("smollm2",))
    with serve(lambda: AsyncEngine(LLMEngine(model, **OPTIONS)), config) as found:
        found.model = model
        yield found


def post(url, path, **body):
    response = httpx.post(url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


# ---- cosine


def vectors(http, texts, pooling):
    found = http.post("/v1/embeddings", json={"input": texts, "pooling": pooling}).json()
    return [np.array(item["embedding"]) for item in found["data"]]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_scores_are_cosines(http, real_server, pooling):
    query, *others = vectors(http, [QUERY, *DOCUMENTS], pooling)
    want = [query @ each for each in others]
    one = post(real_server.url, "/score", text_1=QUERY, text_2=DOCUMENTS, pooling=pooling)
    assert [item["score"] for item in one["data"]] == pytest.approx(want, abs=1e-5)
    assert [item["index"] for item in one["data"]] == [0, 1, 2] and one["model"] == "smollm2"
    pairs = post(
        real_server.url, "/v1/score", text_1=[QUERY] * 3, text_2=DOCUMENTS, pooling=pooling
    )
    assert pairs["data"] == one["data"]
    assert pairs["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"] > 20
    found = post(real_server.url, "/score", text_1=QUERY, text_2=QUERY, pooling=pooling)
    assert found["data"][0]["score"] == pytest.approx(1.0, abs=1e-6)


def test_a_ranking(http, real_server):
    url = real_server.url
    want = post(url, "/score", text_1=QUERY, text_2=DOCUMENTS, pooling="mean")["data"]
    order = sorted(range(3), key=lambda i: -want[i]["score"])
    found = post(url, "/rerank", query=QUERY, documents=DOCUMENTS, pooling="mean")
    assert [each["index"] for each in found["results"]] == order
    assert order[0] == 1
    for each in found["results"]:
        assert each["relevance_score"] == pytest.approx(want[each["index"]]["score"], abs=1e-6)
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    objects = [{"text": text} for text in DOCUMENTS]
    for path in ("/v1/rerank", "/v2/rerank"):
        best = post(
            url,
            path,
            query=QUERY,
            documents=[objects[0], DOCUMENTS[1], objects[2]],
            top_n=1,
            return_documents=False,
            pooling="mean",
        )
        [result] = best["results"]
        assert result.keys() == {"index", "relevance_score"} and result["index"] == 1
        assert best["usage"] == found["usage"]
    for top_n, count in ((0, 3), (7, 3), (2, 2)):
        found = post(url, "/rerank", query=QUERY, documents=DOCUMENTS, top_n=top_n)
        assert len(found["results"]) == count


# ---- a reranker


def probability(model, query, document, instruction=None):
    """The definition: the softmax of the logits of "no" and "yes" after the published prompt."""
    tokenizer = model.tokenizer
    task = "Given a web search query, retrieve relevant passages that answer the query"
    head = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    tail = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    body = f"<Instruct>: {instruction or task}\n<Query>: {query}\n<Document>: {document}"
    ids = [i for text in (head, body, tail) for i in tokenizer.encode(text, False)]
    logits = model.step([ids], model.new_cache(1, len(ids)))[0].astype(np.float64)
    no, yes = (logits[tokenizer.token_to_id(text)] for text in ("no", "yes"))
    return math.exp(yes) / (math.exp(yes) + math.exp(no)), len(ids)


def test_a_rerankers_scores_are_probabilities(reranker):
    found = post(reranker.url, "/score", text_1=QUERY, text_2=DOCUMENTS)
    want = [probability(reranker.model, QUERY, each) for each in DOCUMENTS]
    assert [item["score"] for item in found["data"]] == pytest.approx([p for p, _ in want], 1e-4)
    assert found["usage"]["total_tokens"] == sum(count for _, count in want)
    task = "Find what contradicts the query"
    found = post(reranker.url, "/rerank", query=QUERY, documents=DOCUMENTS, instruction=task)
    for each in found["results"]:
        text = DOCUMENTS[each["index"]]
        wanted, _ = probability(reranker.model, QUERY, text, task)
        assert each["relevance_score"] == pytest.approx(wanted, 1e-4)
    scores = [each["relevance_score"] for each in found["results"]]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 3


def test_an_answer_beyond_the_most_probable_tokens_is_asked_for(reranker, monkeypatch):
    want = post(reranker.url, "/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    monkeypatch.setattr(rerankers, "_MOST_LOGPROBS", 0)
    found = post(reranker.url, "/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    assert [i["score"] for i in found] == pytest.approx([i["score"] for i in want], 1e-4)


def test_texts_cannot_write_control_tokens(reranker):
    tokenizer = reranker.model.tokenizer
    form = rerankers.chosen("qwen3", (), has_head=False)
    fields = {"instruction": "a", "query": "<|im_end|>", "document": "{query}<|im_start|>"}
    prompt = tokenizer.fill(form.template, **fields)
    ids = tokenizer.encode_prompt(prompt)
    plain = {"instruction": "a", "query": "b", "document": "c"}
    special = [i for i in ids if i in tokenizer.special_ids]
    wanted = tokenizer.encode_prompt(tokenizer.fill(form.template, **plain))
    assert special == [i for i in wanted if i in tokenizer.special_ids]
    assert tokenizer.decode(ids, False) == prompt.text and "{query}<|im_start|>" in prompt.text


def test_keys_do_not_share_prefixes(reranker):
    keys = {"api_key_hashes": (key_hash("a"), key_hash("b"))}
    config = ServerConfig(reranker="qwen3", **keys)
    model = reranker.model
    with serve(lambda: AsyncEngine(LLMEngine(model, **OPTIONS)), config) as server:
        cached = []
        for key in "aab":
            body = {"text_1": QUERY, "text_2": DOCUMENTS[0]}
            headers = {"X-API-Key": key}
            assert httpx.post(server.url + "/score", json=body, headers=headers).status_code == 200
            text = httpx.get(server.url + "/metrics", headers=headers).text
            [line] = [x for x in text.splitlines() if x.startswith("vllm:prefix_cache_hits_total{")]
            cached.append(float(line.rpartition(" ")[2]))
        first, again, other = np.diff([0, *cached])
        assert first == other < again  # a score may take two requests, which share their prompt


# ---- a classification head


@contextlib.contextmanager
def serving(tmp_path, case, **config):
    folder = write_model(tmp_path / "model", case)
    write_tokenizer(folder)
    model = load(folder, device="cpu", dtype="float32")
    options = {"max_num_seqs": 2, "max_model_len": 64, "num_blocks": 16}
    config = ServerConfig(served_model_name=("tiny",), **config)
    with serve(lambda: AsyncEngine(LLMEngine(model, **options)), config) as found:
        yield found.url, model


def heads_scores(model, prompts):
    found = {}
    for part in embed_in_parts(model, prompts, CLASSIFY):
        found.update(part)
    return [found[i].tolist() for i in range(len(prompts))]


def test_a_head_of_one_label_scores_pairs(tmp_path):
    pairs = ["<s> what do cats eat <s> cats eat mice", "<s> what do cats eat <s> rates rose"]
    ids = [[WORDS.index(word) for word in pair.split()] for pair in pairs]
    with serving(tmp_path, "qwen2_one_label") as (url, model):
        want = [score for [score] in heads_scores(model, ids)]
        texts = {"text_1": "what do cats eat", "text_2": ["cats eat mice", "rates rose"]}
        found = post(url, "/score", **texts)
        assert [each["score"] for each in found["data"]] == pytest.approx(want, abs=1e-6)
        assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
        ranked = post(url, "/v2/rerank", query=texts["text_1"], documents=texts["text_2"])
        order = sorted(range(2), key=lambda i: -want[i])
        assert [each["index"] for each in ranked["results"]] == order
        for body, words in (
            (texts | {"instruction": "x"}, "instruction needs a reranker with a prompt"),
            (texts | {"pooling": "mean"}, "pooling needs a model of embeddings"),
            (texts | {"text_1": "cats " * 70}, "your text_1 and text_2 resulted in"),
        ):
            answer = httpx.post(url + "/score", json=body, timeout=60)
            assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        chat = {"messages": [{"role": "user", "content": "cats"}]}
        for path, body in (("/v1/completions", {"prompt": "cats"}), ("/v1/chat/completions", chat)):
            assert httpx.post(url + path, json=body, timeout=60).status_code == 400, path


def test_a_reranker_with_a_head_reads_its_prompt(tmp_path):
    with serving(tmp_path, "qwen2_one_label", reranker="qwen3") as (url, model):
        ids = model.tokenizer.encode_prompt(
            rerankers.chosen("qwen3", (), has_head=True).prompt(
                model.tokenizer, "cats", "mice", "eat"
            )
        )
        assert len(ids) > 20
        fields = {"text_1": "cats", "text_2": "mice", "instruction": "eat"}
        [item] = post(url, "/score", **fields)["data"]
        assert item["score"] == pytest.approx(heads_scores(model, [ids])[0][0], abs=1e-6)


def test_classes_of_texts(tmp_path):
    with serving(tmp_path, "qwen3_named_labels") as (url, model):
        prompts = GOLDEN["prompts"]
        want = CASES["qwen3_named_labels"]["scores"]
        found = post(url, "/classify", input=prompts)
        for item, scores in zip(found["data"], want, strict=True):
            assert item["probs"] == pytest.approx(scores, rel=2e-5)
            assert item["num_classes"] == 3
            assert item["label"] == model.classifier.labels[int(np.argmax(scores))]
        assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))
        [one] = post(url, "/classify", input="cats eat")["data"]
        ids = [WORDS.index(word) for word in ("<s>", "cats", "eat")]
        assert one["probs"] == pytest.approx(heads_scores(model, [ids])[0])
        answer = httpx.post(url + "/score", json={"text_1": "cats", "text_2": "eat"}, timeout=60)
        assert answer.status_code == 400 and "this one has 3: ask /classify" in answer.text
        answer = httpx.post(url + "/classify", json={"input": "cats " * 90}, timeout=60)
        assert answer.status_code == 400 and "input" in answer.json()["error"]["message"]


def test_a_model_without_a_head_has_no_classes(http):
    found = http.post("/classify", json={"input": "a"})
    assert found.status_code == 400
    assert "no classification head" in found.json()["error"]["message"]


# ---- what is refused


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "as many as text_2 (1)"),
        ("/score", {"text_1": [], "text_2": "c"}, "text_1", "1 to 1024 texts"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "1 to 1024 texts"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 1025}, "text_2", "got 1025"),
        ("/score", {"text_1": "a"}, "text_2", "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction", "reranker"),
        ("/score", {"text_1": "a", "text_2": "b", "pooling": "max"}, "pooling", "max"),
        ("/score", {"text_1": "", "text_2": "b"}, "text_1", "text_1 must not be empty"),
        ("/score", {"text_1": "a", "text_2": "b " * 600}, "text_2", "your text_2 resulted in 601"),
        ("/rerank", {"query": "a", "documents": ["b", "c " * 600]}, "documents", "512"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "1 to 1024"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "got -1"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, None, "title"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query", "str"),
        ("/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 5}, None, "unkn"),
    ],
)
def test_what_cannot_be_scored_is_refused(http, path, body, param, words):
    found = http.post(path, json=body)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert words in error["message"] and param in (None, error["param"])


def test_a_reranker_refuses_what_it_does_not_have(reranker):
    def error(**body):
        found = httpx.post(reranker.url + "/score", json=body, timeout=60)
        assert found.status_code == 400
        return found.json()["error"]["message"]

    assert "pooling needs a model of embeddings" in error(text_1="a", text_2="b", pooling="last")
    assert "your text_1 and text_2 resulted in" in error(text_1="a", text_2="b " * 600)
    long = "a b " * 100  # each pair fits, but not all of them
    config = ServerConfig(reranker="qwen3", max_body_bytes=9000)
    model = load("smollm2", device="cpu", dtype="float32")  # its server closes it
    with serve(lambda: AsyncEngine(LLMEngine(model, **OPTIONS)), config) as one:
        body = {"text_1": long, "text_2": ["b"] * 20}
        found = httpx.post(one.url + "/score", json=body, timeout=60)
        assert found.status_code == 400 and "at most 9000 characters" in found.text


def test_the_dimensions_of_all_texts_are_bounded(smollm2):
    config = ServerConfig(max_embedding_values=1200)
    with serve(lambda: AsyncEngine(LLMEngine(smollm2, **OPTIONS)), config) as server:
        body = {"query": "a", "documents": ["b", "c"]}
        found = httpx.post(server.url + "/rerank", json=body, timeout=60)
        assert found.status_code == 400
        assert "at most 2 different texts" in found.text and "got 3" in found.text
        body = {"query": "a", "documents": ["b", "b", "a"]}
        assert httpx.post(server.url + "/rerank", json=body, timeout=60).status_code == 200


def test_the_option_and_the_names_choose(smollm2):
    client = CannedClient("a")
    with pytest.raises(ConfigError, match="reranker must be one of qwen3, cosine, pair; got 'x'"):
        build_app(client, ServerConfig(reranker="x"))
    client.tokenizer.token_to_id = lambda text: None
    with pytest.raises(ConfigError, match="needs a model with the token 'yes'; got scripted"):
        build_app(client, ServerConfig(served_model_name=("Qwen/Qwen3-Reranker-4B",)))
    build_app(
        client, ServerConfig(served_model_name=("Qwen/Qwen3-Reranker-4B",), reranker="cosine")
    )
