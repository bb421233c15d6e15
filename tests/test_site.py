"""Tests of the documentation site: no warnings, no network, every page in the menu, search from disk."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mooring
from report.browser import dom, look

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parent.parent

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
    for name in (*mooring.__all__, "convert_strength", "check_importance", "Study", "MooringCallback"):
        assert re.search(rf'id="mooring\.[\w.]*\b{name}"', pages), name
    assert "<code>exclude</code>" in pages  # an option of the function attach, not of its module


def test_no_page_loads_external_resources(site):
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text()):
            assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), (page.name, tag)
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(), style


@pytest.mark.parametrize("name", ["importances", "pulls"])
def test_equations_are_drawn_and_have_words(site, name):
    lines = re.findall(r"^```math\n(.+)\n```$", (ROOT / "docs" / f"{name}.md").read_text(), re.MULTILINE)
    drawn = re.findall(r'<p class="equation"><svg role="img" aria-label="(.+?)"', (site / f"{name}.html").read_text())
    assert lines
    assert [html.unescape(words) for words in drawn] == lines


def test_search_works_from_disk(site, tmp_path):
    seen = dom(f"{(site / 'index.html').as_uri()}?q=calibration", tmp_path)
    assert 'class="md-search-result__item"' in seen.stdout
    assert "CONSOLE" not in seen.stderr


@pytest.mark.parametrize(
    "page", ["index.html", "choose.html", "pulls.html", "comparison.html", "migrating.html", "reproduction/index.html"]
)
def test_pages_fit_the_width_of_a_phone(site, page):
    script = "return [page.documentElement.scrollWidth, inner.innerWidth];"
    wide, phone = look(site / page, script, width=390).findings
    assert phone == 390
    assert wide <= phone
