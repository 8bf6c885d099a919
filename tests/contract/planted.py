"""A tiny SGLang and a tiny project that asks things of it, in which tests plant breaks."""

from pathlib import Path

from contract.shape import ASYNC_GENERATOR, COROUTINE, Symbol
from contract.upstream import ours
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
        return build(**dict(size=1, device="cpu"))

    async def wait(self, obj):
        return obj

    async def stream(self, obj):
        yield obj

    @classmethod
    def made(cls, size):
        return cls(size)


@dataclass
class Info:
    length: int
    name: str = ""


def build(size, device="cpu"):
    return Owner(size)
"""

PATH = "planted.owner."
SYMBOLS = (
    Symbol(PATH + "Owner.__init__", "self size * device"),
    Symbol(PATH + "Owner", "size * device", attributes="table kv? held rank plain"),
    Symbol(PATH + "Owner.plain", "self * obj flag", calls="worker.update", passes="size device"),
    Symbol(PATH + "Owner.wait", "self obj", kind=COROUTINE),
    Symbol(PATH + "Owner.stream", "self", kind=ASYNC_GENERATOR),
    Symbol(PATH + "Owner.made", "size"),
    Symbol(PATH + "Info", "length", attributes="__dataclass_fields__ length"),
    Symbol(PATH + "build", "size"),
)

# Of SGLang: a path and its text; the class of the server arguments in both of the ways it had.
SGLANG = {
    "owner.py": OWNER,
    "srt/server_args.py": """
        import dataclasses

        @dataclasses.dataclass
        class ServerArgs:
            model_path: str
            tp_size: int = 1

            def check(self):
                self.seen = True
    """,
    "srt/pool.py": "class Pool:\n    def free(self, rows, keep=0): ...\n",
    "srt/backends/one.py": """
        class Backend:
            def __init__(self, pool):
                self.table = pool.req_to_token
    """,
    "api.py": "from sglang.srt import pool\nfrom .owner import *\n",
}

STRUCT_ARGS = {
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
    """,
}

# Of the project.
PROJECT = {
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
        REQUIREMENTS = (Requirement("tp_size", (1,), "why"),)
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
        )
    """,
    "tests/test_it.py": 'TARGET = "sglang.srt.pool.Pool"\n',
}

JUDGED = (
    Judged(SERVER_ARGS, frozenset({"model_path", "tp_size"}), "field"),
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
    sources = ours.sources(folder / "project")
    tree = Tree(folder / "release")
    return findings(tree, Asked((), sources, JUDGED, ("sglang.srt.backends.",)))
