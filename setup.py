"""What an index shows of the package, from README.md: the rest stands in pyproject.toml.

README.md's links lead to files beside it, which an index has not. They become links into the
repository, whose address nothing in the tree knows: SGLANG_SMC_REPOSITORY has it, such as
https://github.com/OWNER/sglang-smc, and SGLANG_SMC_REVISION the tag that is released, as in
.github/workflows/release.yml. Without an address, texts of links stay, and pictures go.
"""

import os
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
ADDRESS = "SGLANG_SMC_REPOSITORY"
REVISION = "SGLANG_SMC_REVISION"
PICTURE = re.compile(r"!\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)")


def long_description(text: str, address: str | None, revision: str) -> str:
    """README.md with links that lead somewhere from anywhere."""
    if not address:
        return LINK.sub(r"\1", PICTURE.sub("", text))
    _, _, path = address.partition("://github.com/")
    if not path:
        raise ValueError(f"{ADDRESS} is {address!r}; allowed: https://github.com/OWNER/NAME.")
    raw = f"https://raw.githubusercontent.com/{path}/{revision}"
    text = PICTURE.sub(rf"![\1]({raw}/\2)", text)
    return LINK.sub(rf"[\1]({address}/blob/{revision}/\2)", text)


def urls(address: str | None, revision: str) -> dict[str, str]:
    """Links beside the page; those of the files' folders where there is an address."""
    paper = {"Paper": "https://arxiv.org/abs/2604.15672"}
    if not address:
        return paper
    return {
        "Repository": address,
        "Issues": f"{address}/issues",
        "Documentation": f"{address}/tree/{revision}/docs",
        "Changelog": f"{address}/blob/{revision}/CHANGELOG.md",
        **paper,
    }


if __name__ == "__main__":
    where = os.environ.get(ADDRESS, "").rstrip("/").removesuffix(".git") or None
    of = os.environ.get(REVISION) or "main"
    setup(
        long_description=long_description((HERE / "README.md").read_text(), where, of),
        long_description_content_type="text/markdown",
        project_urls=urls(where, of),
    )
