"""The curl examples of all pages, as they stand there."""

import json
import re
from pathlib import Path

import pytest
from http_server import Server
from programs import printed

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```bash\n(.*?)```", page.read_text(), re.S))
    if "curl " in block
]
# What a page cannot know: where the server is, and where its reader has checkpoints.
PLACES = {
    "/models/target-step-200": str(ROOT / "bench" / "pair" / "target"),
    "/models/draft-step-200": str(ROOT / "bench" / "pair" / "draft"),
}


def run(example: str, server: Server, folder: Path) -> str:
    """What the example prints; an HTTP error is a failure of curl's."""
    (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    script = example.replace("localhost:30000", server.url.removeprefix("http://"))
    assert script != example
    for there, here in PLACES.items():
        script = script.replace(there, here)
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "CURL_HOME": str(folder)}
    return printed("bash", "-euc", script, env=variables)


def chat_text(told: str) -> str:
    if not told.startswith("data: "):
        return json.loads(told)["choices"][0]["message"]["content"]
    lines = [line.removeprefix("data: ") for line in told.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_works_as_printed(example: str, server: Server, tmp_path: Path) -> None:
    told = run(example, server, tmp_path)
    if "Repeat this list" in example:  # beyond the shipped pair: test_real_model.py has it
        assert json.loads(told)["choices"][0]["meta_info"]["spec_accept_length"] >= 1
    elif "/v1/chat/completions" in example:
        assert chat_text(told).endswith("#### 47")
    elif "/generate" in example:
        answer = json.loads(told)
        assert answer["text"]
        particles = answer["meta_info"].get("spec_smc_particles")
        assert bool(particles) == ("return_particles" in example)
    else:
        assert json.loads(told)["success"]
