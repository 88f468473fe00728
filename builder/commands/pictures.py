"""``python -m builder.commands.pictures``: take the two pictures that the README opens with."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from builder.bench.app import running_explorer
from builder.bench.chromium import launched, open_page
from builder.bench.local_server import HOST, serve_folder

FAMILY = "qwen3_next"
PROMPT = "In the beginning God created the heaven and the earth. In the beginning God created"
ASSETS = Path("site/assets")
_WIDTH, _HEIGHT = 1280, 860


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m builder.commands.pictures", description="Take the README's pictures."
    )
    parser.add_argument("--site", type=Path, default=Path("public"), help="the built site")
    site = parser.parse_args(argv).site
    if not (site / "families" / FAMILY / "index.html").is_file():
        print(f"{site} has no page of {FAMILY}: run `make site` first.", file=sys.stderr)
        return 2
    ASSETS.mkdir(parents=True, exist_ok=True)
    server = serve_folder(site)
    with launched() as browser:
        address = f"http://{HOST}:{server.server_address[1]}/families/{FAMILY}/index.html"
        page = open_page(browser, address, width=_WIDTH, height=_HEIGHT).page
        page.wait_for_selector("block-diagram svg")
        page.screenshot(path=ASSETS / "readme-page.png")
        with running_explorer(f"specimen:{FAMILY}", PROMPT) as address:
            page = open_page(
                browser, f"{address}?tab=attention&block=3", width=_WIDTH, height=_HEIGHT
            ).page
            page.wait_for_selector("[data-card=attention_one] canvas", timeout=60_000)
            page.wait_for_timeout(1500)  # figures fade in
            page.screenshot(path=ASSETS / "readme-explorer.png")
    server.shutdown()
    server.server_close()
    print(f"Taken: {ASSETS / 'readme-page.png'}, {ASSETS / 'readme-explorer.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
