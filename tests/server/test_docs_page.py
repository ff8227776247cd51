"""The page /docs: its files, its examples, and what a person finds on it in a browser."""

from __future__ import annotations

import re
import subprocess

import httpx
import msgspec
import pytest

from engine.server.app import build_app
from engine.server.routes import docs
from engine.server.server_config import ServerConfig, key_hash
from tests.server.page_browser import Page, chromium_or_skip
from tests.server.serving import CannedClient, serve

ADMIN = ServerConfig(admin_key_hashes=(key_hash("root"),), lora_root="/", weights_root="/")


@pytest.fixture(scope="module")
def server():
    with serve(lambda: CannedClient("Hello")) as found:
        yield found


# ---- files


def test_the_files_let_nothing_else_run_and_need_nothing_from_elsewhere(server):
    assert {"/docs", "/docs/docs.js", "/docs/docs.css"} == docs.PUBLIC_PATHS
    for path in docs.PUBLIC_PATHS:
        found = httpx.get(server.url + path)
        assert found.status_code == 200
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    html = httpx.get(server.url + "/docs").text
    script = httpx.get(server.url + "/docs/docs.js").text
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
    assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\(|document\.write|https?:", script)
    files = re.findall(r'(?:src|href)="([^"]+)"', html)
    files += [f"docs/{name}" for name in re.findall(r'from "([^"]+)"', script)]
    assert "docs/docs.js" in files and "docs/../static/api.js" in files
    for name in files:
        assert httpx.get(f"{server.url}/{name}").status_code == 200, name
    assert httpx.get(server.url + "/docs/").status_code == 404


def test_it_needs_no_key_but_the_description_does():
    config = ServerConfig(api_key_hashes=(key_hash("k"),))
    with serve(lambda: CannedClient("a"), config) as server:
        assert httpx.get(server.url + "/docs").status_code == 200
        assert httpx.get(server.url + "/openapi.json").status_code == 401


def test_it_is_absent_without_the_pages():
    with serve(lambda: CannedClient("a"), ServerConfig(enable_page=False)) as server:
        assert httpx.get(server.url + "/docs").status_code == 404
        assert httpx.get(server.url + "/openapi.json").status_code == 200


# ---- examples


def _bodies(document):
    """Yield method, path and the JSON content of each request body."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if "requestBody" in operation:
                yield method, path, operation["requestBody"]["content"]["application/json"]


def test_every_request_has_an_example_that_is_valid():
    app = build_app(CannedClient("a"), ADMIN)
    types = {(e.method, e.path): e.request for e in app.state.endpoints}
    with serve(lambda: CannedClient("a"), ADMIN) as server:
        document = httpx.get(server.url + "/openapi.json").json()
    found = list(_bodies(document))
    assert len(found) == 20
    for method, path, content in found:
        msgspec.convert(content["example"], types[method, path])


def test_the_examples_are_answered(real_server):
    document = httpx.get(real_server.url + "/openapi.json").json()
    for _, path, content in _bodies(document):
        body = content["example"]
        assert body.get("model", "smollm2") == "smollm2"
        for name in ("max_tokens", "max_output_tokens"):
            body |= {name: 2} if name in body else {}
        found = httpx.post(real_server.url + path, json=body, timeout=60)
        if path == "/classify":  # for models with a classification head
            assert found.status_code == 400 and "no classification head" in found.text
            continue
        assert found.status_code == 200, (path, found.text)


# ---- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    yield from chromium_or_skip(tmp_path_factory.mktemp("chromium"))


def _open(browser, server, path="/docs"):
    shown = Page(browser)
    shown.emulate()
    browser.get("about:blank")  # also for an address that differs in its fragment only
    browser.get(server.url + path)
    return shown


@pytest.fixture
def shown(browser, server):
    found = _open(browser, server)
    found.wait(lambda: found.all(".endpoint"))
    yield found
    log = browser.get_log("browser")
    browser.get("about:blank")
    assert not log  # neither an exception nor a violation of the policy


def _visible(shown):
    return [one.text for one in shown.all(".endpoint .path") if one.is_displayed()]


def test_it_lists_every_endpoint(shown, server):
    document = httpx.get(server.url + "/openapi.json").json()
    operations = [(m, p) for p, item in document["paths"].items() for m in item]
    methods = [one.text.lower() for one in shown.all(".endpoint .method")]
    assert sorted(zip(methods, _visible(shown), strict=True)) == sorted(operations)
    assert shown.text("#version") == document["info"]["version"]


@pytest.mark.parametrize(
    ("words", "paths"),
    [
        ("count_tokens", {"/v1/messages/count_tokens"}),
        ("SAMPLING_params", {"/inference/v1/generate"}),  # a field
        ("relevance sort /v2", {"/v2/rerank"}),
        ("zzz", set()),
    ],
)
def test_the_search_finds_paths_summaries_and_fields(shown, words, paths):
    shown.keys("/", words)  # "/" goes to the search field
    shown.wait(lambda: shown.text("#count").startswith(f"{len(paths)} of "))
    assert set(_visible(shown)) == paths
    assert all(
        any(one.is_displayed() for one in part.find_elements("css selector", ".endpoint"))
        for part in shown.all("main > section")
        if part.is_displayed()
    )


def test_an_endpoint_shows_its_fields_and_commands_that_work(shown, server):
    shown.one("#post_v1_chat_completions > summary").click()
    whole, stream = shown.wait(lambda: shown.all("#post_v1_chat_completions pre"))
    for command, wanted in ((whole.text, '"object":"chat.completion"'), (stream.text, "[DONE]")):
        assert server.url in command
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
        assert wanted in done.stdout, done
    rows = {
        row.find_element("css selector", "td").text: [
            cell.text for cell in row.find_elements("css selector", "td")
        ]
        for row in shown.all("#post_v1_chat_completions table:first-of-type tr:has(td)")
    }
    assert rows["top_p"][1:3] == ["number", "above 0 to 1"]
    assert rows["messages"][3] == "required"
    assert rows["stream"][1] == "boolean"


def test_nested_objects_open(shown):
    shown.one("#post_inference_v1_generate > summary").click()
    nested = shown.wait(lambda: shown.all("#post_inference_v1_generate .nested"))[0]
    assert nested.text == "GenerateSampling"
    nested.find_element("css selector", "summary").click()
    shown.wait(lambda: "repetition_penalty" in nested.text)


def test_a_link_opens_its_endpoint(browser, server):
    shown = _open(browser, server, "/docs#post_tokenize")
    shown.wait(lambda: shown.all("#post_tokenize[open] pre"))


def test_with_keys_it_asks_for_one(browser):
    config = ServerConfig(api_key_hashes=(key_hash("k"),))
    with serve(lambda: CannedClient("a"), config) as server:
        shown = _open(browser, server)
        for key in ("wrong", "k"):
            shown.wait(lambda: shown.one("#key").is_displayed())
            shown.one("#key").send_keys(key + "\n")
        shown.wait(lambda: shown.all(".endpoint"))
        assert not shown.one("#key").is_displayed()
        shown.one("#get_v1_models > summary").click()
        command = shown.wait(lambda: shown.text("#get_v1_models pre"))
        assert '-H "Authorization: Bearer $API_KEY"' in command
