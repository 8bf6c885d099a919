"""Make the repository's pages a site, as a hook of mkdocs: README.md begins it.

Pages beside docs/ are in it, too. A link from page to page, or to a picture, becomes one within the
site. Other files are linked in the repository at SGLANG_SMC_REPOSITORY, as in setup.py; without
that address the link's text stays.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("*.md", "*/README.md", "bench/pair/*.md", "bench/results/**/*.*", "examples/*/*.md")
PLACES = {"README.md": "index.md", "docs/README.md": "pages.md"}
FENCE = re.compile(r"(^```.*?^```)", re.M | re.S)
LINK = re.compile(r"\[([^\[\]]*)\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")


def place_of(path: str) -> str:
    """Return where a file of the repository is in the site."""
    return PLACES.get(path, path.removeprefix("docs/"))


def path_of(place: str) -> str:
    """Return the file of the repository that is at a place of the site."""
    known = {where: path for path, where in PLACES.items()}
    return known.get(place) or (place if (ROOT / place).exists() else f"docs/{place}")


def on_config(config: Any) -> Any:
    config["repo_url"] = os.environ.get("SGLANG_SMC_REPOSITORY", "")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what is beside docs/: pages and the pictures of results."""
    files.remove(files.src_uris["README.md"])  # known as pages.md
    beside = {path for pattern in BESIDE for path in ROOT.glob(pattern)}
    for path in sorted(beside):
        where = path.relative_to(ROOT).as_posix()
        is_page_of_docs = where.startswith("docs/") and where not in PLACES
        if path.suffix in (".md", ".png") and not is_page_of_docs:
            files.append(File.generated(config, place_of(where), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Return a page with links that lead somewhere in the site."""
    here = path_of(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def within(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if not target or not (ROOT / path).exists():  # of the latter mkdocs warns
            return link[0]
        if place_of(path) in files.src_uris:
            return f"[{text}]({posixpath.relpath(place_of(path), folder or '.')}{anchor})"
        address = config["repo_url"]
        return f"[{text}]({address}/blob/main/{path}{anchor})" if address else text

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(within, part) for part in parts)
