"""A headless Chromium, where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

FLAGS = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync", "disable-dev-shm-usage")
QUIET = ("disable-background-networking", "disable-component-update")
Open = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A WebDriver; the test is skipped where Chromium or its driver is missing."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    found = shutil.which("chromedriver")
    if chromium is None or found is None:
        pytest.skip("no Chromium with its driver: install Debian's chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, *QUIET):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(found))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Any) -> Open:
    """Open a file at a width, light or dark."""

    def open_file(path: Any, width: int = 1200, dark: bool = False) -> Any:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        browser.get_log("performance")  # forgets earlier pages
        browser.get(f"file://{path}")
        return browser

    return open_file
