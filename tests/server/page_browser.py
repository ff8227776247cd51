"""Debian's Chromium, and the page as a person sees it there."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,800",
)


def chromium_or_skip(folder):
    """Yield a driver, for a fixture; skip the test where there is no browser."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("no chromium and chromedriver on this machine")
    pytest.importorskip("selenium", reason="selenium is not installed")
    driver = start_chromium(folder)
    yield driver
    driver.quit()


def start_chromium(folder):
    """Return a driver of a Chromium that keeps its data in an empty folder."""
    # Here, as a machine without selenium skips the tests in a browser.
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*_ARGUMENTS, f"--user-data-dir={folder}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


class Page:
    """The page as a person sees it, with short names for what the tests do."""

    def __init__(self, driver):
        self.driver = driver

    def one(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def text(self, selector):
        return self.driver.execute_script(
            "return document.querySelector(arguments[0])?.textContent ?? ''", selector
        )

    def wait(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, f"never happened: {condition}"
            time.sleep(0.03)
        return value

    def keys(self, *keys):
        # Here, as a machine without selenium skips the tests in a browser.
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def hover(self, element):
        # Here, as a machine without selenium skips the tests in a browser.
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).move_to_element(element).perform()

    def ask(self, text, until_done=True, seconds=60):
        self.one("#prompt").send_keys(text + "\n")
        if until_done:
            note = ".assistant:last-child .note"
            self.wait(lambda: self.text("#send") == "Send" and self.text(note), seconds)

    def answer(self):
        return self.text(".assistant:last-child > .text")

    def box_of(self, selector):
        """Return the rectangle of the first such element in the window."""
        return self.driver.execute_script(
            "return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", selector
        )

    def focused(self):
        return self.driver.switch_to.active_element

    def emulate(self, width=1200, height=800, **features):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        wanted = [{"name": name.replace("_", "-"), "value": v} for name, v in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})


def axe_or_skip():
    """Return the source of axe-core: npm's in this checkout, or that of `axe-core-python`."""
    own = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
    if own.exists():
        return own.read_text()
    package = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
    return (Path(package.__file__).parent / "axe.min.js").read_text()
