"""The documentation: its site builds, its code runs, and no public name is left out."""

import html
import itertools
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tomllib

import keras
import numpy as np
import pytest
from helpers import ROOT, keras_3_15
from test_public_interface import PUBLIC

import nsl_keras
from tools.documentation import interface, pages

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = sorted(DOCS.rglob("*.md"))
CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
#: Pages with code. Other tests run that of the first page, which is the README's, and that
#: of "serving", which needs engines of its own.
WITH_CODE = [
    page
    for page in PAGES
    if CODE.search(page.read_text()) and page.stem not in ("index", "serving")
]
#: Folders whose files are made, or belong to others.
NOT_OURS = re.compile(r"(?:.*/)?(?:\..*|build|dist|runs)/")
SOURCES = sorted(
    path
    for kind in ("md", "ipynb")
    for path in ROOT.rglob(f"*.{kind}")
    if not NOT_OURS.match(path.relative_to(ROOT).as_posix())
)
each_source = pytest.mark.parametrize(
    "path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix()
)


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
    interface.write_pages(tmp_path)
    for name in PUBLIC:
        page = tmp_path.joinpath(*name.split(".")[1:]).with_suffix(".md").read_text()
        assert page.endswith(f"\n::: {name}\n"), name
        assert f"\n{name}(" in page or issubclass(PUBLIC[name], Exception)
        assert " at 0x" not in page


def test_navigation_leads_to_every_page():
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    named = list(pages_of(navigation))
    assert len(named) == len(set(named))
    api = (*interface.modules(), *interface.names_of(nsl_keras))
    notebooks = (ROOT / "examples" / "notebooks").glob("*.ipynb")
    written = [*map(name_of, PAGES), *(f"api/{name}.md" for name in api)]
    written += [f"notebooks/{path.stem}.md" for path in notebooks]
    assert set(written) <= set(named)


def prose_of(path, code=False):
    """The Markdown of a page or of a notebook's cells, without its blocks of code.

    With `code`, names within lines stay.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        prose = ("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        text = "\n\n".join(prose)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return text if code else re.sub(r"`[^`\n]*`", "`code`", text)


def anchors_of(path):
    """The anchors that a code host gives the headings of a page."""
    found = []
    for heading in re.findall(r"^#+ (.*)$", prose_of(path, code=True), re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return found


@each_source
def test_links_lead_somewhere_in_the_repository(path):
    for link in pages.LINK.finditer(prose_of(path)):
        source = path.relative_to(ROOT).as_posix()
        target = pages.in_repository(source, link["target"])
        if target is None:
            continue
        name, _, anchor = target.partition("#")
        assert (ROOT / name).exists(), link["target"]
        assert not anchor or anchor in anchors_of(ROOT / name), link["target"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_measured_figures_name_their_file(page):
    if page.name == "papers.md":  # What the papers and their code say, measured by others.
        return
    text = re.sub(r"<!-- table.*?<!-- end -->|```.*?```", "", page.read_text(), flags=re.S)
    for paragraph in text.replace("95 % interval", "").split("\n\n"):
        found = re.search(r"[\d.]+ ?(?:%|points\b|dB\b|MiB\b|ms\b)", paragraph)
        assert not found or "results/" in paragraph, f"{name_of(page)}: {found.group()}"


@keras_3_15
@each_source
def test_names_exist(path):
    modules = {name.removeprefix("nsl_keras.") for name in interface.modules()}
    for span in re.findall(r"`([^`\n]+)`", prose_of(path, code=True)):
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
            assert hasattr(thing, name), dotted.group()
            thing = getattr(thing, name)


def shortened(block):
    """A block of code without downloads, with small images and few epochs."""
    block = block.replace('weights="imagenet"', "weights=None")
    block = block.replace("include_top=False)", "include_top=False, weights=None)")
    block = block.replace("96, 96", "32, 32").replace("160, 160", "32, 32")
    return re.sub(r"epochs=\d\d", "epochs=4", block)


@pytest.mark.long
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
# KerasHub batches its inputs itself.
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_code_runs(page, tmp_path, monkeypatch, eager, large_batches):
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(0)
    # A page is one program, its blocks one after the other.
    blocks = list(map(shortened, CODE.findall(page.read_text())))
    if name_of(page) == "guides/devices.md":  # A test with two devices runs those of JAX.
        blocks = blocks[:1]
    # A few epochs, steps and episodes show that it runs.
    program = re.sub(r"\bepisodes=\d\d", "episodes=4", "\n".join(blocks))
    program = re.sub(r"\b(\w*steps)=[2-9]\b", r"\1=1", program)
    program = program.replace("epochs=2, verbose", "epochs=1, verbose")
    exec(compile(program, name_of(page), "exec"), {"__name__": f"docs.{page.stem}"})


@pytest.mark.long
def test_code_of_the_readme_runs(tmp_path, monkeypatch, eager, large_batches):
    monkeypatch.chdir(tmp_path)
    flowers = tmp_path / "flower_photos"
    for number, kind in itertools.product(range(20), "abcde"):
        image = np.random.default_rng(number).integers(0, 256, (40, 50, 3), "uint8")
        (flowers / kind).mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(flowers / kind / f"{number}.jpg", image)
    monkeypatch.setattr(keras.utils, "get_file", lambda *_, **__: str(tmp_path))
    names = {"__name__": "readme"}
    for block in CODE.findall(README):
        block = shortened(block).replace("skip(3)", "skip(1)").replace("take(3)", "take(1)")
        exec(compile(block, "README.md", "exec"), names)
    for version in "12":
        assert (tmp_path / "served/flowers" / version / "saved_model.pb").exists()
    similar, folded = (
        names[each].predict(names["photos"], verbose=0) for each in ("similar", "plain")
    )
    temperature = names["plain"].temperature / names["similar"].temperature
    np.testing.assert_allclose(similar, temperature * folded, atol=1e-3)


def test_the_readme_agrees_with_the_site_and_the_makefile():
    assert CODE.findall((DOCS / "index.md").read_text()) == CODE.findall(README)[:1]
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([\w-]+)", README):
        if target != "and":
            assert re.search(rf"^(?:[\w-]+ )*{target}\b[ \w-]*:", makefile, re.M), target


@pytest.mark.long
def test_site_builds_without_a_warning(tmp_path, monkeypatch):
    from tools.documentation import __main__  # It needs the extra `dev`.

    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    __main__.main([])
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    options = {"capture_output": True, "text": True, "timeout": 280}
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, **options)
    built = done.stdout + done.stderr
    assert done.returncode == 0, built
    assert "No issues found" in built, built
    assert "griffe" not in built, built
    site = tmp_path / "build" / "site"
    for name in PUBLIC:
        page = site.joinpath("api", *name.split(".")[1:], "index.html").read_text()
        assert "&gt;&gt;&gt;" in page, f"{name}: its page has no example"
    found = site.rglob("*.html")
    texts = {page.relative_to(site).as_posix(): page.read_text() for page in found}
    anchors = {page: re.findall(r' id="([^"]+)"', text) for page, text in texts.items()}
    for page, text in texts.items():  # A strict build does not look at all of these.
        if page == "404.html":
            continue
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            path, _, anchor = html.unescape(link).partition("#")
            if re.match(r"\w+:", path) or path.startswith("//"):
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
            if path == "":
                target = page
            elif path.endswith(("/", ".")):
                target = posixpath.normpath(f"{target}/index.html")
            assert (site / target).is_file(), f"{page}: {link}"
            known = ("", "__skip", *anchors.get(target, ()))
            assert anchor in known, f"{page}: {link}"
    formulas = (site / "mathematics" / "index.html").read_text()
    assert formulas.count("<math") > 50
    assert "arithmatex" not in formulas
