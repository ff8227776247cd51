"""Draw the pictures of docs/page.md; run by hand: python -m tests.server.page_screenshots."""

from __future__ import annotations

import io
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.server.page_browser import Page, start_chromium
from tests.server.page_double import Script, Server, SimulatedEngine, build_double

FOLDER = Path(__file__).parents[2] / "docs" / "img"
DESKTOP, TALL, PHONE = (1040, 640), (1040, 1060), (360, 700)


def _chat(page, size, scheme):
    page.emulate(*size, prefers_color_scheme=scheme)
    page.driver.refresh()
    page.one("#new-chat").click()
    page.ask("Why is the sky blue?")
    page.hover(page.all(".assistant .token")[23])


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
    """Take each picture from the server double."""
    server = Server(build_double(Script(), SimulatedEngine()))
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
        _watch(page, TALL, "light", 40)
        _save(page, "page-watch-light")
        _watch(page, TALL, "dark", 1)
        _save(page, "page-watch-dark")
        _watch(page, PHONE, "dark", 1)
        _save(page, "page-phone-watch")
        driver.quit()
    server.close()


if __name__ == "__main__":
    main()
