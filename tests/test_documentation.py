"""The documentation: its site builds, its code runs, and no public name is left out."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import keras
import pytest
from helpers import ROOT, run_python
from test_public_interface import PUBLIC

import nsl_keras
from tools.documentation import interface

DOCS = ROOT / "docs"
GENERATED = ("api", "notebooks", "results")
PAGES = sorted(
    path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in GENERATED
)
#: Pages whose code needs engines of its own: another test runs it.
RUN_ELSEWHERE = ("guides/serving.md",)
CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def name_of(page):
    return page.relative_to(DOCS).as_posix()


def pages_of(navigation):
    for entry in navigation:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else pages_of(value)


def test_every_public_name_has_a_page(tmp_path):
    assert set(interface.public_names()) == set(PUBLIC)

    interface.write_pages(tmp_path)

    for name in PUBLIC:
        page = tmp_path.joinpath(*name.split(".")[1:]).with_suffix(".md").read_text()
        assert page.endswith(f"\n::: {name}\n"), name
        assert f"\n{name}(" in page or issubclass(PUBLIC[name], Exception)
        assert " at 0x" not in page


def test_navigation_leads_to_every_page(tmp_path):
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    named = list(pages_of(navigation))

    assert len(named) == len(set(named))
    assert {name_of(page) for page in PAGES} <= set(named)
    interface.write_pages(tmp_path / "api")
    modules = {f"api/{name}.md" for name in interface.modules()}
    assert modules <= set(named)
    notebooks = {path.stem for path in (ROOT / "examples" / "notebooks").glob("*.py")}
    assert {f"notebooks/{name}.md" for name in notebooks} <= set(named)


def test_links_into_the_repository_lead_somewhere():
    pattern = r"github\.com/nsl-keras/nsl_keras/(?:blob|tree)/main/([\w./-]+[\w/])"
    for page in PAGES:
        for path in re.findall(pattern, page.read_text()):
            assert (ROOT / path).exists(), f"{name_of(page)}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_measured_figures_name_their_file(page):
    if page.name == "papers.md":  # What the papers and their code say, measured by others.
        return
    text = re.sub(r"<!-- table.*?<!-- end -->|```.*?```", "", page.read_text(), flags=re.S)
    for paragraph in text.replace("95 % interval", "").split("\n\n"):
        found = re.search(r"[\d.]+ ?(?:%|points\b|dB\b|MiB\b|ms\b)", paragraph)
        assert not found or "results/" in paragraph, f"{name_of(page)}: {found.group()}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_on_the_page_exist(page):
    spans = re.findall(
        r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    )
    modules = {name.removeprefix("nsl_keras.") for name in interface.modules()}
    for span in spans:
        dotted = re.match(r"[a-z_]+(?:\.\w+)+", span)
        if dotted is None:
            continue
        first, *others = dotted.group().split(".")
        if first in modules:
            others = [first, *others]
        elif first not in ("keras", "nsl_keras"):
            continue
        thing = keras if first == "keras" else nsl_keras
        for name in others:
            assert hasattr(thing, name), f"{name_of(page)}: {dotted.group()}"
            thing = getattr(thing, name)


@pytest.mark.long
def test_docstrings_become_markdown():
    from tools.documentation import docstrings  # It needs the site's tools.

    text = """Adds.

Args:
    Those of `keras.layers.Conv2D`, and:
    similarity: What `M` may be.

Call arguments:
    inputs: A tensor
        of rank 4.

Example:

>>> 1 + 1
2

Reference: A paper."""

    assert (
        docstrings.rewritten(text)
        == """Adds.

Takes the arguments of `keras.layers.Conv2D`, and:

Args:
    similarity: What `M` may be.

**Call arguments**


* `inputs`: A tensor
    of rank 4.

**Example**



```pycon
>>> 1 + 1
2
```

**Reference**

A paper."""
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if name_of(page) not in RUN_ELSEWHERE and CODE.search(page.read_text())
    ],
    ids=name_of,
)
def test_code_runs(page, tmp_path, monkeypatch, eager):
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(0)
    # A page is one program, its blocks one after the other.
    blocks = CODE.findall(page.read_text())
    if name_of(page) == "guides/devices.md":  # A test with two devices runs those of JAX.
        blocks = blocks[:2]
    program = "\n".join(blocks)
    exec(compile(program, name_of(page), "exec"), {"__name__": f"docs.{page.stem}"})


@pytest.mark.long
def test_site_builds_without_a_warning(tmp_path):
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns(*GENERATED))

    run_python("-m", "tools.documentation", f"--folder={tmp_path / 'docs'}")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    built = done.stdout + done.stderr
    assert done.returncode == 0, built
    assert "No issues found" in built, built
    assert "griffe" not in built, built
    site = tmp_path / "build" / "site"
    for name in PUBLIC:
        page = site.joinpath("api", *name.split(".")[1:], "index.html").read_text()
        assert "&gt;&gt;&gt;" in page, f"{name}: its page has no example"
    for page in site.rglob("*.html"):  # What a strict build does not look at.
        for source in re.findall(r'<img [^>]*src="([^":]+)"', page.read_text()):
            assert (page.parent / source).exists(), f"{page}: {source}"
    formulas = (site / "mathematics" / "index.html").read_text()
    assert formulas.count("<math") > 50
    assert "arithmatex" not in formulas
