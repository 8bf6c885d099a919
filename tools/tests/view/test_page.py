"""The page, as a file and in headless Chromium."""

import html
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from matplotlib import image as images
from msgspec.structs import replace
from toy_grammar import Letters, runners
from toy_traces import a_trace, serve
from trace_replay import replay

from sglang_smc.state.trace import Trace
from sglang_smc_tools.view.genealogy import genealogy
from sglang_smc_tools.view.page import _sizes_of, main, page_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def needs_chromium(test: Any) -> Any:
    """Run it in `make test-all`, where there is one."""
    without = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
    return pytest.mark.nightly(without(test))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_bytes(msgspec.json.encode(a_trace()))
    return path


def test_a_page_is_one_file_that_asks_nobody(saved: Path, capsys: pytest.CaptureFixture) -> None:
    target = saved.with_suffix(".html")
    assert main([str(saved), "-o", str(target)]) == 0
    assert capsys.readouterr().out.strip() == str(target)
    page = target.read_text()
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\(", page)
    assert "default-src 'none'" in page


def test_the_heading_has_the_sizes_of_rounds() -> None:
    """Of those where a text goes on; the request's own are an upper bound, if they adapt."""
    made = a_trace()
    sizes = {"num_particles": str(made.num_particles), "num_steps": str(made.num_steps)}
    trace = replace(made, num_particles=99, num_steps=98)
    assert _sizes_of(trace) == sizes and '"num_particles":"99"' not in page_of(trace)
    small = replace(made.rounds[0], drafted=[[7, 7]], ended=[False])
    found = _sizes_of(replace(trace, rounds=[*made.rounds, small]))
    assert found == {
        "num_particles": f"1 to {made.num_particles}",
        "num_steps": f"2 to {made.num_steps}",
    }


def test_no_piece_of_text_ends_the_script() -> None:
    """EOS reads `</script>` there."""
    page = page_of(a_trace(), title="<b>&")
    assert page.count("</script>") == page.count("<script") == 2
    assert "<title>&lt;b&gt;&amp;</title>" in page


def test_a_trace_is_found_in_whatever_was_saved(saved: Path) -> None:
    trace = json.loads(saved.read_text())
    info = {"meta_info": {"spec_smc_trace": trace}}
    answer = {"text": "", **info}
    chat = {"choices": [{"index": 0, **info}]}
    for value, more in ((trace, []), (answer, []), (chat, []), ([info, info], ["--index", "1"])):
        saved.write_text(json.dumps(value))
        assert main([str(saved), *more]) == 0
        saved.with_suffix(".html").unlink()


@pytest.mark.parametrize(
    ("text", "arguments", "told"),
    [
        (None, [], "cannot be read"),
        ("{", [], "is no JSON"),
        ('{"text": ""}', [], "has no trace: ask for one with custom_params"),
        ('[{"spec_smc_trace": {}}, {"spec_smc_trace": {}}]', [], "has 2 traces"),
        ('[{"spec_smc_trace": {}}]', ["--index", "4"], "--index is 4"),
        ('{"spec_smc_trace": {"version": 9}}', [], "version 9"),
        ('{"spec_smc_trace": "x"}', [], "Expected `object`, got `str`"),
        pytest.param("[" * 200_000 + "]" * 200_000, [], "nested too deep", id="deep"),
        pytest.param("[" * 900 + "]" * 900, [], "has no trace", id="less deep"),
    ],
)
def test_what_is_wrong_is_told(
    saved: Path, text: str | None, arguments: list[str], told: str, capsys: pytest.CaptureFixture
) -> None:
    if text is None:
        saved.unlink()
    else:
        saved.write_text(text)
    assert main([str(saved), *arguments]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("answer", [None, "y\n", "n\n", ""], ids=["pipe", "yes", "no", "end"])
def test_a_page_that_exists_is_overwritten_only_if_asked(
    saved: Path, answer: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """By --force, or by the user at a terminal."""
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: answer is not None)
    monkeypatch.setattr(sys, "stdin", terminal)
    page = saved.with_suffix(".html")
    page.write_text("old")
    agreed = answer == "y\n"
    assert main([str(saved)]) == (0 if agreed else 1)
    told = capsys.readouterr().err
    assert ("--force" in told) == (answer is None)
    assert ("[y/N]" in told) == (answer is not None)
    assert (page.read_text() == "old") != agreed
    page.write_text("old")
    assert main([str(saved), "--force"]) == 0
    assert page.read_text() != "old"


# --- In headless Chromium


def shown(page: Path, *options: str) -> tuple[str, str]:
    """Return what a browser makes of a page, and what its console says."""
    assert CHROMIUM is not None
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    found = subprocess.run(
        [CHROMIUM, *fixed, profile, "--enable-logging=stderr", *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return found.stdout, "\n".join(re.findall(r".*CONSOLE.*", found.stderr))


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("num_particles", "length"), [(4, 60), (16, 1000)])
def test_a_browser_draws_it(tmp_path: Path, dark: bool, num_particles: int, length: int) -> None:
    """Without a word on the console, the answer's text in its place, and ink on the canvas."""
    made = a_trace(num_particles, length)
    page = tmp_path / "page.html"
    image = tmp_path / "page.png"
    page.write_text(page_of(made))
    wanted = ["--force-dark-mode", "--enable-features=WebContentsForceDark:0"] if dark else []
    dom, console = shown(page, "--dump-dom", *wanted)
    assert not console
    answer = re.search(r'<p id="answer">(.*?)</p>', dom, re.DOTALL)
    assert answer is not None
    text = html.unescape(re.sub(r"<[^>]*>", "", answer[1]))
    assert text == "".join(made.pieces[str(token)] for token in genealogy(made).answer)
    _, console = shown(page, f"--screenshot={image}", "--window-size=1280,1100", *wanted)
    assert not console
    pixels = images.imread(image)
    assert len({tuple(pixel) for row in pixels[::3, ::3] for pixel in row}) > 40
    corner = float(pixels[2, 2, :3].mean())  # background
    assert corner < 0.2 if dark else corner > 0.9


KEYS = """const at = document.getElementById('scroller'); at.focus();
for (const key of ['ArrowRight', 'ArrowRight'])
  at.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));"""
POINTER = """const at = document.getElementById('picture'), box = at.getBoundingClientRect();
for (let y = 22; y < 300 && document.getElementById('tip').hidden; y += 8)
  at.dispatchEvent(new MouseEvent('mousemove', {clientX: box.left + 130, clientY: box.top + y}));"""


@needs_chromium
@pytest.mark.parametrize("reader", [KEYS, POINTER], ids=["keys", "pointer"])
def test_a_token_tells_of_itself(tmp_path: Path, reader: str) -> None:
    """Red where the cursor or the pointer finds no token, or the tip stays empty or hidden."""
    dom = after(reader, tmp_path)
    tip = re.search(r'<div id="tip"([^>]*)>(.*?</div>)\s*</div>', dom, re.DOTALL)
    assert tip is not None and "hidden" not in tip[1]
    assert "round" in tip[2] and "weight" in tip[2]


ALL_TOLD = """document.title = [...document.getElementById('answer').children].map((token) => {
  token.dispatchEvent(new MouseEvent('mouseover', {bubbles: true}));
  return document.getElementById('status').textContent; }).join(' | ');"""


@needs_chromium
def test_a_token_tells_what_potentials_said(tmp_path: Path) -> None:
    """Of the answer's beginnings, where each ends."""
    scored = {"trace": True, "potentials": [{"name": "letters", "when": "round"}]}
    (one,) = serve(1, scored | {"max_lag": 30}, runners=runners(letters=Letters()), max_lag=30)
    title = re.search("<title>(.*?)</title>", after(ALL_TOLD, tmp_path, one.trace), re.DOTALL)
    assert title is not None
    told = re.findall(r"potentials, of the text up to here: log w (.[0-9.]+)", title[1])
    made = replay(one.trace, is_plain=False)
    beginnings = (tuple(made.output_ids[:end]) for end in range(len(made.output_ids) + 1))
    scores = [made.scores[text] for text in beginnings if text in made.scores]
    values = [f"{score:+.2f}".replace("-", "\N{MINUS SIGN}") for score in scores]
    assert values and told == values


@needs_chromium
def test_paper_has_the_whole_picture(tmp_path: Path) -> None:
    """In lines of 84 tokens, on white; and nothing of it stays behind."""
    long = a_trace(length=400)
    printed = after("dispatchEvent(new Event('beforeprint'));", tmp_path, long)
    paper = re.search(r'<div id="paper">(.*?)</div>', printed, re.DOTALL)
    assert paper is not None and paper[1].count("<canvas") >= 5
    assert '<html lang="en" class="paper">' in printed
    both = "dispatchEvent(new Event('beforeprint')); dispatchEvent(new Event('afterprint'));"
    assert '<div id="paper"></div>' in after(both, tmp_path, long)


def after(script: str, folder: Path, trace: Trace | None = None) -> str:
    """The page's elements behind what a reader did, which is a script; raises if it complains."""
    act = f"<script>addEventListener('load', () => setTimeout(() => {{ {script} }}, 300));</script>"
    path = folder / "page.html"
    page = page_of(trace or a_trace())
    path.write_text(page.replace("</body>", f"{act}</body>"))
    dom, console = shown(path, "--dump-dom")
    assert not console
    return dom
