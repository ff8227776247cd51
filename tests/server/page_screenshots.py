"""Draw the pictures of docs/page.md; run by hand: python -m tests.server.page_screenshots."""

from __future__ import annotations

import asyncio
import io
import tempfile
import time
from pathlib import Path

from PIL import Image

from engine.async_engine import AsyncEngine
from engine.server.app import build_app
from engine.server.server_config import ServerConfig
from tests.server.page_browser import Page, start_chromium
from tests.server.page_double import Script, Server, SimulatedEngine, build_double

FOLDER = Path(__file__).parents[2] / "docs" / "img"
DESKTOP, WIDE, TALL, PHONE = (1040, 640), (1360, 760), (1040, 1060), (360, 700)
DEFAULTS = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
ANSWER = """\
Sunlight holds **all colors**. On its way through the air it meets molecules, which scatter blue \
light far more than red:

| Color | Wavelength | Scattered |
|:------|-----------:|----------:|
| blue  | 450 nm     | 6 times   |
| red   | 700 nm     | once      |

So blue reaches your eyes from every side, and the sky is blue:

```python
scattered = 1 / wavelength**4
```
"""


def _chat(page, size, scheme):
    page.emulate(*size, prefers_color_scheme=scheme)
    page.driver.execute_script("sessionStorage.clear()")
    page.driver.get("about:blank")
    page.driver.back()
    page.ask("Why is the sky blue?")
    page.hover(_word(page))


def _word(page, text="scatter"):
    return next(word for word in page.all(".assistant .token") if word.text == text)


def _lens(page, engine):
    """Look into SmolLM2's layers: only a real model's picture tells something."""
    server = Server(build_app(engine, ServerConfig(served_model_name=("smollm2",))))
    page.emulate(*TALL, prefers_color_scheme="light")
    page.driver.get(server.url)
    page.wait(lambda: page.all("#model option[value=smollm2]"))
    page.one("#temperature").send_keys("0")
    page.one("#max_tokens").send_keys("8")
    page.ask("What is the capital of France?")
    _word(page, "Paris").click()
    page.wait(lambda: page.all("#lens-grid td"))
    _save(page, "page-lens")
    page.driver.get("about:blank")
    server.close()


def _compare(page, scheme):
    page.emulate(*WIDE, prefers_color_scheme=scheme)
    page.driver.refresh()
    page.one("#new-chat").click()
    page.one("#toggle-sidebar").click()
    for question in ("What is the capital of France?", "Write four lines about the sea."):
        page.ask(question)
        page.one("#sidebar-new").click()
    page.one("#compare").click()
    page.one("#temperature").send_keys("1.5")
    page.ask("Why is the sky blue?")
    page.one("#compare").click()


def _watch(page, size, scheme, seconds):
    page.emulate(*size, prefers_color_scheme=scheme)
    page.one("#tab-watch").click()
    page.driver.execute_script("document.activeElement.blur()")
    time.sleep(seconds)


def _save(page, name):
    time.sleep(0.5)
    picture = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    small = picture.quantize(256, dither=Image.Dither.NONE)  # a third of the bytes
    small.save(FOLDER / f"{name}.png", optimize=True)


def main():
    """Take each picture from the server double, the lens from SmolLM2."""
    script = Script(text=ANSWER, num_layers=16, defaults=DEFAULTS)
    server = Server(build_double(script, SimulatedEngine()))
    with tempfile.TemporaryDirectory() as folder:
        driver = start_chromium(folder)
        page = Page(driver)
        driver.get(server.url)
        page.wait(lambda: page.all("#model option[value=another-model]"))
        for name, size, scheme in (
            ("page-chat-light", DESKTOP, "light"),
            ("page-chat-dark", DESKTOP, "dark"),
            ("page-phone", PHONE, "light"),
        ):
            _chat(page, size, scheme)
            _save(page, name)
        _compare(page, "dark")
        _save(page, "page-compare")
        _watch(page, TALL, "light", 40)
        _save(page, "page-watch-light")
        _watch(page, TALL, "dark", 1)
        _save(page, "page-watch-dark")
        _watch(page, PHONE, "dark", 1)
        _save(page, "page-phone-watch")
        engine = AsyncEngine.from_name("smollm2", device="cpu", max_model_len=512)
        _lens(page, engine)
        driver.quit()
    server.close()
    asyncio.run(engine.close())


if __name__ == "__main__":
    main()
