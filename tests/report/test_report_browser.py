"""The page in Chromium: it loads, its controls work, hostile names stay text.

The `browser` fixture fails every test that leaves a warning or an error on the console.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from browser import Browser
from conftest import HOSTILE

from elsa_format import inspect
from elsa_report import render

NAMES = "return [...document.querySelectorAll('#layer-table tbody .pick')].map(e => e.textContent)"
CHOSEN = "return document.querySelector('#layer-title bdi').textContent"
VERDICT = "return document.querySelector('#metric-verdict').textContent"
MARKED = (
    "return [...document.querySelectorAll('#metric-chart svg[role] .mark')]"
    ".map(e => e.classList.contains('open') ? 'beaten' : e.localName)"
)
COLOUR = "return getComputedStyle(document.body).backgroundColor"
FOCUS = "return document.activeElement.textContent"


@pytest.fixture(scope="module")
def page(make_page: Callable[..., Path]) -> Path:
    return make_page(full=True)


@pytest.fixture(scope="module")
def many_levels(
    make_network: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """50 levels, and the layers of a small network repeated until they are 500."""
    document = inspect(make_network(5, 50))
    document["tensors"] = [
        {**tensor, "name": f"{i}.{tensor['name']}"}
        for i in range(100)
        for tensor in document["tensors"]
        if tensor["kind"] == "nested"
    ]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_bytes(render(document))
    return path


def test_every_part_is_drawn(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.run("return document.querySelectorAll('.chart > svg').length") == 6
    rows = browser.run("return document.querySelectorAll('#level-table tr').length")
    assert rows == 1 + 3 + 1
    assert len(browser.run(NAMES)) == 6
    assert browser.run("return document.documentElement.dataset.ready") == "true"


def test_headers_sort_the_layers(browser: Browser, page: Path) -> None:
    browser.open(page)
    stored = browser.run(NAMES)
    browser.click("[data-key='weights'] .sort")
    largest = browser.run(NAMES)
    browser.click("[data-key='weights'] .sort")
    smallest = browser.run(NAMES)
    assert largest[0].startswith("block_4")
    assert smallest[-1].startswith("block_4")
    sort = "return document.querySelector(\"[data-key='weights']\").getAttribute('aria-sort')"
    assert browser.run(sort) == "ascending"
    browser.click("[data-key='weights'] .sort")
    assert browser.run(NAMES) == stored


def test_layers_sort_by_what_a_level_keeps_with_the_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector(\"[data-key='3'] .sort\").focus()")
    browser.press("Enter")
    script = "return [...document.querySelectorAll('#layer-table tbody tr')].map(r => r.cells[5]"
    shares = browser.run(f"{script}.textContent)")
    numbers = [float(text.removesuffix(" %")) for text in shares]
    assert numbers == sorted(numbers, reverse=True)
    assert len(set(numbers)) > 2


def test_the_filter_narrows_the_layers(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.click("#filter")
    browser.press(*"k_3")
    browser.settle()
    assert browser.run(NAMES) == ["block_3/conv/kernel"]
    assert browser.run("return document.querySelector('#shown').textContent") == "1 of 6 layers"


def test_a_click_chooses_a_layer(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.run(CHOSEN) == "block_0/conv/kernel"
    browser.click("#layer-table tbody tr:nth-child(3) .pick")
    browser.settle()
    assert browser.run(CHOSEN) == "block_2/conv/kernel"
    pressed = "return document.querySelectorAll('.pick[aria-pressed=true]').length"
    assert browser.run(pressed) == 1


def test_the_keyboard_chooses_a_layer(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector(\"[data-key='3'] .sort\").focus()")
    browser.press("Tab")
    assert browser.run(FOCUS) == "block_0/conv/kernel"
    browser.press("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "Enter")
    browser.settle()
    assert browser.run(CHOSEN) == "block_2/conv/kernel"
    browser.press("End", "Space")
    browser.settle()
    assert browser.run(CHOSEN) == "block_5/conv/kernel"
    # The table is one stop: the next is the mask's slider, not the next layer.
    browser.press("Tab")
    assert browser.run("return document.activeElement.id") == "mask-level"


def test_the_focus_can_be_seen(browser: Browser, page: Path) -> None:
    browser.open(page)
    seen = (
        "const e = document.activeElement, s = getComputedStyle(e);"
        "return [e.tagName, s.outlineStyle, parseFloat(s.outlineWidth)]"
    )
    for _ in range(25):
        browser.press("Tab")
        tag, style, width = browser.run(seen)
        assert tag == "BODY" or (style != "none" and width >= 1), tag


def test_the_mask_shows_what_a_level_keeps(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('#mask').scrollIntoView()")
    colours = (
        "const c = document.querySelector('#mask'), p = new Set();"
        "const copy = new OffscreenCanvas(c.width, c.height).getContext('2d');"
        "copy.drawImage(c, 0, 0);"
        "const d = copy.getImageData(0, 0, c.width, c.height).data;"
        "for (let i = 0; i < d.length; i += 4) p.add(d.slice(i, i + 3).join()); return p.size"
    )
    assert browser.run(colours) == 4
    browser.click("#mask-level")
    browser.press("Home")
    assert browser.run(colours) == 2
    said = browser.run("return document.querySelector('#mask-said').textContent")
    assert said.startswith("Level 1 · level 1: keeps ")


def test_the_theme_follows_the_system_and_the_button(browser: Browser, page: Path) -> None:
    browser.prefer("dark")
    browser.open(page)
    dark = browser.run(COLOUR)
    swatch = "return document.querySelector('#level-table .swatch').style.background"
    dark_swatch = browser.run(swatch)
    browser.click("#theme")
    assert browser.run(COLOUR) != dark
    assert browser.run(swatch) != dark_swatch
    browser.open(page)
    assert browser.run(COLOUR) != dark, "the choice is remembered"
    browser.click("#theme")
    assert browser.run(COLOUR) == dark


def test_charts_answer_pointer_and_keys(browser: Browser, page: Path) -> None:
    browser.open(page)
    tip = "return document.querySelector('#tip').hidden || document.querySelector('#tip').innerText"
    browser.run("document.querySelector('#metric-chart svg').focus()")
    browser.settle()
    browser.press("ArrowRight")
    assert "level 3" in browser.run(tip)
    browser.press("End")
    assert "level 1" in browser.run(tip)
    browser.press("Escape")
    assert browser.run(tip) is True
    browser.run("document.querySelector('#freeze-chart').scrollIntoView({block: 'center'})")
    browser.settle()
    box = browser.run("return document.querySelector('#freeze-chart svg').getBoundingClientRect()")
    browser.hover(int(box["x"] + box["width"] - 20), int(box["y"] + box["height"] / 2))
    assert browser.run(tip).startswith("Dense only")


def test_every_metric_and_both_axes_can_be_chosen(browser: Browser, page: Path) -> None:
    browser.open(page)
    drawn = "return document.querySelector('#metric-chart svg').outerHTML"
    first = browser.run(drawn)
    browser.click("input[value='linear']")
    second = browser.run(drawn)
    browser.click("#metric")
    browser.press("ArrowDown", "Enter")
    caption = browser.run("return document.querySelector('#metric-caption').textContent")
    assert caption == "loss over sparsity"
    assert len({first, second, browser.run(drawn)}) == 3


@pytest.fixture(scope="module")
def measured(make_network: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Level 2 is slower and worse than level 1; level 3 equals the dense network."""
    document = inspect(make_network(2, 3))
    networks = [*document["levels"], document["dense"]]
    for network, accuracy in zip(networks, [0.8, 0.7, 0.949, 0.95], strict=True):
        network["metrics"] = {"accuracy": accuracy, "loss": round(1 - accuracy, 3)}
        network["errors"] = {"accuracy": 0.01}
    document["metrics"] = {"accuracy": {"better": "higher"}, "loss": {"better": "lower"}}
    times = {1: 0.001, 2: 0.002, 3: 0.003, "dense": 0.004}
    costs = dict.fromkeys(("best", "size", "download", "memory", "fast_seconds"))
    rows = [{**costs, "level": n, "dense_seconds": time} for n, time in times.items()]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_bytes(render(document, rows))
    return path


def test_levels_that_no_other_beats_are_marked(browser: Browser, measured: Path) -> None:
    browser.open(measured)
    # Only the levels have a mark over sparsity: the dense network has none, and is a line.
    assert browser.run(MARKED) == ["path", "beaten", "path"]
    assert (
        browser.run("return document.querySelectorAll('#metric-chart [role] .error').length") == 3
    )
    assert browser.run(VERDICT) == (
        "No other network beats levels 1, 3 and the dense network: none is at least as good in "
        "both, and better in one. Level 3 and the dense network are equal within their errors, "
        "and have the best accuracy."
    )
    legend = "return document.querySelector('#metric-chart .legend').innerText.split('\\n')"
    assert browser.run(legend) == ["no other beats it", "another beats it", "standard error"]
    browser.run("document.querySelector('#over').focus()")
    browser.press("End")
    browser.settle()
    caption = browser.run("return document.querySelector('#metric-caption').textContent")
    assert caption == "accuracy over milliseconds"
    assert browser.run(MARKED) == ["path", "beaten", "path", "path"]
    assert browser.run("return document.querySelectorAll('#metric-chart .line').length") == 0
    browser.run("document.querySelector('#metric-chart svg').focus()")
    browser.press("End")
    tip = browser.run("return document.querySelector('#tip').innerText").split("\n")
    assert tip[0] == "Dense network"
    assert tip[2:] == ["milliseconds: 4 ms", "accuracy: 0.950 ± 0.010", "no other beats it"]


def test_less_of_a_loss_is_better(browser: Browser, measured: Path) -> None:
    browser.open(measured)
    browser.run("document.querySelector('#metric').focus()")
    browser.press("End")
    browser.settle()
    assert browser.run(MARKED) == ["path", "beaten", "path"]
    assert "and the dense network: none" in browser.run(VERDICT)
    assert "equal" not in browser.run(VERDICT), "no errors are recorded"


def test_without_a_direction_no_level_is_marked(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.run(MARKED) == ["circle"] * 3
    assert "does not say whether higher or lower accuracy is better" in browser.run(VERDICT)
    overs = "return [...document.querySelector('#over').options].map(e => e.textContent)"
    assert browser.run(overs) == [
        "sparsity",
        "bytes as bitmask",
        "bytes as CSR",
        "estimated download",
    ]


@pytest.mark.parametrize("width", [360, 768])
def test_nothing_overflows_a_narrow_screen(
    browser: Browser, page: Path, many_levels: Path, make_page: Callable[..., Path], width: int
) -> None:
    browser.resize(width, 700, phone=True)
    for path in (page, many_levels, make_page(names=("n" * 500, "x/" * 300), hostile=True)):
        browser.open(path)
        browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
        assert browser.run("return document.documentElement.scrollWidth") <= width


def test_many_layers_and_levels_stay_usable(browser: Browser, many_levels: Path) -> None:
    browser.open(many_levels)
    assert len(browser.run(NAMES)) == 500
    browser.click("[data-key='level'] .sort")
    shares = (
        "return [...document.querySelectorAll('#layer-table tbody .at-level')]"
        ".map(e => parseFloat(e.textContent))"
    )
    at_level_50 = browser.run(shares)
    assert at_level_50 == sorted(at_level_50, reverse=True)
    browser.run("document.querySelector('.pick[tabindex=\"0\"]').focus()")
    browser.press("ArrowLeft", "ArrowLeft")
    assert browser.run("return document.querySelector('#level').value") == "48"
    at_level_48 = browser.run(shares)
    assert at_level_48 == sorted(at_level_48, reverse=True)
    assert at_level_48 != at_level_50
    browser.click("[data-key='weights'] .sort")
    weights = (
        "return [...document.querySelectorAll('#layer-table tbody .weights')]"
        ".map(e => Number(e.textContent.replaceAll(',', '')))"
    )
    by_weights = browser.run(weights)
    assert by_weights == sorted(by_weights, reverse=True)


def test_names_from_the_file_never_run(browser: Browser, make_page: Callable[..., Path]) -> None:
    browser.open(make_page(names=HOSTILE, hostile=True, full=True))
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    for row in range(len(HOSTILE)):
        browser.click(f"#layer-table tbody tr:nth-child({row + 1}) .pick")
        browser.settle()
    assert browser.run("return window.hacked === undefined")
    assert browser.run(NAMES)[0] == HOSTILE[0]
    assert browser.run("return document.querySelectorAll('script').length") == 2


def test_a_page_from_the_header_says_how_to_get_pictures(
    browser: Browser, make_page: Callable[..., Path]
) -> None:
    browser.open(make_page(2, 1, metrics=False))
    text = browser.run("return document.querySelector('#mask-view').textContent")
    assert "--full" in text
    assert "records no metrics" in browser.run("return document.body.textContent")


def test_a_printed_page_is_light_and_whole(browser: Browser, many_levels: Path) -> None:
    browser.prefer("dark")
    browser.open(many_levels)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(COLOUR) == "rgb(255, 255, 255)"
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(COLOUR) != "rgb(255, 255, 255)"
