"""A tiny SGLang of two releases, and a tiny project that asks things of them.

Tests plant breaks in all of it.
"""

from pathlib import Path

from contract.shape import ASYNC_GENERATOR, COROUTINE, Symbol
from contract.upstream import ours, release
from contract.upstream.check import SERVER_ARGS, Asked, Finding, Judged, findings
from contract.upstream.tree import Tree

OWNER = """
from dataclasses import dataclass


class Base:
    def __init__(self, size, *, device="cpu"):
        self.size = size
        self.kv = None
        self.held, self.rank = 0, 1


class Owner(Base):
    table: dict = {}

    def plain(self, obj, *, flag=False):
        self.worker.update(obj)
        self.worker.later(obj.update)
        return build(**dict(size=1, device="cpu"))

    async def wait(self, obj):
        return obj

    async def stream(self, obj):
        yield obj

    @classmethod
    def made(cls, size):
        return cls(size)


@dataclass(slots=True)
class Info:
    length: int
    name: str | None = None


def build(size, device="cpu"):
    return Owner(size)
"""

PATH = "planted.owner."
SYMBOLS = (
    Symbol(PATH + "Owner.__init__", "self size * device"),
    Symbol(PATH + "Owner", "size * device", attributes="table kv? held rank plain"),
    Symbol(
        PATH + "Owner.plain",
        "self * obj flag",
        calls="worker.update",
        passes="size device",
        hands_on="obj.update",
    ),
    Symbol(PATH + "Owner.wait", "self obj", kind=COROUTINE),
    Symbol(PATH + "Owner.stream", "self", kind=ASYNC_GENERATOR),
    Symbol(PATH + "Owner.made", "size"),
    Symbol(PATH + "Info", "length", attributes="__dataclass_fields__ length name?"),
    Symbol(PATH + "build", "size"),
)

# Of SGLang: a path and its text.
_EVERY = {
    "owner.py": OWNER,
    "srt/pool.py": "class Pool:\n    def free(self, rows, keep=0): ...\n",
    "srt/backends/one.py": """
        class Backend:
            def __init__(self, pool):
                self.table = pool.req_to_token
    """,
    "api.py": "from sglang.srt import pool\nfrom .owner import *\n",
}

# The server arguments in both of the ways that they had, and a thing that was moved.
OLDER = {
    **_EVERY,
    "_version.py": "__version__ = version = '0.1.0'\n",
    "srt/server_args.py": """
        import dataclasses

        @dataclasses.dataclass
        class ServerArgs:
            model_path: str
            tp_size: int = 1

            def check(self):
                self.seen = True
    """,
    "srt/request.py": """
        class Request:
            def __init__(self):
                self.row = 0

        class Retired:
            def leave(self): ...
    """,
}

NEWER = {
    **_EVERY,
    "_version.py": "__version__ = version = '0.2.1+local'\n",
    "srt/server_args.py": """
        import msgspec
        from sglang.srt.fields import collect_input_fields
        from sglang.srt.fields.model import Model
        from sglang.srt.fields.parallel import Parallel

        class ServerArgs:
            def check(self):
                self.seen = True

        _SPACES = [Model, Parallel]
        _annotations = collect_input_fields(_SPACES)
        ServerArgs = msgspec.defstruct("ServerArgs", list(_annotations), namespace=vars(ServerArgs))
    """,
    "srt/fields/__init__.py": "def collect_input_fields(sources): ...\n",
    "srt/fields/model.py": "import msgspec\nclass Model(msgspec.Struct):\n    model_path: str\n",
    "srt/fields/parallel.py": """
        import msgspec

        class Parallel(msgspec.Struct):
            tp_size: int = 1
            cp_size: int = 1
    """,
    "srt/request.py": """
        class Request:
            def __init__(self):
                self.slots = 0

        def row_of(slots, *, key): ...
    """,
}
RELEASES = {"older": OLDER, "newer": NEWER}

# Of the project.
UPSTREAM = """
import sglang
from sglang.srt.request import Request

SUPPORTED = ("0.1.0", "0.2.1")

# 0.2.0 was never supported.
IS_NEWER = Version(version.__version__) >= Version("0.2.0")


def row(request: Request):
    if not IS_NEWER:
        return request.row
    from sglang.srt.request import row_of

    return row_of(request.slots, key=0)
"""
PROJECT = {
    "sglang_smc/upstream.py": UPSTREAM,
    "sglang_smc/worker.py": """
        from typing import TYPE_CHECKING

        import sglang
        from sglang.api import Owner, pool
        from sglang.srt.pool import Pool
        from sglang.srt.server_args import ServerArgs

        def read(owner: "Owner | None", args: ServerArgs) -> None:
            owner.held += args.tp_size
            Owner(1, device="cpu")
            Owner.made(1)
            pool.Pool()

        class Mine(Pool):
            def free(self, rows, keep=0):
                super().free(rows, keep=keep)

        class Yours(Mine):
            def free(self, rows, keep=0): ...
    """,
    "sglang_smc/server/requirements.py": """
        REQUIREMENTS = (
            Requirement("tp_size", (1,), "why"),
            Requirement("cp_size", (1,), "why", NEWER),
        )
    """,
    "patches/wait.py": """
        _OWNER = "sglang.owner.Owner."

        def wait(original, owner, obj): ...

        def for_each(output):
            def hook(original, owner, *args, **kwargs): ...
            return hook

        PATCHES = (
            Patch(target=_OWNER + "wait", function=wait),
            Patch(target=_OWNER + "plain", function=for_each(1)),
            Patch(target="sglang.srt.request.Retired.leave", function=wait, family=upstream.OLDER),
        )
    """,
    "tests/test_it.py": 'TARGET = "sglang.srt.pool.Pool"\n',
}


def judged(newer: bool) -> tuple[Judged, ...]:
    """What somebody has looked at; the older release has not all of it."""
    settings = frozenset({"model_path", "tp_size", "cp_size"})
    elsewhere: frozenset[str] = frozenset() if newer else frozenset({"cp_size"})
    return (
        Judged(SERVER_ARGS, settings, "field", elsewhere),
        Judged("sglang.srt.pool.Pool", frozenset({"free"}), "method"),
    )


def write(root: Path, files: dict[str, str]) -> None:
    """Put files into a folder, each with the indentation of its first line taken away."""
    for name, text in files.items():
        lines = text.strip("\n").split("\n")
        margin = len(lines[0]) - len(lines[0].lstrip())
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line[margin:] for line in lines) + "\n")


def found_in(folder: Path, sglang: dict[str, str], project: dict[str, str]) -> list[Finding]:
    """What differs between a project and an SGLang."""
    write(folder / "release" / "sglang", {"__init__.py": "", **sglang})
    write(folder / "project", project)
    version = release.version_of(folder / "release")
    newer = release.is_newer(version, folder / "project")
    sources = ours.sources(newer, folder / "project")
    tree = Tree(folder / "release")
    return findings(tree, Asked((), sources, judged(newer), ("sglang.srt.backends.",)))
