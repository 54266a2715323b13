"""A real JupyterLab over a copy of the course, and a headless Chromium that looks at it.

Screenshots stay in the ignored folder .jfa/screenshots.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import ROOT, copy_course

SCREENSHOTS = ROOT / ".jfa" / "screenshots"
START_SECONDS = 90
TOKEN = "a-token-of-the-tests"


def find_chromium() -> str | None:
    """A Chromium on PATH; Playwright's own download is not used."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass
class Lab:
    """A running server: the course's copy it serves, a home folder that must stay empty, its address."""

    course: Path
    home: Path
    url: str

    def page(self, path: str = "") -> str:
        """The address of a file opened in the whole JupyterLab, or of where `jfa lab` lands."""
        return f"{self.url}/{'lab/tree/' + path if path else ''}?token={TOKEN}"


@pytest.fixture(scope="package")
def lab(tmp_path_factory):
    """`jfa lab` over a copy of the course, as a learner starts it, with an empty home folder."""
    course, home = copy_course(tmp_path_factory.mktemp("course")), tmp_path_factory.mktemp("home")
    port = _free_port()
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "XDG", "PYTEST", "MPL"))
    }
    env |= {"HOME": str(home), "PYTHONPATH": str(course), "JFA_COURSE": str(course)}
    options = ["--no-browser", f"--port={port}", f"--IdentityProvider.token={TOKEN}"]
    options.append("--LabApp.expose_app_in_browser=True")  # window.jupyterapp: the tests ask the notebook's model
    # Should the tests be killed, what they started ends by itself.
    options += ["--MappingKernelManager.cull_idle_timeout=300", "--MappingKernelManager.cull_interval=60"]
    options += ["--ServerApp.shutdown_no_activity_timeout=300"]
    command = [sys.executable, "-m", "jfa", "lab", *options]
    log = course / "lab.log"
    with open(log, "w") as output:
        process = subprocess.Popen(command, cwd=course, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            _wait_for_server(course, process, log)
            yield Lab(course, home, f"http://127.0.0.1:{port}")
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait_for_server(course: Path, process: subprocess.Popen, log: Path) -> None:
    """The server writes what it listens on into its runtime folder once it is up."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for file in (course / ".jfa" / "jupyter" / "runtime").glob("jpserver-*.json"):
            if file.stat().st_size and json.loads(file.read_text()).get("port"):
                return
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="package")
def browser():
    """Headless Chromium without its own background traffic."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    flags = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--no-first-run"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, request):
    """A fresh page; a screenshot named after the test is kept when it ends, however it ends."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(120_000)
    yield page
    save_screenshot(page, "end_of_" + request.node.name)
    page.close()


@pytest.fixture
def screenshot(page):
    """``screenshot(name)`` keeps a picture for a person to look at."""
    return lambda name: save_screenshot(page, name)


def save_screenshot(page, name: str) -> None:
    """Write .jfa/screenshots/NAME.png."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}.png")
