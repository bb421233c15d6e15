"""A crowded page on a desktop and on a phone: the legend stands apart, text is legible, and plain is in view."""

import itertools
import random
from dataclasses import replace

import pytest

from laboratory.report import synthetic
from laboratory.report.browser import look
from mooring_lab.report import write_report

pytestmark = pytest.mark.faults  # slow: the page has all methods

SCREENS = pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])

TEXTS = """
  const shown = (element) => element.getBoundingClientRect().width > 0;
  return [...page.querySelectorAll("figure svg")].filter(shown).map((svg) => ({
    figure: svg.closest("figure").id,
    texts: [...svg.querySelectorAll("text")].map((text) => {
      const box = text.getBoundingClientRect();
      const { left, right, top, bottom } = box;
      return { text: text.textContent, left, right, top, bottom, size: parseFloat(inner.getComputedStyle(text).fontSize)
               * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width };
    }),
  }));
"""
LINKS = """
  const boxes = [...page.querySelectorAll("nav a")].map((link) => {
    const target = page.querySelector(link.getAttribute("href"));
    const { right } = link.getBoundingClientRect();
    return { text: link.textContent, right, height: target.getBoundingClientRect().height };
  });
  return { boxes, title: page.title, heading: page.querySelector("h1").textContent };
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page on which most methods are nearly as good as the best, as on the digits."""
    chance = random.Random(0)
    runs = []
    for method, seed in itertools.product(synthetic.EVERY_METHOD, range(3)):
        run = synthetic.run(method, seed)
        lost = 25.0 if method == "plain" else 60 * random.Random(method).random() ** 4
        rows = [[100 - chance.random() - (lost if task < after else 0) for task in range(5)] for after in range(5)]
        runs.append(replace(run, matrix=rows))
    folder = tmp_path_factory.mktemp("crowd")
    return write_report(runs, folder, command="mooring compare --methods all", baseline="plain")


def test_legend_of_the_trade_off_does_not_touch_itself_and_names_the_best_and_plain(page):
    figures = {
        figure["figure"].rpartition("-")[2]: figure["texts"] for figure in look(page, TEXTS, width=1280).findings
    }
    labels = [text for text in figures["tradeoff"] if not text["text"].lstrip("\u2212").replace(".", "").isdigit()]
    assert len(labels) > 30
    for one, other in itertools.combinations(labels, 2):
        apart_across = one["right"] <= other["left"] + 1 or other["right"] <= one["left"] + 1
        # The box of a text is higher than its letters.
        apart_upward = one["bottom"] <= other["top"] + 4 or other["bottom"] <= one["top"] + 4
        assert apart_across or apart_upward, (one["text"], other["text"])
    names = " ".join(label["text"] for label in labels)
    first = next(row for row in best_first(page) if row != "joint")
    for method in ("plain", first):
        assert method in names


def best_first(page):
    """Return the methods of the table, in its order."""
    return look(page, "return [...page.querySelectorAll('table tbody th')].map((cell) => cell.textContent);").findings


@SCREENS
def test_text_of_every_figure_is_legible_and_within_a_desktop(page, width):
    figures = look(page, TEXTS, width=width).findings
    assert len(figures) == 7
    for figure in figures:
        for text in figure["texts"]:
            assert text["size"] >= 8, (figure["figure"], text)
            assert text["left"] >= 0, (figure["figure"], text)
            assert text["right"] <= 1280, (figure["figure"], text)


@SCREENS
def test_contents_lead_to_parts(page, width):
    seen = look(page, LINKS, width=width)
    assert not seen.console
    title = f"{len(synthetic.EVERY_METHOD)} methods on split digits, task-incremental"
    assert seen.findings["title"] == seen.findings["heading"] == title
    for box in seen.findings["boxes"]:
        assert box["right"] <= width
        assert box["height"] > 0, box["text"]
