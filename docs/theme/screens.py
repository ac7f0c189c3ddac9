"""Pictures of the site and of a conformance report in a browser, at a desktop's and a phone's width.

    pip install playwright pillow; make docs; python docs/theme/screens.py REPORT.html

`CHROMIUM` names the browser if Playwright has none of its own. Pictures have a palette of 24 colours, to be small.
"""

from __future__ import annotations

import io
import os
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that logs nothing."""

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


def main(report: str) -> None:
    """Write `docs/pictures/PAGE-WIDTH.png`, and fail for a page that is wider than its window."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=ROOT / "build" / "site"))
    Thread(target=server.serve_forever, daemon=True).start()
    site = f"http://127.0.0.1:{server.server_port}"
    pages = {
        "start": f"{site}/index.html",
        "results": f"{site}/measured.html",
        "report": Path(report).resolve().as_uri(),
    }
    too_wide = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"])
        for kind, (width, height) in WIDTHS.items():
            window = browser.new_page(viewport={"width": width, "height": height})
            for name, address in pages.items():
                window.goto(address)
                window.wait_for_timeout(500)
                if window.evaluate("document.documentElement.scrollWidth") > width:
                    too_wide.append(f"{name}-{kind}")
                shot = Image.open(io.BytesIO(window.screenshot())).convert("RGB")
                small = shot.quantize(24, dither=Image.Dither.NONE)
                small.save(ROOT / "docs" / "pictures" / f"{name}-{kind}.png", optimize=True)
        browser.close()
    server.shutdown()
    if too_wide:
        sys.exit(f"wider than the window: {', '.join(too_wide)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
