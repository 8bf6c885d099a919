"""Check what speculative decoding must not change: a table of features by server.

    .venv/bin/python bench/conformance                        # ready-made servers, on this CPU
    .venv/bin/python bench/conformance --only 'smc-*'         # ours
    .venv/bin/python bench/conformance --url http://host:30000 --name "my server"
    .venv/bin/python bench/conformance --url http://host:8000 --params '{"top_k": 0}'  # llama.cpp

Each feature has a check by law or by value, which fails on a correct server with probability 1e-5
at most. A server may be any with OpenAI's completions route; what it answers with HTTP 400 is
*refused*, and what it has no route for is left out. The same command continues where it stopped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import study
from conformance.checks.registry import BASE, CHECKS, FeatureCheck
from conformance.server import AbsentError, CheckedServer, WrongError, open_server
from results import markdown_table, provenance
from study import Log

from sglang_smc_tools.demo.serving import Launch, ServerError, reason_in, running
from sglang_smc_tools.testing.client import RefusedError
from sglang_smc_tools.testing.model import PLAIN

for _group in ("sampling", "stopping", "structure", "outputs", "service"):
    importlib.import_module(f"conformance.checks.{_group}")

HERE = Path(__file__).parent
PAGE = study.REPOSITORY / "docs" / "coming-from-sglang.md"
MARKS = "<!-- features by bench/conformance -->", "<!-- end of features -->"
NO_ANSWER = "no answer"
ENDING = 10.0  # seconds in which a server notices that its scheduler is gone
SIGNS = {"ok": "✓", "refused": "refused", "wrong": "**wrong**", "absent": "-"}

TARGET = study.PAIR / "target"
HEAD = {"speculative_draft_model_path": str(study.PAIR / "eagle3")}
DRAFT = {"speculative_draft_model_path": str(study.PAIR / "draft")}
TREE = {
    "speculative_num_steps": 4,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 8,
}
CPU = {
    "device": "cpu",
    "dtype": "float32",
    "context_length": 1024,
    "max_total_tokens": 32_768,
    "max_running_requests": 32,
    "log_level": "error",
}
#: What a server is started with, beside its algorithm, for the checks of a variant.
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {
        "enable_custom_logit_processor": True,
        "enable_priority_scheduling": True,
        # Most JSON of a model that never read any is whitespace.
        "constrained_json_disable_any_whitespace": True,
    },
    "thinking": {
        "enable_custom_logit_processor": True,
        "reasoning_parser": "qwen3",
        "tool_call_parser": "hermes",
    },
    "strict thinking": {"enable_strict_thinking": True, "reasoning_parser": "qwen3"},
    "lora": {},
    "hidden states": {"enable_return_hidden_states": True},
    # SGLang takes embeddings in 16 bits alone.
    "embeddings": {"disable_radix_cache": True, "dtype": "bfloat16"},
}
#: Variants of a model that thinks.
SCRIPTED = ("thinking", "strict thinking")


class CheckedEngine(NamedTuple):
    """A ready-made server.

    Attributes:
        own: settings of its requests' ``custom_params``.
        thinks: whether its draft can be one of the scripted model.
    """

    name: str
    arguments: Mapping[str, Any]
    own: Mapping[str, Any] = {}
    is_exact: bool = True
    thinks: bool = True

    @property
    def slug(self) -> str:
        return study.slug_of(self.name)


def _ours(mode: str, **more: Any) -> CheckedEngine:
    arguments = {"speculative_algorithm": "SMC", "speculative_num_steps": 4, **DRAFT}
    arguments |= {"speculative_smc_num_particles": 4}
    own = {"smc": {"mode": "exact" if mode == "off" else mode, **more}}
    return CheckedEngine(f"SMC {mode}", arguments, own, is_exact=mode in ("exact", "off"))


ENGINES = (
    CheckedEngine("SGLang", {}),
    CheckedEngine("EAGLE-3", {"speculative_algorithm": "EAGLE3", **HEAD, **TREE}, thinks=False),
    CheckedEngine("STANDALONE", {"speculative_algorithm": "STANDALONE", **DRAFT, **TREE}),
    CheckedEngine("NGRAM", {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}),
    _ours("exact"),
    _ours("auto"),
    _ours("smc"),
    _ours("off", num_steps=0),
)


class FeatureVerdict(NamedTuple):
    """What a check found: `SIGNS` has the verdicts."""

    feature: str
    verdict: str
    told: str


def judge(check: FeatureCheck, server: CheckedServer) -> FeatureVerdict:
    """Return the verdict of a check; an answer that is none is wrong, too."""
    try:
        return FeatureVerdict(check.feature, "ok", check.run(server))
    except AbsentError as error:
        return FeatureVerdict(check.feature, "absent", f"lacks {error}")
    except RefusedError as error:
        return FeatureVerdict(check.feature, "refused", str(error))
    except WrongError as error:
        return FeatureVerdict(check.feature, "wrong", str(error))
    except httpx.HTTPError as error:
        return FeatureVerdict(check.feature, "wrong", f"{NO_ANSWER}: {error}")
    except (ValueError, LookupError, TypeError) as error:
        if "HTTP 404" in str(error):
            return FeatureVerdict(check.feature, "absent", f"lacks the route: {error}")
        return FeatureVerdict(check.feature, "wrong", f"{NO_ANSWER}: {error!r}")


class ServerEndedError(Exception):
    """A check has ended its server."""


def is_alive(server: CheckedServer) -> bool:
    """Return whether a server still answers; one whose scheduler is gone does for seconds."""
    try:
        return server.client.http.get("/v1/models").is_success
    except httpx.HTTPError:
        return False


class ConformanceStudy:
    """The checks of all engines, a file for each engine and variant."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder: Path = options.output_dir
        self.checks = study.matching(CHECKS, options.features)

    def log(self, slug: str, variant: str) -> Log:
        identity = study.code_fingerprint() | {"checks": study.digest(HERE.rglob("*.py"))}
        name = f"{slug}-{variant.replace(' ', '-')}.jsonl"
        return Log(self.folder / name, identity | {"server": slug, "variant": variant})

    def start_anew(self, slug: str) -> None:
        """Drop what the folder has of a server."""
        for variant in VARIANTS:
            self.log(slug, variant).drop()

    def verdicts(self, slug: str) -> dict[str, FeatureVerdict]:
        """Return what the folder has of a server, by feature."""
        found = [
            FeatureVerdict(**entry) for name in VARIANTS for entry in self.log(slug, name).read()
        ]
        return {one.feature: one for one in found}

    def left(self, slug: str, variant: str) -> list[FeatureCheck]:
        """Return the selected checks of a variant that have no verdict yet."""
        there = self.verdicts(slug)
        return [one for one in self.checks if one.variant == variant and one.feature not in there]

    def run(self, slug: str, variant: str, server: CheckedServer) -> None:
        """Run the checks that are left on a running server, until one of them ends it.

        Raises ServerEndedError behind that one, whose verdict is written.
        """
        left = self.left(slug, variant)
        with (
            self.log(slug, variant).writing() as write,
            study.bar(total=len(left), desc=f"{slug}, {variant}", disable=None) as line,
        ):
            for check in left:
                found = judge(check, server)
                if found.verdict == "wrong" and NO_ANSWER in found.told:
                    time.sleep(ENDING)
                lives = is_alive(server)
                if not lives:
                    found = found._replace(verdict="wrong", told=f"the server ends: {found.told}")
                write(found._asdict())
                line.update()
                line.write(f"{SIGNS[found.verdict]:10} {found.feature}: {found.told[:160]}")
                if not lives:
                    raise ServerEndedError(check.feature)

    def refuse(self, slug: str, variant: str, reason: str) -> None:
        """Write a verdict for the checks of a variant whose server does not start."""
        with self.log(slug, variant).writing() as write:
            for check in self.left(slug, variant):
                write(FeatureVerdict(check.feature, "refused", f"at start: {reason}")._asdict())

    def measure(self, engines: Sequence[CheckedEngine], variant: str) -> None:
        """Start one server for engines of equal arguments, and check each."""
        waiting = [one for one in engines if self.left(one.slug, variant)]
        if not waiting:
            return
        if variant in SCRIPTED and not waiting[0].thinks:
            for one in waiting:
                self._leave_out(one.slug, variant)
            return
        log = self.folder / f"{waiting[0].slug}-{variant.replace(' ', '-')}.log"
        arguments = arguments_of(waiting[0], variant, self.folder)
        name = f"{waiting[0].name} ({variant})"
        try:
            with running(Launch(arguments, label=name, log=log)) as (url,):
                for one in waiting:
                    self.run(one.slug, variant, _opened(url, one, variant, arguments))
        except ServerEndedError:
            self.measure(engines, variant)  # the other checks, on a new server
        except ServerError as error:
            reason = reason_in(log.read_text(errors="replace"), str(error))
            for one in waiting:
                self.refuse(one.slug, variant, reason)

    def _leave_out(self, slug: str, variant: str) -> None:
        with self.log(slug, variant).writing() as write:
            for check in self.left(slug, variant):
                write(
                    FeatureVerdict(check.feature, "absent", "lacks a head of this model")._asdict()
                )


def arguments_of(engine: CheckedEngine, variant: str, folder: Path) -> dict[str, Any]:
    """Return the arguments of a ready-made server; models that it needs are made."""
    arguments = {**CPU, "model_path": str(TARGET), **engine.arguments, **VARIANTS[variant]}
    if variant in SCRIPTED:
        from conformance.scripted import thinking_model

        arguments["model_path"] = thinking_model(folder / "scripted" / "target", 30.0)
        if "speculative_draft_model_path" in arguments:
            draft = thinking_model(folder / "scripted" / "draft", 4.0)
            arguments["speculative_draft_model_path"] = draft
    if variant == "lora":
        from audit.adapters import make_adapter

        adapter = make_adapter(folder / "adapter", str(TARGET), rank=4, seed=1)
        arguments["lora_paths"] = [f"adapter={adapter}"]
    return arguments


def _opened(
    url: str, engine: CheckedEngine, variant: str, arguments: Mapping[str, Any]
) -> CheckedServer:
    return open_server(
        url,
        own=engine.own,
        is_exact=engine.is_exact,
        folder=Path(arguments["model_path"]),
        adapter="adapter" if variant == "lora" else "",
    )


def by_launch(engines: Sequence[CheckedEngine]) -> list[list[CheckedEngine]]:
    """Return engines that one server serves, together."""
    found: list[list[CheckedEngine]] = []
    for engine in engines:
        if found and found[-1][0].arguments == engine.arguments:
            found[-1].append(engine)
        else:
            found.append([engine])
    return found


def table_of(
    columns: Mapping[str, Mapping[str, FeatureVerdict]], checks: Sequence[FeatureCheck]
) -> str:
    """Return features by server; empty cells were not checked."""
    lines = []
    for check in checks:
        cells = [verdicts.get(check.feature) for verdicts in columns.values()]
        lines.append([check.feature, *(SIGNS[one.verdict] if one else "" for one in cells)])
    return markdown_table(["", *columns], lines)


def differing(table: str) -> str:
    """Return the rows of a table in which servers differ, with one column for all modes of SMC."""
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
    )
    ours = [place for place, name in enumerate(head) if name.startswith("SMC ")]
    others = [place for place in range(len(head)) if place not in ours]
    lines = []
    for row in rows:
        modes = list(dict.fromkeys(row[place] for place in ours))
        cells = [*(row[place] for place in others), ", ".join(modes)]
        if len(set(cells[1:])) > 1:
            lines.append(cells)
    return markdown_table([*(head[place] for place in others), "SMC, all modes"], lines)


def reasons_of(columns: Mapping[str, Mapping[str, FeatureVerdict]]) -> str:
    """Return an item for each verdict other than *ok*, with what was seen."""
    return "\n".join(
        f"- {name}, {one.feature}: {one.verdict}: {' '.join(one.told.split())[:300]}"
        for name, verdicts in columns.items()
        for one in verdicts.values()
        if one.verdict != "ok"
    )


def run(options: argparse.Namespace) -> None:
    """Do what the options select."""
    if options.list:
        print(*(one.slug for one in ENGINES), "", *(one.slug for one in CHECKS), sep="\n")
        return
    study.prepare_folder(options.output_dir)
    this = ConformanceStudy(options)
    if options.url:
        _run_url(this, options)
        return
    engines = study.selected(ENGINES, options.only)
    if options.fresh:
        for engine in engines:
            this.start_anew(engine.slug)
    for group in by_launch(engines):
        for variant in VARIANTS:
            this.measure(group, variant)
    _write(this, {one.name: this.verdicts(one.slug) for one in engines})


def _run_url(this: ConformanceStudy, options: argparse.Namespace) -> None:
    params = json.loads(options.params or "{}")
    server = open_server(options.url, options.api_key, params)
    try:
        server.complete(server.prompts[0], 1)
    except ValueError as error:
        raise study.BenchError(
            f"A plain request has no answer: {error}\nIt turns filters off by {json.dumps(PLAIN)}; "
            "give by --params what this server wants instead, as '{\"top_k\": 0}'."
        ) from error
    slug = study.slug_of(options.name)
    if options.fresh:
        this.start_anew(slug)
    this.run(slug, BASE, server)
    _write(this, {options.name: this.verdicts(slug)})


def _write(this: ConformanceStudy, columns: Mapping[str, Mapping[str, FeatureVerdict]]) -> None:
    """Print the table, write the page, and publish both if asked."""
    table = table_of(columns, this.checks)
    page = f"{table}\n\n{reasons_of(columns)}\n"
    (this.folder / "conformance.md").write_text(page)
    print(page)
    if not this.options.publish:
        return
    folder = study.PUBLISHED / "conformance"
    study.copy([*this.folder.glob("*.jsonl"), this.folder / "conformance.md"], folder)
    origin = provenance({"checks": len(this.checks)})
    (folder / "provenance.json").write_text(json.dumps(origin, indent=2) + "\n")
    study.write_between(PAGE, MARKS, differing(table))


def main(argv: Sequence[str] | None = None) -> int:
    """Check the servers; return exit status 0 if it completes."""
    made = study.parser("conformance", "What speculation must not change: features by server.")
    add = made.add_argument
    add("--url", help="of a running server, in place of the ready-made ones")
    add("--name", default="this server", help="its name in the table")
    add("--api-key", help="of that server")
    add("--params", help="a JSON object of fields for each of its requests")
    add("--features", nargs="+", default=["*"], metavar="PATTERN", help="slugs of checks")
    study.add_selection(made)
    options = made.parse_args(argv)
    return study.main_of(lambda: run(options), study.GOES_ON)
