"""The page works in a browser: it sorts, shows every figure, scrolls on a phone, is legible in the dark."""

import pytest

from laboratory.report import synthetic
from laboratory.report.browser import look
from mooring_lab.report import write_report

SORT = """
  const table = page.querySelector("table.sortable");
  const heads = Array.from(table.tHead.rows[0].cells);
  const finding = [];
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    for (const press of [1, 2]) {
      button.click();
      finding.push({
        title: button.textContent, numeric: head.hasAttribute("data-numeric"), reachable: button.tabIndex === 0,
        sorted: heads.map((other) => other.getAttribute("aria-sort")), column,
        values: Array.from(table.tBodies[0].rows).map((row) => row.cells[column].dataset.sort ?? null),
      });
    }
  });
  return finding;
"""
FIGURES = """
  const shown = Array.from(page.querySelectorAll("figure svg")).filter((svg) => svg.getBoundingClientRect().width);
  return shown.map((svg) => {
    const box = svg.getBoundingClientRect();
    const frame = svg.parentElement;
    return { width: box.width, height: box.height, scrolls: frame.scrollWidth > frame.clientWidth,
             label: svg.getAttribute("aria-label"),
             texts: svg.querySelectorAll("text").length };
  });
"""
WIDTHS = """
  const root = page.documentElement;
  const frames = Array.from(page.querySelectorAll(".scroll"));
  return { inner: inner.innerWidth, scroll: root.scrollWidth, body: page.body.scrollWidth,
           wide: frames.filter((frame) => frame.scrollWidth > frame.clientWidth).length };
"""
COLOURS = """
  const rgb = (text) => text.match(/[0-9.]+/g).map(Number);
  const texts = Array.from(page.querySelectorAll("figure:not([id$=matrices]) svg text, p, td, th, dd, figcaption"));
  const background = rgb(inner.getComputedStyle(page.body).backgroundColor);
  const inks = texts.map((text) => {
    const style = inner.getComputedStyle(text);
    return text instanceof inner.SVGElement ? style.fill : style.color;
  });
  return { background, inks: Array.from(new Set(inks)).map(rgb) };
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report(
        synthetic.study(), tmp_path_factory.mktemp("report"), title="Digits", command="mooring run", baseline="plain"
    )


def test_every_column_sorts_up_and_down_with_what_is_missing_last(page):
    seen = look(page, SORT)
    assert not seen.console
    assert len(seen.findings) == 2 * 14
    for number, finding in enumerate(seen.findings):
        order = "ascending" if number % 2 == 0 else "descending"
        assert finding["reachable"]
        assert finding["sorted"] == [order if column == finding["column"] else "none" for column in range(14)]
        values = [value for value in finding["values"] if value is not None]
        assert finding["values"] == values + [None] * (len(finding["values"]) - len(values))
        key = float if finding["numeric"] else str
        assert list(map(key, values)) == sorted(map(key, values), reverse=order == "descending")
    strengths = next(finding["values"] for finding in seen.findings if finding["title"] == "strength")
    assert strengths == ["1.0", "100.0", "100.0", "100.0", "100.0", "10000.0", "1000000.0", None, None, None]


def test_table_is_sorted_by_accuracy_and_console_messages_are_captured(page):
    first = "return [...page.querySelectorAll('th[aria-sort=descending]')].map((head) => head.textContent);"
    seen = look(page, f"inner.console.error('heard'); {first}")
    assert seen.findings == ["average accuracy %", "average accuracy %"]
    assert len(seen.console) == 1


def test_every_figure_is_seen_once_described_and_fits_the_screen(page):
    width = 1280
    finding = look(page, FIGURES, width=width).findings
    assert len(finding) == 7 + 7
    for figure in finding:
        assert 300 < figure["width"] <= width
        assert not figure["scrolls"]
        assert figure["height"] > 100
        assert figure["label"]
        assert figure["texts"] > 5


def test_nothing_overflows_a_phone(page):
    seen = look(page, WIDTHS, width=375)
    assert not seen.console
    assert seen.findings["inner"] == 375
    assert seen.findings["scroll"] <= 375
    assert seen.findings["body"] <= 375
    assert seen.findings["wide"] > 0  # tables and figures are wider, and scroll within their own frames


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_the_paper_in_light_and_dark(page, dark):
    finding = look(page, COLOURS, dark=dark).findings
    assert (sum(finding["background"][:3]) < 3 * 60) == dark
    assert len(finding["inks"]) >= 2
    for ink in finding["inks"]:
        assert contrast(ink, finding["background"]) >= 4.5


def contrast(one, other):
    """Of two colours, as the Web Content Accessibility Guidelines define it."""
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def luminance(colour):
    linear = [c / 12.92 if (c := part / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for part in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
