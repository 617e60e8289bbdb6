"""Pictures of every page of `retrain ui`, for docs/ui.md.

    retrain ui logs --port 8571 &
    python scripts/ui_pictures.py http://127.0.0.1:8571 docs/images

Needs playwright, pillow and a Chromium (`--chromium PATH`), and logs with the campaigns quickstart and gtpo.
"""

import argparse
from pathlib import Path

RUN = "logs/quickstart/runs/grpo+none_s1"
PAGES = {
    "campaigns": "/",
    "campaign": "/campaign/logs/gtpo",
    "metrics": "/metrics/logs/gtpo",
    "problems": "/problems/logs/quickstart",
    "prompt": "/prompt/logs/quickstart",
    "rollouts": "/rollouts/logs/quickstart",
    "tokens": f"/tokens/{RUN}",
    "timeline": f"/timeline/{RUN}",
    "lora": "/lora/logs/quickstart",
    "compare": "/compare/logs/quickstart",
    "notes": "/notes/logs/gtpo",
}
WIDTH, HEIGHT = 1280, 860
COLOURS = 96
SETTLED_MS = 2_500


def main() -> None:
    """Take them all."""
    from PIL import Image
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("out", type=Path)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--only", nargs="*", default=list(PAGES))
    given = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.on("console", lambda message: print(message.type, message.text))
        for name in given.only:
            page.goto(given.address.rstrip("/") + PAGES[name])
            page.wait_for_timeout(SETTLED_MS)
            path = given.out / f"ui_{name}.png"
            page.screenshot(path=path)
            Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
