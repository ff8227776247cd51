"""The page in a browser: Markdown, the lens, conversations, comparison, sizes, accessibility."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from tests.server.page_browser import Page, axe_or_skip, chromium_or_skip
from tests.server.page_double import ANSWER, Script, Server, SimulatedEngine, build_double

SIZES = [(360, 640), (768, 1024), (1200, 800), (1920, 1080)]
SAMPLE = """\
# Light

It is **very *small***, `code *x*`, ~~no~~, [a link](https://example.org/a_(b)) and snake_case_name.
Second line.

1. one **bold**
2. two
   - nested
   - `more`

| Color | Share |
|:------|------:|
| blue  | 1.00 |
| a \\| b | `x|y` |

> quoted
> lines

```python
def f(x):
    return x ** 2  # <b>
```

Math $a_1 * b_1$ costs $5 or $10.

$$
x = \\frac{1}{2}
$$

---

The end.
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    yield from chromium_or_skip(tmp_path_factory.mktemp("chromium"))


@pytest.fixture
def script():
    return Script(delay=0)


@pytest.fixture
def chat(browser, script):
    server = Server(build_double(script, SimulatedEngine()))
    shown = Page(browser)
    shown.emulate()
    browser.get(server.url)
    shown.wait(lambda: shown.all("#model option[value=another-model]"))
    yield shown
    log = [entry for entry in browser.get_log("browser") if entry["source"] != "network"]
    browser.execute_script("localStorage.clear(); sessionStorage.clear()")
    browser.get("about:blank")
    server.close()
    assert not log  # neither an exception nor a violation of the policy


def store(page, *conversations):
    """Put conversations of (title, messages) into the tab's storage, the last one on screen."""
    page.driver.execute_script(
        """
        const entries = arguments[0].map(([title, messages], at) => {
          sessionStorage.setItem(`engine.conversation.c${at}`, JSON.stringify(messages));
          return { id: `c${at}`, title, time: at };
        });
        sessionStorage.setItem("engine.conversations", JSON.stringify(entries.reverse()));
        dispatchEvent(new Event("pagehide"));
        sessionStorage.setItem("engine.current", entries[0].id);
        """,
        conversations,
    )
    page.driver.refresh()
    page.wait(lambda: page.all("#model option[value=another-model]"))


def turns(count, text="All colors of light meet the air.\n\n" * 3):
    """Return `count` messages, alternating between the user's and the model's."""
    answer = {"role": "assistant", "content": text, "reasoning": "", "pieces": [], "thoughts": []}
    answer |= {"reason": "stop", "stats": {}, "ids": [], "calls": []}
    return [{"role": "user", "content": f"Question {i}?"} if i % 2 == 0 else answer
            for i in range(count)]  # fmt: skip


# ---- Markdown


def rendered(page, sources):
    """Return the HTML of each source."""
    return page.driver.execute_async_script(
        """
        const [sources, done] = arguments;
        import("/static/rich.js").then(({ RichText }) => done(sources.map((source) => {
          const element = document.createElement("div");
          new RichText(element, []).draw(source);
          return element.innerHTML;
        })));
        """,
        sources,
    )


MARKDOWN = {
    "plain text": "<p>plain text</p>",
    "two\nlines\n\nand *more*": "<p>two\nlines</p><p>and <em>more</em></p>",
    "**a *b* c** __d__ ***e***": "<p><strong>a <em>b</em> c</strong> <strong>d</strong> "
    "<strong><em>e</em></strong></p>",
    "**bold *it***": "<p><strong>bold <em>it</em></strong></p>",
    "2 * 3 * 4, a_b_c, **open": "<p>2 * 3 * 4, a_b_c, **open</p>",
    r"\*no\* `a *b* \`": r"<p>*no* <code>a *b* \</code></p>",
    "``a ` b``": "<p><code>a ` b</code></p>",
    "## Two #\n# One\n### Three": '<h3 class="heading level-2">Two</h3>'
    '<h3 class="heading level-1">One</h3><h4 class="heading level-3">Three</h4>',
    "#no heading": "<p>#no heading</p>",
    "- a\n- b\n\n  c\n": '<ul><li><span class="item">a</span></li>'
    '<li><span class="item">b</span><p>c</p></li></ul>',
    "3. c\n4. d": '<ol start="3"><li><span class="item">c</span></li>'
    '<li><span class="item">d</span></li></ol>',
    "It was in\n1984. Yes": "<p>It was in\n1984. Yes</p>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "a\n***\nb": "<p>a</p><hr><p>b</p>",
    "$5 and $10": "<p>$5 and $10</p>",
    r"$a_1*b*$ \(c_2\)": '<p><span class="math">a_1*b*</span> <span class="math">c_2</span></p>',
    "\\[\na_b\n\\]": '<p class="math">a_b</p>',
    "$$\nnever closed\n\nb": "<p>$$\nnever closed</p><p>b</p>",
    "<b>x</b> &amp; <script>": "<p>&lt;b&gt;x&lt;/b&gt; &amp;amp; &lt;script&gt;</p>",
    "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
    "[x](data:text/html,a) [y](/z)": "<p>[x](data:text/html,a) [y](/z)</p>",
    "https://a.b/c. (http://d.e)": '<p><a href="https://a.b/c" target="_blank" '
    'rel="noopener noreferrer">https://a.b/c</a>. (<a href="http://d.e/" target="_blank" '
    'rel="noopener noreferrer">http://d.e</a>)</p>',
    "(https://a.b/c_(d))": '<p>(<a href="https://a.b/c_(d)" target="_blank" '
    'rel="noopener noreferrer">https://a.b/c_(d)</a>)</p>',
    '![*pic*](https://a.b/c.png "t")': '<p><a href="https://a.b/c.png" target="_blank" '
    'rel="noopener noreferrer"><em>pic</em></a></p>',
    "|a|\n|-|-|": "<p>|a|\n|-|-|</p>",
    "in [0, 1), see [x](https://a.b)": '<p>in [0, 1), see <a href="https://a.b/" target="_blank" '
    'rel="noopener noreferrer">x</a></p>',
    "**https://a.b**": '<p><strong><a href="https://a.b/" target="_blank" '
    'rel="noopener noreferrer">https://a.b</a></strong></p>',
}


def test_markdown_becomes_elements(chat):
    found = rendered(chat, list(MARKDOWN))
    assert dict(zip(MARKDOWN, found, strict=True)) == MARKDOWN


def test_fences_and_tables(chat, script):
    script.text = SAMPLE
    chat.ask("Show me.")
    assert chat.text(".code-head span") == "python"
    assert chat.text(".code code") == "def f(x):\n    return x ** 2  # <b>"
    cells = [cell.text for cell in chat.all(".table :is(th, td)")]
    assert cells == ["Color", "Share", "blue", "1.00", "a | b", "x|y"]
    assert chat.one(".table td.right").value_of_css_property("text-align") == "right"
    copy = chat.one(".code-head button")
    copy.click()
    chat.wait(lambda: copy.text == "Copied")
    chat.one("#prompt").send_keys("\ue009v\ue000")  # Control+V
    assert chat.one("#prompt").get_attribute("value") == chat.text(".code code")
    links = chat.all(".text a")
    assert [one.get_attribute("href") for one in links] == ["https://example.org/a_(b)"]
    assert links[0].get_attribute("rel") == "noopener noreferrer"


def test_hostile_markdown_ends(chat):
    """Deep nesting and marks without an end give text, not an exception or a stack overflow."""
    sources = [
        "x " + mark * 5000
        for mark in ("*a ", "[", "` ", "``", "$", "_a", "|", "![](", "\\(", "https://a)")
    ]
    sources += ["**a " * 3000 + "b**" * 3000, "> " * 400 + "x", "- " * 400 + "x", "~~~" * 400]
    for source, html in zip(sources, rendered(chat, sources), strict=True):
        assert "x" in html or source[0] in html or "<code>" in html


# The first lines of each could be another block: a list, a table, a fence.
GROWING = [SAMPLE, "\\[\na\n+ b\n\\]\n", "$$\n```\n$$", "1. a\n-|-\n", "1. a\nb|c\n-|-\n1|2"]


@pytest.mark.parametrize("source", GROWING, ids=range(len(GROWING)))
def test_an_answer_that_grows_is_drawn_as_a_whole_one(chat, source):
    whole, grown = chat.driver.execute_async_script(
        """
        const [source, done] = arguments;
        import("/static/rich.js").then(({ RichText }) => {
          const html = (steps) => {
            const element = document.createElement("div");
            const text = new RichText(element, []);
            for (let end = steps; end < source.length; end += steps) {
              text.draw(source.slice(0, end));
            }
            text.draw(source);
            return element.innerHTML;
          };
          done([html(source.length), html(1)]);
        });
        """,
        source,
    )
    assert grown == whole and len(whole) > len(source)


def test_tokens_stay_in_markdown_and_the_answer_can_be_shown_raw(chat, script):
    script.text = SAMPLE
    chat.ask("Show me.")
    words = [word.text for word in chat.all(".assistant .token")]
    assert "small" in words and "x" in words and "return" in words
    [small] = [word for word in chat.all(".assistant em .token") if word.text == "small"]
    chat.hover(small)
    assert "**very" not in chat.text(".assistant .text")
    assert "*small***,, chosen" in chat.text("#alternatives .chosen .word").replace("·", "")
    raw = chat.one(".assistant button[aria-label='Raw text of the answer']")
    raw.click()
    assert raw.get_attribute("aria-pressed") == "true" and chat.answer() == SAMPLE
    words = chat.all(".assistant .token")
    chat.hover(next(word for word in words if word.text == "*small***,"))
    assert chat.one("#alternatives").is_displayed()
    raw.click()
    assert chat.text(".assistant h3") == "Light"


# ---- the lens


def test_a_click_on_a_token_shows_what_each_layer_would_have_said(chat, script):
    chat.one("#system").send_keys("Be brief.")
    chat.ask("Why?")
    chat.all(".assistant .token")[9].click()
    chat.wait(lambda: chat.all("#lens-grid td"))
    [asked] = script.lenses
    assert asked["token_ids"] == list(range(10)) and asked["num_tokens"] == 8
    assert [line["content"] for line in asked["messages"]] == ["Be brief.", "Why?"]
    assert asked["model"] == "double-1b"
    assert chat.text("#lens-title").endswith("“·air”")
    assert chat.text("#lens-words") == "“·air” is the first choice from layer 9 of 12 on."
    rows = chat.all("#lens-grid tr")
    assert len(rows) == 1 + 12 and len(rows[1].find_elements("css selector", "td")) == 8
    assert rows[1].text.split()[0] == "12" and rows[-1].text.split()[0] == "1"
    assert chat.text("#lens-top h3") == "Layer 12"
    assert chat.text("#lens-top .chosen .word") == "·air, chosen"
    scale = chat.driver.execute_script(
        "return [...document.querySelectorAll('#lens-grid tr')].slice(1).map("
        "(row) => parseInt(row.lastChild.style.getPropertyValue('--p')))"
    )
    assert scale == sorted(scale, reverse=True) and scale[0] > 50


def test_the_lens_by_keyboard(chat):
    from selenium.webdriver.common.keys import Keys

    chat.ask("Why?")
    chat.all(".assistant .token")[0].send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    chat.keys(Keys.ENTER)
    chat.wait(lambda: chat.all("#lens-grid td"))
    chat.one("#lens-grid td[tabindex='0']").send_keys(Keys.ARROW_DOWN, Keys.ARROW_LEFT)
    assert chat.text("#lens-top h3") == "Layer 11" and chat.focused().tag_name == "td"
    chat.keys(Keys.ESCAPE)
    assert not chat.one("#lens").is_displayed()
    assert chat.focused().text == "all"


def test_the_second_tap_on_a_word_opens_the_lens(chat):
    chat.ask("Why?")
    box = chat.box_of(".assistant .token:nth-of-type(6)")
    place = {"x": box["left"] + 5, "y": box["top"] + 5}
    send = chat.driver.execute_cdp_cmd

    def tap():
        send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [place]})
        send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})

    send("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        tap()
        chat.wait(lambda: chat.one("#alternatives").is_displayed())
        assert "Tap again" in chat.text("#alternatives .hint")
        assert not chat.one("#lens").is_displayed()
        tap()
        chat.wait(lambda: chat.one("#lens").is_displayed())
    finally:
        send("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_a_model_without_a_lens_has_none_on_the_page(chat, script):
    script.num_layers = 0
    chat.driver.refresh()
    chat.wait(lambda: chat.all("#model option[value=another-model]"))
    chat.ask("Why?")
    word = chat.all(".assistant .token")[3]
    chat.hover(word)
    assert "layer" not in chat.text("#alternatives")
    word.click()
    assert not chat.one("#lens").is_displayed() and not script.lenses


# ---- conversations


def titles(chat):
    return [one.text for one in chat.all("#conversation-list .choose")]


def test_conversations_are_listed_opened_and_deleted(chat, script):
    chat.one("#toggle-sidebar").click()
    chat.ask("First?")
    chat.one("#sidebar-new").click()
    assert not chat.all(".messages > li")
    chat.ask("Second?")
    assert titles(chat) == ["Second?", "First?"]
    chat.all("#conversation-list .choose")[1].click()
    assert chat.text(".user > .text") == "First?" and chat.answer() == ANSWER
    assert chat.text("#conversation-list [aria-current=true]") == "First?"
    chat.ask("Third?")
    assert titles(chat) == ["First?", "Second?"] and len(script.asked[2]["messages"]) == 3
    delete = chat.one("#conversation-list li:last-child .small")
    delete.click()
    assert titles(chat) == ["First?", "Second?"] and delete.text == "Delete?"
    delete.click()
    assert titles(chat) == ["First?"]
    chat.driver.refresh()
    chat.wait(lambda: titles(chat) == ["First?"])


def test_conversations_are_kept_on_the_device_only_if_asked_for(chat):
    local = "return Object.keys(localStorage).filter((key) => key !== 'engine.keep').length"
    chat.ask("First?")
    chat.one("#toggle-sidebar").click()
    assert chat.driver.execute_script("return localStorage.length") == 0
    chat.one("#keep").click()
    assert chat.driver.execute_script(local) == 2
    chat.driver.execute_script("sessionStorage.clear()")
    chat.driver.refresh()
    chat.wait(lambda: chat.all("#conversation-list .choose"))
    chat.one("#conversation-list .choose").click()
    assert chat.answer() == ANSWER
    chat.one("#keep").click()
    assert chat.driver.execute_script("return localStorage.length") == 0
    assert titles(chat) == ["First?"]


def test_a_conversation_without_room_on_the_device_keeps_no_other_one_out(chat):
    store(chat, ("Large", turns(2)), ("Small", turns(2)))
    chat.driver.execute_script("""
        const setItem = Storage.prototype.setItem;
        Storage.prototype.setItem = function (key, value) {
          if (key === "engine.conversation.c0") throw new DOMException("full");
          setItem.call(this, key, value);
        };
    """)
    chat.one("#toggle-sidebar").click()
    chat.one("#keep").click()
    assert chat.text("#problem-text").endswith("some were not kept.")
    assert titles(chat) == ["Small"]


def test_a_message_is_edited_and_sent_again(chat, script):
    from selenium.webdriver.common.keys import Keys

    chat.ask("Why?")
    chat.ask("And at night?")
    chat.hover(chat.one(".user"))
    chat.one(".user button[aria-label='Edit the message and send it again']").click()
    box = chat.focused()
    assert box.get_attribute("value") == "Why?"
    box.send_keys(Keys.ESCAPE)
    assert chat.text(".user > .text") == "Why?" and len(chat.all(".messages > li")) == 4
    chat.hover(chat.one(".user"))
    chat.one(".user button[aria-label='Edit the message and send it again']").click()
    chat.focused().send_keys(" Really?", Keys.ENTER)
    chat.wait(lambda: len(script.asked) == 3 and chat.text("#send") == "Send")
    assert [one["content"] for one in script.asked[2]["messages"]] == ["Why? Really?"]
    assert len(chat.all(".messages > li")) == 2


def test_a_refused_edit_or_answer_leaves_the_conversation_as_it_was(chat, script):
    from selenium.webdriver.common.keys import Keys

    chat.ask("Why?")
    script.error = (429, "8 requests wait", {"Retry-After": "3"})
    chat.one(".assistant button[aria-label='Again: generate another answer']").click()
    chat.wait(lambda: chat.one("#retry").is_displayed() and chat.answer() == ANSWER)
    chat.hover(chat.one(".user"))
    chat.one(".user button[aria-label='Edit the message and send it again']").click()
    chat.focused().send_keys("!", Keys.ENTER)
    chat.wait(lambda: len(script.asked) == 3 and chat.one("#retry").is_displayed())
    chat.wait(lambda: chat.all(".edit textarea"))
    assert chat.one(".edit textarea").get_attribute("value") == "Why?!"
    assert chat.answer() == ANSWER
    script.error = None
    chat.one("#retry").click()
    chat.wait(lambda: chat.text(".user > .text") == "Why?!" and chat.answer() == ANSWER)
    assert len(chat.all(".messages > li")) == 2


def test_a_conversation_is_exported(chat, script, tmp_path):
    command = {"behavior": "allow", "downloadPath": str(tmp_path)}
    chat.driver.execute_cdp_cmd("Browser.setDownloadBehavior", command)
    script.thoughts = "Hm."
    chat.ask("Why is it?")
    chat.one("#toggle-sidebar").click()
    chat.one("#export-json").click()
    chat.one("#export-markdown").click()
    data, text = tmp_path / "why-is-it.json", tmp_path / "why-is-it.md"
    chat.wait(lambda: data.exists() and text.exists() and text.stat().st_size)
    found = json.loads(data.read_text())
    assert found["title"] == "Why is it?" and found["messages"] == [
        {"role": "user", "content": "Why is it?"},
        {"role": "assistant", "content": ANSWER, "reasoning_content": "Hm.", "model": "double-1b"},
    ]
    assert text.read_text() == (
        f"# Why is it?\n\n## You\n\nWhy is it?\n\n## double-1b\n\n> Hm.\n\n{ANSWER}\n"
    )


def test_calls_are_folded_and_their_results_sent(chat, script):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    chat.one("#tools").send_keys("[nonsense")
    chat.ask("Weather?", until_done=False)
    assert chat.text("#problem-text").startswith("Tools must be a JSON array")
    chat.one("#tools").clear()
    chat.one("#tools").send_keys(json.dumps(tools))
    script.text, script.calls = "", [("weather", '{"city": "Paris"}')]
    chat.one("#prompt").clear()
    chat.ask("Weather?")
    assert script.asked[0]["tools"] == tools
    assert chat.text(".call summary") == "Call of weather"
    assert not chat.one(".call pre").is_displayed()
    chat.one(".call summary").click()
    assert chat.text(".call pre") == '{\n  "city": "Paris"\n}'
    assert chat.one("#prompt").get_attribute("placeholder") == "Result of weather"
    script.text, script.calls = "It rains.", []
    chat.one("#prompt").send_keys("rain\n")
    chat.wait(lambda: chat.answer() == "It rains.")
    call = {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert script.asked[1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call-0", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "call-0"},
    ]
    assert chat.one("#prompt").get_attribute("placeholder") == "Message"


# ---- comparison and settings


def test_two_models_and_settings_side_by_side(chat, script):
    chat.ask("Before?")
    chat.one("#compare").click()
    chat.one("#model-b").send_keys("another-model")
    chat.one("#temperature").send_keys("1.5")
    chat.ask("Why?")
    sent = {asked["model"]: asked for asked in script.asked[1:]}
    assert "temperature" not in sent["double-1b"] and sent["another-model"]["temperature"] == 1.5
    labels = [one.text for one in chat.all(".assistant .label")]
    assert labels == [
        "A · double-1b · temperature default",
        "B · another-model · temperature 1.5",
    ]
    first, second = (chat.box_of(f".messages > .side-{side}") for side in "ab")
    assert first["top"] == second["top"] and first["right"] < second["left"]
    script.text = "Yes."
    chat.ask("Again?")
    for asked in script.asked[3:5]:  # each side goes on with its own answers
        roles = [line["role"] for line in asked["messages"]]
        own = {"double-1b": ["assistant"], "another-model": []}[asked["model"]]
        assert roles == ["user", *own, "user", "assistant", "user"]
    script.refused_models = ["another-model"]
    chat.ask("Once more?", until_done=False)
    chat.wait(lambda: chat.text("#send") == "Send" and chat.one("#retry").is_displayed())
    sides = [one.get_attribute("class") for one in chat.all(".messages > li")]
    assert sides[-2:] == ["user", "assistant side-a"]
    script.refused_models = []
    chat.one("#retry").click()
    chat.wait(lambda: len(chat.all(".messages > .side-b")) == 3 and chat.text("#send") == "Send")
    chat.one("#side-a").click()
    assert chat.one("#temperature").get_attribute("value") == ""
    chat.one("#compare").click()
    chat.ask("Alone?")
    assert len(script.asked) == 9 and script.asked[8]["model"] == "double-1b"


def test_the_models_own_defaults_are_shown(chat, script):
    assert chat.one("#temperature").get_attribute("placeholder") == "default"
    script.defaults = {"temperature": 0.7, "top_k": 20}
    chat.driver.refresh()
    chat.wait(lambda: chat.one("#temperature").get_attribute("placeholder") == "0.7")
    assert chat.one("#top_k").get_attribute("placeholder") == "20"
    assert chat.one("#top_p").get_attribute("placeholder") == "default"
    chat.ask("Why?")
    assert "temperature" not in script.asked[0]
    chat.one("#more summary").click() if not chat.one("#top_k").is_displayed() else None
    chat.one("#top_k").send_keys("0")  # the whole vocabulary, whatever the default
    chat.ask("Why?")
    assert script.asked[1]["top_k"] == 0


def test_the_key_button_is_there_only_if_the_server_has_keys(chat, script):
    assert not chat.one("#change-key").is_displayed()
    script.key = "right"
    chat.driver.refresh()
    chat.wait(lambda: chat.all("dialog[open]"))
    chat.keys("right\n")
    chat.wait(lambda: chat.all("#model option[value=another-model]"))
    assert chat.one("#change-key").is_displayed()


# ---- sizes and accessibility


@pytest.mark.parametrize("size", SIZES, ids="{0[0]}x{0[1]}".format)
def test_the_page_is_as_high_as_the_window(chat, script, size):
    width, height = size
    chat.emulate(width, height)
    store(chat, ("Long", turns(200)))
    assert len(chat.all(".messages > li")) == 200
    script.text = SAMPLE
    chat.ask("The last one?")
    found = chat.driver.execute_script("""
        const { scrollHeight, scrollWidth } = document.documentElement;
        const scroller = document.getElementById("scroller");
        return { scrollHeight, scrollWidth, inner: scroller.scrollHeight,
                 left: scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight };
    """)
    assert found["scrollHeight"] <= height and found["scrollWidth"] <= width
    assert found["inner"] > 10 * height and found["left"] <= 1  # the list scrolls, to its end
    composer, note = chat.box_of("#composer"), chat.box_of(".assistant:last-child .note")
    assert composer["bottom"] <= height and note["bottom"] <= composer["top"]


def test_settings_leave_a_phone_most_of_its_screen(chat):
    chat.emulate(360, 640)
    chat.driver.refresh()
    chat.wait(lambda: chat.all("#model option[value=another-model]"))
    assert not chat.one("#settings").is_displayed()
    chat.one("#toggle-settings").click()
    assert chat.box_of("#settings")["height"] < 0.4 * 640
    assert chat.box_of("#composer")["bottom"] <= 640
    chat.one("#more summary").click()
    assert chat.box_of("#settings")["height"] < 0.4 * 640
    assert chat.box_of("#scroller")["height"] > 0.3 * 640


def violations(chat, source):
    """Return what axe-core finds: rule, and the elements."""
    chat.driver.execute_script(source + "; window.axe = axe;")
    found = chat.driver.execute_async_script("""
        const done = arguments[0];
        axe.run(document, { resultTypes: ["violations"] }).then(({ violations }) => done(
          violations.map(({ id, nodes }) => [
            id, nodes.map((node) => [node.html, node.failureSummary]),
          ])
        ), (error) => done([["failed", String(error)]]));
    """)
    return found


@pytest.mark.parametrize(
    ("size", "scheme"), list(zip(SIZES, ["light", "dark"] * 2, strict=True)), ids=str
)
def test_axe_finds_nothing(chat, script, size, scheme):
    source = axe_or_skip()
    chat.emulate(*size, prefers_color_scheme=scheme)
    chat.driver.refresh()
    chat.wait(lambda: chat.all("#model option[value=another-model]"))
    assert violations(chat, source) == []  # the welcome
    script.text, script.thoughts = SAMPLE, "Hm."
    script.calls = [("weather", "{}")]
    chat.ask("Why?")
    if not chat.one("#settings").is_displayed():
        chat.one("#toggle-settings").click()
    chat.one("#compare").click()
    chat.one("#toggle-sidebar").click()
    chat.driver.execute_script("document.querySelector('.assistant > .text .token').focus()")
    assert chat.one("#alternatives").is_displayed()
    assert violations(chat, source) == []  # an answer, alternatives, the settings, the sidebar
    if chat.one("#sidebar-close").is_displayed():
        chat.one("#sidebar-close").click()
    chat.driver.execute_script("document.querySelector('.assistant .token').click()")
    chat.wait(lambda: chat.all("#lens-grid td"))
    assert violations(chat, source) == []
    chat.one("#lens-close").click()
    chat.one("#tab-watch").click()
    chat.wait(lambda: chat.all(".request"))
    chat.one("#pause").click()
    assert violations(chat, source) == []
