"""A tiny SGLang of two releases, a tiny project that asks things of them, and breaks to plant."""

from pathlib import Path
from textwrap import dedent

from contract.upstream import ours, release
from contract.upstream.check import SERVER_ARGS, Asked, Finding, findings
from contract.upstream.relied import read
from contract.upstream.sglang import Tree

Files = dict[str, str]  # their texts, by path
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

RELIED = """
owner.Owner(size * device): table kv? held rank plain
    .__init__(self size * device)
    .plain(self * obj flag) | calls worker.update | passes size device
        | hands on obj.update
    .wait(self obj) | kind coroutine
    .stream(self) | kind async generator
    .made(size)
owner.Info(length): __dataclass_fields__ length name?
owner.build(size)
"""

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

        class ServerArgs: ...

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
    "patches/wait.py": """
        _OWNER = "sglang.owner.Owner."

        @PATCHES.on(_OWNER + "wait")
        async def wait(original, owner, obj): ...

        @PATCHES.on("sglang.srt.request.Retired.leave", family=upstream.OLDER)
        def leave(original, owner): ...

        @PATCHES.on(_OWNER + "plain", "owner.py:27 (why)")
        @for_each(1)
        def hook(original, owner, *args, **kwargs): ...
    """,
    "tests/test_it.py": 'TARGET = "sglang.srt.pool.Pool"\n',
}


JUDGED = (SERVER_ARGS,), ("sglang.srt.pool.Pool",)


def write(root: Path, files: Files) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).strip("\n") + "\n")


def found_in(folder: Path, sglang: Files, project: Files, known: bool = False) -> list[Finding]:
    """What differs between a project and an SGLang, which the project may not know yet."""
    write(folder / "release" / "sglang", {"__init__.py": "", **sglang})
    write(folder / "known" / "sglang", {"__init__.py": "", **NEWER})
    write(folder / "project", project)
    of = release.families(release.version_of(folder / "release"), folder / "project")
    sources = ours.sources(of, folder / "project")
    may_keep = ("sglang.srt.backends.",)
    asked = Asked(tuple(read(RELIED)), sources, *JUDGED, may_keep)
    return findings(Tree(folder / "release"), asked, Tree(folder / "known") if known else None)


PARALLEL = "srt/fields/parallel.py"
POOL = "srt/pool.py"
ME = "sglang_smc/upstream.py"

# What breaks: a file, what of it becomes what, and what is then said where. Of a file of the
# project that is asked of the older release, and of the newer; None: nothing.
BREAKS: list[tuple[str, str | None, str, str, str | tuple[str | None, str | None]]] = [
    (POOL, None, "", "names", "sglang.srt.pool.Pool is gone"),
    ("api.py", "*", "Base", "names", "sglang.api.Owner is gone"),
    (POOL, "class Pool", "class Rows", "names", "sglang.api.pool"),
    ("owner.py", "def wait", "def wait_for", "hooks", "sglang.owner.Owner.wait"),
    ("owner.py", "wait(self, obj)", "wait(self, obj, x)", "hooks", "only ("),
    ("owner.py", "wait(self, obj)", "wait(obj, self)", "hooks", "only ("),
    ("owner.py", "async def wait", "def wait", "hooks", "is no coroutine"),
    ("owner.py", "*, device", "*, place", "calls", "unexpected keyword argument 'device'"),
    ("owner.py", "size, *,", "size, rank, *,", "calls", "missing a required argument: 'rank'"),
    ("owner.py", "def made(cls, size)", "def made(cls)", "calls", "too many positional arguments"),
    (POOL, "keep=0", "held=0", "calls", "unexpected keyword argument 'keep'"),
    (POOL, "rows, keep=0", "rows, keep=0, x=0", "overrides", "our method"),
    (POOL, "rows, keep=0", "slots, keep=0", "overrides", "our method"),
    ("owner.py", "self.held", "self.kv.held", "attributes", "Owner has no held"),
    (POOL, "class Pool", "class Rows", "to judge", "sglang.srt.pool.Pool is gone"),
    (POOL, "...", "self.t = x.req_to_token", "req_to_token", "srt.pool"),
    ("owner.py", "def build(", "def build_it(", "relied on", "build is missing"),
    ("owner.py", "class Info", "class Information", "relied on", "Info is missing"),
    ("owner.py", "size, *, device", "size, *, place", "relied on", "takes no keyword device"),
    ("owner.py", "(size, device", "(device, size", "relied on", "not first (size)"),
    ("owner.py", "wait(self, obj)", "wait(self, *, obj)", "relied on", "not first (self obj)"),
    ("owner.py", "async def wait", "def wait", "relied on", "is now plain, not coroutine"),
    ("owner.py", "yield obj", "return obj", "relied on", "is now coroutine, not async generator"),
    ("owner.py", "self.held, self.rank", "self.kv.held, self.rank", "relied on", "has no held"),
    ("owner.py", "self.held, self.rank", "held, self.rank", "relied on", "has no held"),
    ("owner.py", "self.kv = None", "self.kv = Info(0)", "relied on", "never sets kv to None"),
    ("owner.py", "str | None = None", 'str = ""', "relied on", "never sets name to None"),
    ("owner.py", "length: int", "size: int", "relied on", "Info has no length"),
    ("owner.py", "@dataclass(slots=True)", "", "relied on", "Info has no __dataclass_fields__"),
    ("owner.py", "self.worker.update", "self.runner.update", "relied on", "not call worker.update"),
    ("owner.py", "(obj.update", "(obj.load", "relied on", "does not hand on obj.update"),
    ("owner.py", "dict(size=1", "dict(rank=0, size=1", "relied on", "passes not just these"),
    ("owner.py", "size=1, ", "", "relied on", "passes not just these keywords"),
    ("owner.py", "def build(size, device", "build = 0\ndef o(size, device", "relied on", "no func"),
    (ME, "request.row\n", "request.line\n", "attributes", ("Request has no line", None)),
    (ME, "request.slots", "request.line", "attributes", (None, "Request has no line")),
    (ME, "key=0", "name=0", "calls", (None, "missing a required argument: 'key'")),
    (ME, "import row_of", "import rows", "names", (None, "request.rows is gone")),
    (ME, "if not IS_NEWER", "if request", "attributes", ("has no slots", "has no row")),
    (ME, "not IS_NEWER", "IS_NEWER", "attributes", ("has no slots", "has no row")),
]

# What a release that is not supported yet has otherwise than the newest that is.
CHANGES = [
    ("owner.py", "return obj", "return [obj]", "changed", "Owner.wait"),  # a hook's target
    ("owner.py", "return cls(size)", "return cls(0)", "changed", "Owner.made"),  # counted on
    (POOL, "def free", "def keep", "overrides", "Pool.free is gone"),
    (PARALLEL, "tp_size", "x: int; tp_size", "to judge", "new field ServerArgs.x"),
    (POOL, "def free", "def keep", "to judge", "new method Pool.keep"),
]

# A file of ours, and the names of one letter that it uses on the older and the newer release.
BRANCHES = {
    "f if IS_NEWER else g": ("g", "f"),
    "f if not upstream.IS_NEWER else g": ("f", "g"),
    "if IS_NEWER and y: f\nelse: g": ("g", "fgy"),
    "if IS_NEWER or y: f\nelse: g": ("fgy", "f"),
    "if y: f\nelif NEWER.is_installed: g": ("fy", "fgy"),
    "if upstream.OLDER.is_installed:\n f": ("f", ""),
    "def h():\n if IS_NEWER: return f\n g": ("g", "f"),
    "def h():\n if IS_NEWER: g\n f": ("f", "fg"),
    "for x in y:\n if not IS_NEWER: g": ("gxy", "xy"),
    "if IS_LATER: f": ("f", "f"),
    "x = P(a), P(b, OLDER), P(c, family=upstream.NEWER)": ("Pabx", "Pacx"),
    "if not IS_NEWER: pytest.skip('no')\nf": ("", "f"),
    "if y: return\nf": ("fy", "fy"),
}


def broken(files: Files, file: str, old: str | None, new: str) -> Files:
    if old is None:
        return {other: text for other, text in files.items() if other != file}
    assert files[file].count(old) == 1
    return {**files, file: files[file].replace(old, new)}
