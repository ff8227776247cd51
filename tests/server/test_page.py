"""The page at `/`: its files and headers, its feed, and what a person does with it in a browser."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import time
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from engine.errors import EngineError
from engine.server.routes import page, watch
from tests.server.page_browser import Page, chromium_or_skip
from tests.server.page_double import (
    ANSWER,
    HOSTILE,
    Script,
    Server,
    SimulatedEngine,
    build_double,
    first_lines,
    get,
)


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def engine():
    return SimulatedEngine()


@pytest.fixture
def app(script, engine):
    return build_double(script, engine)


@pytest.fixture
def site(app):
    server = Server(app)
    yield server
    server.close()


# ---- files


def test_every_file_comes_with_headers_that_let_nothing_else_run(site):
    assert {"/", "/static/app.js", "/static/style.css"} <= page.PUBLIC_PATHS
    for path in page.PUBLIC_PATHS:
        status, headers, body = get(site, path)
        assert status == 200 and body, path
        assert headers["x-content-type-options"] == "nosniff"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
        assert headers["content-type"].startswith(kind.get(path.split(".")[-1], "text/html"))


def test_a_file_that_the_browser_has_is_not_sent_again(site):
    _, headers, _ = get(site, "/static/app.js")
    for known in (headers["etag"], f"W/{headers['etag']}", f'"x", {headers["etag"]}'):
        status, again, body = get(site, "/static/app.js", **{"If-None-Match": known})
        assert (status, body, again["etag"]) == (304, b"", headers["etag"])
    assert get(site, "/static/app.js", **{"If-None-Match": '"other"'})[0] == 200


@pytest.mark.parametrize(
    "path", ["/static/", "/static/x.js", "/static/../__init__.py", "/static/%2e%2e/__init__.py"]
)
def test_nothing_but_the_files_of_the_page_is_served(site, path):
    assert get(site, path)[0] == 404


def test_head_and_other_methods(site):
    status, headers, body = get(site, "/", method="HEAD")
    assert (status, body) == (200, b"") and int(headers["content-length"]) > 1000
    assert get(site, "/", method="POST")[0] == 405


def test_the_files_need_nothing_from_elsewhere():
    html = (page._STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
    names = set(re.findall(r'(?:src|href)="(?!#)([^"]+)"', html))
    for source in page._STATIC.glob("*.js"):
        text = source.read_text()
        names |= {f"static/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
        assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\(|document\.write|//cdn", text)
        assert text.count("\n") <= 300, source.name
    assert {f"/{name}" for name in names} | {"/"} == page.PUBLIC_PATHS


# ---- the feed


def _frames(count, feed):
    async def read():
        feed.join()
        frames = [(await feed.next_frame()).data for _ in range(count)]
        feed.leave()
        return frames

    return read()


def test_viewers_share_each_snapshot(engine):
    async def run():
        feed = watch.SnapshotFeed(engine)
        seen = await asyncio.gather(*(_frames(3, feed) for _ in range(5)))
        taken = engine.num_snapshots
        await asyncio.sleep(2 * watch.INTERVAL)
        return seen, taken

    seen, taken = asyncio.run(run())
    assert all(frames == seen[0] for frames in seen) and len(set(seen[0])) == 3
    assert taken == 3 and engine.num_snapshots == taken  # none while nobody watches


def test_a_feed_starts_again_for_the_next_viewer(engine):
    async def run():
        feed = watch.SnapshotFeed(engine)
        return [await _frames(1, feed) for _ in range(2)]

    first, second = asyncio.run(run())
    assert first != second


def test_a_viewer_that_asks_late_gets_the_last_frame(engine):
    async def run():
        feed = watch.SnapshotFeed(engine)
        feed.join()
        await feed.next_frame()
        engine.error = EngineError("gone")
        await asyncio.sleep(2 * watch.INTERVAL)  # as one that was busy with the frame before
        late = await asyncio.wait_for(feed.next_frame(), 5)
        engine.error = None
        feed.join()
        after = await asyncio.wait_for(feed.next_frame(), 5)
        for _ in range(2):
            feed.leave()
        return late, after

    late, after = asyncio.run(run())
    assert late.is_last and b"gone" in late.data and not after.is_last


def test_viewers_are_bounded_and_counted_until_they_leave(site, engine):
    connections = []
    for number in range(4):
        connection = http.client.HTTPConnection(urlsplit(site.url).netloc, timeout=10)
        connections.append(connection)
        connection.request("GET", "/v1/engine/watch")
        answer = connection.getresponse()
        assert answer.status == (200 if number < 3 else 429)
        if answer.status == 200:
            event = answer.readline() + answer.readline()
            snapshot = json.loads(event.removeprefix(b"data: "))
            assert snapshot["num_running"] == len(
                [r for r in snapshot["requests"] if r["state"] == "running"]
            )
        else:
            assert answer.getheader("retry-after") == "5"
            assert "max_watchers is 3" in json.loads(answer.read())["error"]["message"]
    for connection in connections:
        connection.close()
    time.sleep(3 * watch.INTERVAL)
    taken = engine.num_snapshots
    time.sleep(2 * watch.INTERVAL)
    assert engine.num_snapshots == taken
    assert first_lines(site, 1)[0].startswith(b"data: ")


def test_a_viewer_that_does_not_read_is_dropped(app, engine):
    app.state.config.send_timeout = 0.1
    sent = []

    async def send(message):
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)  # as a server does whose buffers are full

    async def receive():
        await asyncio.sleep(60)

    scope = {"type": "http", "method": "GET", "path": "/v1/engine/watch", "headers": []}
    scope |= {"query_string": b"", "root_path": "", "http_version": "1.1"}

    async def run():
        await asyncio.wait_for(app(scope, receive, send), 5)
        return sum(feed.num_viewers for feed in app.state.snapshot_feeds.values())

    assert asyncio.run(run()) == 0
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


def test_a_server_that_drains_ends_the_streams(site, app):
    answers = []
    for _ in range(2):
        connection = http.client.HTTPConnection(urlsplit(site.url).netloc, timeout=10)
        connection.request("GET", "/v1/engine/watch")
        answers.append((connection, connection.getresponse()))
    app.state.is_draining = True
    for connection, answer in answers:
        assert answer.read().startswith(b"data: ")  # to its end
        connection.close()
    assert get(site, "/v1/engine/watch")[0] == 503


def test_viewers_are_told_why_the_engine_ended(site, engine):
    engine.error = EngineError("the device is gone")
    status, headers, body = get(site, "/v1/engine/watch")
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert body == b'event: error\ndata: {"message":"the device is gone"}\n\n'


# ---- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    yield from chromium_or_skip(tmp_path_factory.mktemp("chromium"))


@pytest.fixture
def chat(browser, site):
    shown = Page(browser)
    shown.emulate()
    browser.get(site.url)
    shown.wait(lambda: shown.all("#model option[value=another-model]") or shown.all("dialog[open]"))
    yield shown
    log = [entry for entry in browser.get_log("browser") if entry["source"] != "network"]
    browser.get("about:blank")
    assert not log  # neither an exception nor a violation of the policy


def test_a_message_streams_an_answer(chat, script):
    script.delay = 0.02
    chat.ask("Why?", until_done=False)
    partial = chat.wait(chat.answer)
    assert len(partial) < len(ANSWER) and ANSWER.startswith(partial)
    chat.wait(lambda: chat.text("#send") == "Send")
    assert chat.answer() == ANSWER
    note = chat.text(".assistant .note")
    assert re.fullmatch(
        r"49 tokens · [\d.]+ tokens/s · first after \d+ ms · 32 of 40 prompt tokens cached", note
    )
    [asked] = script.asked
    assert asked["messages"] == [{"role": "user", "content": "Why?"}]
    assert asked["model"] == "double-1b" and asked["logprobs"] and asked["top_logprobs"] == 5
    assert not chat.one("#welcome").is_displayed()
    heard = chat.text("#announcer")
    assert "Sunlight holds all colors." in heard and "49 tokens" in heard


def test_the_conversation_goes_along(chat, script):
    chat.ask("Why?")
    chat.ask("And at night?", until_done=False)
    chat.wait(lambda: len(script.asked) == 2)
    roles = [message["role"] for message in script.asked[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert script.asked[1]["messages"][1]["content"] == ANSWER


def test_stop_ends_the_request_and_keeps_the_words(chat, script):
    script.delay = 0.1
    chat.ask("Why?", until_done=False)
    chat.wait(lambda: len(chat.answer()) > 20)
    time.sleep(0.4)
    assert chat.text("#send") == "Stop"
    chat.one("#send").click()
    assert script.was_aborted.wait(5)
    chat.wait(lambda: chat.text("#send") == "Send")
    assert re.match(r"\d+ tokens · .* · stopped$", chat.text(".assistant .note"))
    kept = chat.answer()
    assert 20 < len(kept) < len(ANSWER)
    time.sleep(0.3)
    assert chat.answer() == kept


def test_escape_stops(chat, script):
    from selenium.webdriver.common.keys import Keys

    script.delay = 0.1
    chat.ask("Why?", until_done=False)
    chat.wait(chat.answer)
    chat.keys(Keys.ESCAPE)
    assert script.was_aborted.wait(5)


def test_pointing_at_a_word_shows_its_alternatives(chat):
    chat.ask("Why?")
    assert not chat.one("#alternatives").is_displayed()
    words = chat.all(".assistant .token")
    assert len(words) == 49
    chat.hover(words[5])
    rows = [row.text.split("\n") for row in chat.all("#alternatives li")]
    bar, texts = (chat.box_of(f"#alternatives li .{part}") for part in ("bar-track", "word"))
    assert texts["right"] <= bar["left"] and bar["right"] <= chat.box_of("#alternatives b")["left"]
    assert len(rows) == 5 and all(re.fullmatch(r"(< )?[\d.]+ %", row[-1]) for row in rows)
    assert chat.text("#alternatives .chosen > .word") == f"·{words[5].text}, chosen"
    shares = [float(row[-1].split()[-2]) for row in rows]
    assert shares == sorted(shares, reverse=True) and 97 < sum(shares) <= 100.1
    chat.hover(chat.one("#prompt"))
    chat.wait(lambda: not chat.one("#alternatives").is_displayed())


def test_markup_stays_text(chat, script):
    script.text = HOSTILE
    chat.ask(HOSTILE)
    assert chat.answer() == HOSTILE and chat.text(".user > .text") == HOSTILE
    assert not chat.all(".messages img") and not chat.all(".messages b")


def test_characters_of_several_tokens_are_put_together(chat):
    pieces = chat.driver.execute_async_script("""
        const done = arguments[0];
        import("/static/tokens.js").then(({ TokenPairing }) => {
          const pairing = new TokenPairing();
          const token = (text) => ({ text, p: 1, others: [] });
          done([
            pairing.feed("", [token("\\ufffd")]),
            pairing.feed("é", [token("\\ufffd")]),
            pairing.feed(" held", [token(" held"), token(" ba")]),
            pairing.feed(" back", [token("ck")]),
          ].map((list) => list.map((piece) => [piece.text, piece.tokens.length])));
        });
    """)
    assert pieces == [[], [["é", 2]], [[" held", 1]], [[" ba", 1], ["ck", 1]]]


def test_thoughts_are_apart(chat, script):
    script.thoughts = "The user asks about the sky."
    chat.ask("Why?")
    assert chat.text(".thoughts .text") == script.thoughts and chat.answer() == ANSWER
    assert not chat.one(".thoughts .text").is_displayed()  # folded once the answer is there
    chat.ask("Go on")
    assert [m["content"] for m in script.asked[1]["messages"]] == ["Why?", ANSWER, "Go on"]


def test_parameters_are_sent_and_checked(chat, script):
    given = {"temperature": "0.5", "top_p": "0.9", "top_k": "40", "min_p": "0.05", "seed": "7"}
    given |= {"max_tokens": "100", "repetition_penalty": "1.1", "presence_penalty": "-0.5"}
    for name, value in given.items():
        chat.one(f"#{name}").send_keys(value)
    chat.one("#system").send_keys("Be brief.")
    chat.one("#stop").send_keys("END")
    chat.one("#logprobs").click()
    chat.ask("Why?")
    asked = script.asked[0]
    assert {name: asked[name] for name in given} == {n: float(v) for n, v in given.items()}
    assert asked["stop"] == ["END"] and "logprobs" not in asked
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert not chat.all(".assistant .token") and chat.answer() == ANSWER
    chat.one("#temperature").clear()
    chat.one("#temperature").send_keys("99")
    chat.ask("Why?", until_done=False)
    assert chat.text("#problem-text") == "Temperature must be a number from 0 to 2, or empty."
    assert len(script.asked) == 1 and chat.one("#prompt").get_attribute("value") == "Why?"


@pytest.mark.parametrize(
    "error, words",
    [
        ((429, "8 requests wait", {"Retry-After": "3"}),
         "The server is busy. It says: 8 requests wait. Try again in 3 s."),
        ((503, "shutting down", {"Retry-After": "10"}),
         "The server takes no requests now. It says: shutting down. Try again in 10 s."),
        ((503, "the engine has ended", {}),
         "The server takes no requests now. It says: the engine has ended."),
        ((400, "top_k must be at least 1, got 0", {}), "top_k must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_errors_are_told_in_words(chat, script, error, words):
    script.error = error
    chat.ask("Why?", until_done=False)
    assert chat.wait(lambda: chat.text("#problem-text")) == words
    chat.wait(lambda: chat.one("#prompt").get_attribute("value") == "Why?")
    assert not chat.all(".messages > li") and chat.one("#welcome").is_displayed()
    script.error = None
    chat.one("#retry").click()
    chat.wait(lambda: chat.answer() == ANSWER)
    assert not chat.one("#problem").is_displayed()
    assert chat.one("#prompt").get_attribute("value") == ""


@pytest.mark.parametrize(
    "ends, words",
    [
        ("cut", "The connection was lost before the answer was finished."),
        ("error", "the device is gone"),
    ],
)
def test_a_stream_that_breaks_off_is_told(chat, script, ends, words):
    script.ends = ends
    chat.ask("Why?", until_done=False)
    assert chat.wait(lambda: chat.text("#problem-text")) == words
    assert chat.answer() == "Sunlight holds all colors."
    note = chat.text(".assistant .note")
    assert note.startswith("4 tokens") and note.endswith("failed")


def test_models_that_were_not_known_yet_are_asked_for_again(chat, script):
    script.knows_models = False
    chat.driver.refresh()
    words = "The server takes no requests now. It says: loading the model."
    chat.wait(lambda: chat.text("#problem-text") == words)
    chat.ask("Why?", until_done=False)
    chat.wait(lambda: chat.text("#send") == "Send" and not script.asked)
    assert chat.text("#problem-text") == words
    script.knows_models = True
    chat.one("#retry").click()
    chat.wait(lambda: chat.answer() == ANSWER)
    assert script.asked[0]["model"] == "double-1b"


def test_a_server_that_is_gone_is_told(chat, site):
    chat.ask("Why?")
    site.close()
    chat.ask("And at night?", until_done=False)
    words = chat.wait(lambda: chat.text("#problem-text"))
    assert words.startswith(f"The server at {urlsplit(site.url).netloc} cannot be reached.")
    assert "engine serve" in words
    chat.wait(lambda: chat.one("#prompt").get_attribute("value") == "And at night?")
    assert len(chat.all(".messages > li")) == 2
    chat.one("#retry").click()
    chat.wait(lambda: chat.text("#send") == "Send" and chat.one("#problem").is_displayed())
    assert chat.one("#prompt").get_attribute("value") == "And at night?"


def test_again_copy_and_new_chat(chat, script):
    chat.ask("Why?")
    script.text = "Another answer."
    chat.one(".assistant button[aria-label='Again: generate another answer']").click()
    chat.wait(lambda: chat.answer() == "Another answer.")
    assert len(chat.all(".messages > li")) == 2
    assert [m["role"] for m in script.asked[1]["messages"]] == ["user"]
    copy = chat.one(".assistant button[aria-label='Copy the answer']")
    copy.click()
    chat.wait(lambda: copy.text == "Copied")
    chat.one("#prompt").send_keys("\ue009v\ue000")  # Control+V
    assert chat.one("#prompt").get_attribute("value") == "Another answer."
    chat.one("#new-chat").click()
    assert not chat.all(".messages > li") and chat.one("#welcome").is_displayed()


def test_the_conversation_outlives_a_reload_but_not_the_tab(chat):
    chat.ask("Why?")
    chat.one("#temperature").send_keys("0.5")
    chat.driver.refresh()
    chat.wait(lambda: chat.answer() == ANSWER)
    assert "49 tokens" in chat.text(".assistant .note")
    assert chat.one("#temperature").get_attribute("value") == "0.5"
    chat.hover(chat.all(".assistant .token")[5])
    chat.wait(lambda: chat.one("#alternatives").is_displayed())
    assert chat.driver.execute_script("return localStorage.length + document.cookie.length") == 0


def test_a_new_chat_during_an_answer_leaves_nothing_behind(chat, script):
    script.delay = 0.05
    chat.ask("Why?", until_done=False)
    chat.wait(chat.answer)
    chat.one("#new-chat").click()
    assert script.was_aborted.wait(5)
    chat.wait(lambda: chat.text("#send") == "Send")
    assert not chat.all(".messages > li") and not chat.text("#problem-text")


def test_only_the_keyboard(chat):
    from selenium.webdriver.common.keys import Keys

    assert chat.focused().get_attribute("id") == "prompt"  # from the beginning
    chat.driver.execute_script("document.getElementById('toggle-sidebar').focus()")
    names = []
    for _ in range(40):
        chat.keys(Keys.TAB)
        names.append(chat.focused().get_attribute("id") or chat.focused().text)
        outline = chat.focused().value_of_css_property("outline-style")
        assert outline == "solid" or names[-1] == "prompt", f"no visible focus on {names[-1]}"
        if names[-1] == "prompt":
            break
    assert names[:2] == ["tab-chat", "model"] and names[-1] == "prompt"
    chat.keys("Why?", Keys.ENTER)
    chat.wait(lambda: "49 tokens" in chat.text(".assistant .note"))
    assert chat.focused().get_attribute("id") == "prompt"
    for _ in range(10):
        chat.focused().send_keys(Keys.SHIFT, Keys.TAB)
        if "token" in (chat.focused().get_attribute("class") or ""):
            break
    assert chat.focused().text == "Sunlight"
    chat.keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert chat.focused().text == "all" and chat.one("#alternatives").is_displayed()
    assert "all, chosen" in chat.text("#alternatives")
    assert chat.focused().get_attribute("aria-describedby") == "alternatives"
    chat.keys(Keys.ESCAPE)
    assert not chat.one("#alternatives").is_displayed()
    chat.one("#tab-chat").send_keys(Keys.ARROW_RIGHT)
    assert chat.focused().get_attribute("id") == "tab-watch" and chat.one("#watch").is_displayed()


def test_everything_has_a_name(chat):
    nameless = chat.driver.execute_script("""
        return [...document.querySelectorAll("button, input, select, textarea, canvas")]
          .filter((one) => !(one.textContent.trim() || one.labels?.length || one.ariaLabel))
          .map((one) => one.outerHTML)
    """)
    assert nameless == []


def test_the_key_is_asked_for_and_kept_in_the_tab(chat, script):
    script.key = "right"
    chat.driver.refresh()
    chat.wait(lambda: chat.all("dialog[open]"))
    assert chat.focused().get_attribute("id") == "key"
    chat.keys("wrong\n")
    chat.wait(lambda: chat.text("#key-problem") and chat.one("#key-problem").is_displayed())
    chat.keys("right\n")
    chat.wait(lambda: chat.all("#model option[value=another-model]"))
    chat.ask("Why?")
    assert chat.answer() == ANSWER
    chat.one("#tab-watch").click()
    chat.wait(lambda: chat.text("#watch-state") == "at work")
    assert chat.driver.execute_script("return sessionStorage['engine.key']") == "right"


def test_a_cancelled_key_is_told(chat, script):
    script.key = "right"
    chat.driver.refresh()
    chat.wait(lambda: chat.all("dialog[open]"))
    chat.one("#key-cancel").click()
    assert "API key" in chat.wait(lambda: chat.text("#problem-text"))


def _pixels(chat, name):
    return chat.driver.execute_script(
        "return document.getElementById(arguments[0]).toDataURL()", name
    )


def test_watch_moves(chat, engine):
    chat.one("#tab-watch").click()
    chat.wait(lambda: chat.text("#watch-state") == "at work" and chat.all(".request"))
    names = ["chart-rate", "chart-step", "chart-batch", "chart-running", "blocks"]
    before = {name: _pixels(chat, name) for name in names}
    figures = chat.text("#fig-rate"), chat.text(".request .numbers")
    time.sleep(1.2)
    assert all(_pixels(chat, name) != before[name] for name in names)
    assert (chat.text("#fig-rate"), chat.text(".request .numbers")) != figures
    told = chat.one("#blocks").get_attribute("aria-label")
    words = r"(\d+) in requests, (\d+) shared or kept, (\d+) free"
    assert sum(map(int, re.search(words, told).groups())) == engine.num_blocks
    assert "blocks. Prompts" in chat.text("#tree-note") and chat.one("#tree").is_displayed()


def test_watch_asks_for_nothing_while_it_is_hidden_or_paused(chat, engine):
    def still():
        time.sleep(3 * watch.INTERVAL)
        taken = engine.num_snapshots
        time.sleep(3 * watch.INTERVAL)
        return engine.num_snapshots == taken

    assert engine.num_snapshots == 0
    chat.one("#tab-watch").click()
    chat.wait(lambda: engine.num_snapshots > 2)
    chat.one("#pause").click()
    assert still() and chat.text("#watch-state") == "paused"
    chat.one("#pause").click()
    assert not still()
    chat.one("#tab-chat").click()
    assert still()


def test_watch_tells_why_the_engine_ended_and_comes_back(chat, engine):
    chat.one("#tab-watch").click()
    chat.wait(lambda: chat.text("#watch-state") == "at work")
    engine.error = EngineError("the device is gone")
    chat.wait(lambda: chat.text("#watch-state") == "The engine has ended: the device is gone")
    engine.error = None
    chat.wait(lambda: chat.text("#watch-state") == "at work")


def test_an_idle_engine(chat, engine):
    engine.num_requests = 0
    chat.one("#tab-watch").click()
    chat.wait(lambda: chat.text("#watch-state") == "idle")
    assert chat.one("#no-requests").is_displayed() and not chat.one("#requests").is_displayed()
    assert chat.text("#note-batch") == "nothing to compute"


def test_a_load_can_be_sent(chat, script):
    chat.one("#tab-watch").click()
    chat.one("#send-load").click()
    chat.wait(lambda: len(script.asked) == 4 and chat.one("#send-load").is_enabled())
    prompts = [prompt for asked in script.asked for prompt in asked["prompt"]]
    assert len(set(prompts)) == 8 and len({prompt[:100] for prompt in prompts}) == 1


@pytest.mark.parametrize("view", ["chat", "watch"])
def test_a_phone_scrolls_in_one_direction(chat, script, view):
    chat.emulate(360, 640)
    chat.driver.refresh()
    script.text = "long" * 60 + " words"
    chat.one("#prompt").send_keys("x" * 200)
    chat.one("#send").click()
    chat.wait(chat.answer)
    if view == "chat":
        chat.one("#toggle-settings").click()
    else:
        chat.one("#tab-watch").click()
        chat.wait(lambda: chat.all(".request"))
    wide = chat.driver.execute_script("""
        return [...document.querySelectorAll("html, body, main, .scroller, .settings, .watch")]
          .filter((one) => one.scrollWidth > one.clientWidth && one.clientWidth)
          .map((one) => `${one.className} ${one.scrollWidth} > ${one.clientWidth}`)
    """)
    assert wide == []
    assert chat.driver.execute_script("return innerWidth") == 360


def test_dark_light_and_less_motion(chat):
    def paper():
        return chat.one("body").value_of_css_property("background-color")

    chat.emulate(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    dark = paper()
    chat.one("#tab-watch").click()
    chat.wait(lambda: chat.all(".request"))
    assert chat.one(".state").value_of_css_property("animation-name") == "none"
    before = _pixels(chat, "chart-rate")
    chat.wait(lambda: _pixels(chat, "chart-rate") != before)  # still drawn, with each snapshot
    chat.emulate(prefers_color_scheme="light")
    assert paper() != dark
