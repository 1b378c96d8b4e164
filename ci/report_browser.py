#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Opens a page of `tandem report` in headless Chromium, as a desk and as a phone show it, by day, by night and on paper.

Nothing may be logged to the console or loaded from anywhere, nothing may be wider than the screen, and every chart must be drawn with
text that can still be read. Needs chromium, chromium-driver and python3-selenium of Debian; without them it ends with status 77.

    ci/report_browser.py PAGE.html [--screenshots FOLDER]
"""
import argparse
import base64
import pathlib
import shutil
import sys

SKIPPED = 77
VIEWS = [(1280, 800, "light"), (1280, 800, "dark"), (360, 740, "light"), (360, 740, "dark")]
LEAST_TEXT_PIXELS = 7.5

MEASURE = """
const page = document.documentElement;
const box = element => element.getBoundingClientRect();
const svgs = [...document.querySelectorAll('svg')];
// Whatever does not scroll in a box of its own.
const inScroll = element => element.closest('.scroll') !== null;
const wide = [...document.body.querySelectorAll('*')].filter(e => !inScroll(e) && !e.closest('svg') && box(e).right > page.clientWidth + 1);
return {
  scroll: page.scrollWidth, client: page.clientWidth,
  charts: svgs.length,
  empty: svgs.filter(s => box(s).width < 100 || box(s).height < 60 || s.querySelectorAll('path, use, polygon').length < 3).length,
  unlabelled: svgs.filter(s => !s.getAttribute('aria-label')).length,
  text: Math.min(...svgs.flatMap(s => [...s.querySelectorAll('text')].map(t => box(t).height)).filter(h => h > 0)),
  loaded: performance.getEntriesByType('resource').map(e => e.name),
  images: [...document.images].filter(i => !i.complete || i.naturalWidth === 0).length,
  ids: [...document.querySelectorAll('[id]')].map(e => e.id).filter((id, i, all) => all.indexOf(id) !== i),
  wide: wide.slice(0, 5).map(e => e.outerHTML.slice(0, 120)),
  background: getComputedStyle(document.body).backgroundColor,
  parts: document.querySelectorAll('h2').length,
};
"""


def open_browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(service=Service(shutil.which("chromedriver")), options=options)


def problems_of(found, width, theme, logged):
    """What is wrong with the page as one view shows it."""
    problems = [f"console: {entry['message']}" for entry in logged]
    if found["scroll"] > found["client"]:
        problems.append(f"scrolls sideways: {found['scroll']} of {found['client']} pixels; {found['wide']}")
    if found["client"] != width:
        problems.append(f"is {found['client']} pixels wide, not {width}")
    if found["charts"] == 0:
        problems.append("has no chart")
    for key, what in (("empty", "charts are empty"), ("unlabelled", "charts have no label"), ("images", "images are missing")):
        if found[key]:
            problems.append(f"{found[key]} {what}")
    if found["text"] is None or found["text"] < LEAST_TEXT_PIXELS:
        problems.append(f"text of charts is only {found['text']} pixels high")
    if found["loaded"]:
        problems.append(f"loads {found['loaded']}")
    if found["ids"]:
        problems.append(f"ids stand twice: {found['ids'][:5]}")
    light = sum(int(part) for part in found["background"].strip("rgba()").split(",")[:3]) > 382
    if light != (theme == "light"):
        problems.append(f"background is {found['background']}")
    return problems


def look(browser, page, view, folder):
    width, height, theme = view
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1 if width > 600 else 2, "mobile": width <= 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
    browser.get(page.resolve().as_uri())
    found = browser.execute_script(MEASURE)
    if folder:
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"})
        (folder / f"{page.stem}_{width}_{theme}.png").write_bytes(base64.b64decode(shot["data"]))
    # Closed parts must fit as well.
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    opened = browser.execute_script(MEASURE)
    problems = problems_of(found, width, theme, browser.get_log("browser"))
    if opened["scroll"] > opened["client"]:
        problems.append(f"scrolls sideways when all parts are open: {opened['wide']}")
    name = f"{width} pixels, {theme}"
    print(f"{name}: {found['charts']} charts, {found['parts']} parts, text at least {found['text']} pixels high")
    return [f"{name}: {problem}" for problem in problems]


def print_page(browser, page, folder):
    paper = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"])
    if folder:
        (folder / f"{page.stem}.pdf").write_bytes(paper)
    return [] if paper.startswith(b"%PDF-") and len(paper) > 10000 else ["it does not print"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("--screenshots", type=pathlib.Path, help="folder for what the views look like")
    arguments = parser.parse_args()
    try:
        import selenium  # noqa: F401
    except ImportError:
        selenium = None
    if selenium is None or not shutil.which("chromium") or not shutil.which("chromedriver"):
        print("skipped: needs chromium, chromium-driver and python3-selenium")
        return SKIPPED
    if not arguments.page.is_file():
        parser.error(f"{arguments.page} is no file")
    if arguments.screenshots:
        arguments.screenshots.mkdir(parents=True, exist_ok=True)
    browser = open_browser()
    try:
        problems = []
        for view in VIEWS:
            problems += look(browser, arguments.page, view, arguments.screenshots)
        problems += print_page(browser, arguments.page, arguments.screenshots)
    finally:
        browser.quit()
    for problem in problems:
        print(f"{arguments.page}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
