"""Tests of the documentation site: no warnings, no network, every page in the menu, search from disk."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mooring
from laboratory.report.browser import dom, look

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]

if not (ROOT / "src").is_dir():
    pytest.skip("there is no source to read docstrings from", allow_module_level=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_document_is_a_page_in_the_menu(site):
    documents = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    outside = [Path(name) for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/digits.md")]
    home = (site / "index.html").read_text()
    for document in [*documents, *outside]:
        page = document.with_suffix(".html")
        assert (site / page).is_file(), page
        assert f'href="{page.as_posix()}"' in home, f"{page} is not in the menu"


def test_every_public_name_is_in_the_reference(site):
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    for name in (
        *mooring.__all__,
        "Memory",
        "Measurement",
        "convert_strength",
        "check_importance",
        "Study",
        "MooringCallback",
    ):
        assert re.search(rf'id="mooring(?:_lab)?\.[\w.]*\b{name}"', pages), name
    assert "<code>exclude</code>" in pages  # an option of the function attach, not of its module


def test_no_page_loads_external_resources(site):
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text()):
            assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), (page.name, tag)
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(), style


EQUATIONS = ["importances", "pulls", "methods", "penalties-and-outputs", "projections", "replay", "merging"]


@pytest.mark.parametrize("name", EQUATIONS)
def test_equations_are_drawn_and_have_words(site, name):
    lines = re.findall(r"^```math\n(.+)\n```$", (ROOT / "docs" / f"{name}.md").read_text(), re.MULTILINE)
    drawn = re.findall(r'<p class="equation"><svg role="img" aria-label="(.+?)"', (site / f"{name}.html").read_text())
    assert lines
    assert [html.unescape(words) for words in drawn] == lines


def test_search_works_from_disk(site, tmp_path):
    seen = dom(f"{(site / 'index.html').as_uri()}?q=distillation", tmp_path)
    assert 'class="md-search-result__item"' in seen.stdout
    assert "CONSOLE" not in seen.stderr


PHONE, DESKTOP = 390, 1280
LAYOUT = """
const find = selector => [...page.querySelectorAll(selector)];
const boxes = selector => find(selector).map(element => [element, element.getBoundingClientRect()]);
const ends = boxes(".md-typeset__scrollwrap, .md-typeset pre, .md-typeset img").map(([, box]) => box.right);
const tables = find(".md-typeset__scrollwrap");
const covers = ([nav, button]) => {
  const code = nav.parentElement.querySelector("code").getBoundingClientRect();
  return button.left < code.right && button.right > code.left && button.top < code.bottom && button.bottom > code.top;
};
const buttons = boxes("pre > .md-code__nav");
return {
  inside: inner.innerWidth,
  width: Math.max(page.documentElement.scrollWidth, ...ends),
  blocks: find(".md-typeset pre > code").length,
  buttons: buttons.length,
  covering: buttons.filter(covers).length,
  scrolling: tables.filter(table => table.scrollWidth > table.clientWidth).map(table => table.innerText.slice(0, 80)),
};
"""


def check_layout(page, width):
    """Check that nothing ends outside a page and no copy button lies on code; return the tables that scroll."""
    layout = look(page, LAYOUT, width=width).findings
    assert layout["inside"] == width, page
    assert layout["width"] <= width, page
    assert layout["buttons"] == layout["blocks"], page
    assert layout["covering"] == 0, page
    return layout["scrolling"]


@pytest.mark.parametrize("page", ["index.html", "pulls.html", "start/fine-tune.html", "budget.html", "comparison.html"])
def test_tables_and_code_fit_a_phone(site, page):
    assert check_layout(site / page, PHONE) == []


@pytest.mark.parametrize("page", ["choose.html", "frontier.html", "reproduction/index.html"])
def test_wide_tables_scroll_in_their_place_on_a_phone(site, page):
    assert check_layout(site / page, PHONE)


@pytest.mark.parametrize("page", ["choose.html", "frontier.html", "reproduction/index.html"])
def test_tables_and_code_fit_a_desktop(site, page):
    assert check_layout(site / page, DESKTOP) == []


@pytest.mark.faults
def test_every_page_fits_a_phone_and_a_desktop(site):
    for page in [path for path in site.rglob("*.html") if path.name not in ("404.html", "around.html")]:
        check_layout(page, PHONE)  # where a table may scroll in its place
        assert check_layout(page, DESKTOP) == []
