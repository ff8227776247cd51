"""The page with the server and the engine, where `test_page.py` has a double of both."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.async_engine import AsyncEngine
from engine.server.app import begin_drain, build_app
from engine.server.routes import page
from engine.server.server_config import ServerConfig, key_hash
from tests.server.page_browser import Page, chromium_or_skip
from tests.server.page_double import Server, first_lines, get


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    yield from chromium_or_skip(tmp_path_factory.mktemp("chromium"))


@pytest.fixture(scope="module")
def real_engine():
    engine = AsyncEngine.from_name("smollm2", device="cpu", max_model_len=512)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def serve(real_engine):
    """A function that serves the engine with some options of the server."""
    servers = []

    def start(**options):
        app = build_app(real_engine, ServerConfig(served_model_name=("smollm2",), **options))
        servers.append(Server(app))
        return servers[-1], app

    yield start
    for server in servers:
        server.close()


def test_a_key_guards_the_snapshots_but_not_the_files(serve):
    site, _ = serve(api_key_hashes=(key_hash("secret"),))
    assert all(get(site, path)[0] == 200 for path in page.PUBLIC_PATHS)
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        status, _, body = get(site, "/v1/engine/watch", **headers)
        assert status == 401 and "API key" in json.loads(body)["error"]["message"]
    [line] = first_lines(site, 1, Authorization="Bearer secret")
    assert json.loads(line.removeprefix(b"data: "))["num_blocks"] > 0


def test_options_of_the_page(serve):
    site, _ = serve(max_watchers=0)
    status, headers, body = get(site, "/v1/engine/watch")
    assert status == 429 and headers["retry-after"] == "5"
    assert json.loads(body)["error"]["type"] == "rate_limit_error"
    site, app = serve()
    begin_drain(app)
    status, _, body = get(site, "/v1/engine/watch")
    assert status == 503 and "shutting down" in json.loads(body)["error"]["message"]
    site, _ = serve(enable_page=False)
    assert get(site, "/")[0] == get(site, "/v1/engine/watch")[0] == 404


def test_chat_and_watch_with_the_engine(browser, serve):
    site, _ = serve()
    chat = Page(browser)
    chat.emulate()
    browser.get(site.url)
    chat.wait(lambda: chat.all("#model option[value=smollm2]"))
    chat.one("#temperature").send_keys("0")
    chat.one("#max_tokens").send_keys("8")
    chat.ask("What is the capital of France?", seconds=60)
    assert chat.answer() == "The capital of France is Paris."
    assert "8 tokens" in chat.text(".assistant .note")
    words = chat.all(".assistant .token")
    assert [word.text for word in words] == ["The", "capital", "of", "France", "is", "Paris", "."]
    chat.hover(words[5])
    assert chat.text("#alternatives .chosen > .word") == "·Paris, chosen"
    assert len(chat.all("#alternatives li")) == 5
    words[5].click()
    chat.wait(lambda: chat.all("#lens-grid td"), seconds=60)
    assert chat.text("#lens-grid th[scope=col]:last-child") == "·Paris"
    assert chat.text("#lens-grid tr:nth-child(2) td:last-child") == "·Paris"  # the last layer
    assert len(chat.all("#lens-grid tr")) == 1 + 30
    chat.one("#lens-close").click()
    chat.one("#tab-watch").click()
    chat.wait(lambda: chat.text("#watch-state") == "idle")
    assert int(chat.text("#kept").split()[0]) >= 2
    chat.one("#send-load").click()
    chat.wait(lambda: len(chat.all(".request[data-state=running]")) > 1, seconds=20)
    chat.wait(lambda: int(chat.text("#held").split()[0]) > 1, seconds=20)
    assert float(chat.text("#fig-step").replace(",", "")) > 0
    browser.get("about:blank")
    assert not [entry for entry in browser.get_log("browser") if entry["source"] != "network"]
