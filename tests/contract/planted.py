"""A tiny SGLang of two releases, a tiny project that asks things of them, and breaks to plant."""

from pathlib import Path

from contract.upstream import ours, release
from contract.upstream.check import SERVER_ARGS, Asked, Finding, Judged, findings
from contract.upstream.relied import read
from contract.upstream.sglang import Tree

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

        async def wait(original, owner, obj): ...

        def leave(original, owner): ...

        def for_each(output):
            def hook(original, owner, *args, **kwargs): ...
            return hook

        PATCHES = (
            Patch(target=_OWNER + "wait", function=wait),
            Patch(target=_OWNER + "plain", function=for_each(1), relies_on=("owner.py:27 (why)",)),
            Patch(target="sglang.srt.request.Retired.leave", function=leave, family=upstream.OLDER),
        )
    """,
    "tests/test_it.py": 'TARGET = "sglang.srt.pool.Pool"\n',
}


JUDGED = (
    Judged(SERVER_ARGS, frozenset({"model_path", "tp_size", "cp_size"}), "field"),
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


def found_in(
    folder: Path, sglang: dict[str, str], project: dict[str, str], known: bool = False
) -> list[Finding]:
    """What differs between a project and an SGLang, which the project may not know yet."""
    write(folder / "release" / "sglang", {"__init__.py": "", **sglang})
    write(folder / "known" / "sglang", {"__init__.py": "", **NEWER})
    write(folder / "project", project)
    of = release.families(release.version_of(folder / "release"), folder / "project")
    asked = Asked(
        tuple(read(RELIED)), ours.sources(of, folder / "project"), JUDGED, ("sglang.srt.backends.",)
    )
    return findings(Tree(folder / "release"), asked, Tree(folder / "known") if known else None)


PARALLEL = "srt/fields/parallel.py"  # or else where the arguments are a dataclass

# What breaks in SGLang: a file, what of it changes to what, and what is then said where.
BREAKS = {
    "module moved": ("srt/pool.py", None, "", "names", "sglang.srt.pool.Pool is gone"),
    "no longer exported": ("api.py", "*", "Base", "names", "sglang.api.Owner is gone"),
    "gone from a module": ("srt/pool.py", "class Pool", "class Rows", "names", "sglang.api.pool"),
    "hook's target": ("owner.py", "def wait", "def wait_for", "hooks", "sglang.owner.Owner.wait"),
    "hook's parameters": ("owner.py", "wait(self, obj)", "wait(self, obj, x)", "hooks", "only ("),
    "hook's order": ("owner.py", "wait(self, obj)", "wait(obj, self)", "hooks", "only ("),
    "hooked coroutine": ("owner.py", "async def wait", "def wait", "hooks", "is no coroutine"),
    "keyword": ("owner.py", "*, device", "*, place", "calls", "takes no keyword device"),
    "left out": ("owner.py", "size, *,", "size, rank, *,", "calls", "wants rank"),
    "one too many": ("owner.py", "def made(cls, size)", "def made(cls)", "calls", "by position"),
    "super's keyword": ("srt/pool.py", "keep=0", "held=0", "calls", "takes no keyword keep"),
    "override": ("srt/pool.py", "rows, keep=0", "rows, keep=0, x=0", "overrides", "our method"),
    "override's name": ("srt/pool.py", "rows, keep=0", "slots, keep=0", "overrides", "our method"),
    "attribute": ("owner.py", "self.held", "self.kv.held", "attributes", "Owner has no held"),
    "new setting": (PARALLEL, "tp_size", "x: int; tp_size", "to judge", "new field ServerArgs.x"),
    "new method": ("srt/pool.py", "def free", "def keep", "to judge", "new method Pool.keep"),
    "table kept": ("srt/pool.py", "...", "self.t = x.req_to_token", "req_to_token", "srt.pool"),
    **{
        name: ("owner.py", old, new, "relied on", expected)
        for name, old, new, expected in (
            ("renamed", "def build(", "def build_it(", "build is missing"),
            ("class renamed", "class Info", "class Information", "Info is missing"),
            ("parameter gone", "size, *, device", "size, *, place", "takes no keyword device"),
            ("other order", "(size, device", "(device, size", "not first (size)"),
            ("keyword alone", "wait(self, obj)", "wait(self, *, obj)", "not first (self obj)"),
            ("no coroutine", "async def wait", "def wait", "is now plain, not coroutine"),
            ("returns", "yield obj", "return obj", "is now coroutine, not async generator"),
            (
                "moved to an inner object",
                "self.held, self.rank",
                "self.kv.held, self.rank",
                "no held",
            ),
            ("set on nothing", "self.held, self.rank", "held, self.rank", "has no held"),
            ("never None", "self.kv = None", "self.kv = Info(0)", "never sets kv to None"),
            ("field never None", "str | None = None", 'str = ""', "never sets name to None"),
            ("field gone", "length: int", "size: int", "Info has no length"),
            ("no dataclass", "@dataclass(slots=True)", "", "Info has no __dataclass_fields__"),
            ("calls another", "self.worker.update", "self.runner.update", "not call worker.update"),
            ("hands on another", "(obj.update", "(obj.load", "does not hand on obj.update"),
            ("passes more", "dict(size=1", "dict(rank=0, size=1", "passes not just these keywords"),
            ("passes less", "size=1, ", "", "passes not just these keywords"),
            (
                "no function",
                "def build(size, device",
                "build = 0\ndef o(size, device",
                "no function",
            ),
        )
    },
}

# What a release that is not supported yet has otherwise than the newest that is.
CHANGES = {
    "hook's target reads otherwise": (
        "owner.py",
        "return obj",
        "return [obj]",
        "changed",
        "Owner.wait",
    ),
    "what a hook counts on": (
        "owner.py",
        "return cls(size)",
        "return cls(0)",
        "changed",
        "Owner.made",
    ),
    "setting dropped": (
        PARALLEL,
        "tp_size",
        "x",
        "to judge",
        "no field ServerArgs.tp_size any more",
    ),
    "method dropped": (
        "srt/pool.py",
        "def free",
        "def keep",
        "to judge",
        "no method Pool.free any",
    ),
}

# What breaks in the project's branches on the release, and what of it the two releases hear.
BRANCH_BREAKS = {
    "older's attribute": ("request.row\n", "request.line\n", "Request has no line", None),
    "newer's attribute": ("request.slots", "request.line", None, "Request has no line"),
    "newer's keyword": ("key=0", "name=0", None, "takes no keyword name"),
    "newer's import": ("import row_of", "import rows", None, "request.rows is gone"),
    "no branch": ("if not IS_NEWER", "if request", "has no slots", "has no row"),
    "wrong way round": ("not IS_NEWER", "IS_NEWER", "has no slots", "has no row"),
}

# A file of ours, and what of it runs on the older and on the newer release.
BRANCHES = {
    "x = 1 if IS_NEWER else 2": ("x = 2", "x = 1"),
    "x = 1 if not upstream.IS_NEWER else 2": ("x = 1", "x = 2"),
    "if IS_NEWER and y: f()\nelse: g()": ("g()", "if y: f()\nelse: g()"),
    "if IS_NEWER or y: f()\nelse: g()": ("if y: f()\nelse: g()", "f()"),
    "if y: f()\nelif NEWER.is_installed: g()": ("if y: f()", "if y: f()\nelse: g()"),
    "if upstream.OLDER.is_installed:\n import a": ("import a", "pass"),
    "def f():\n if IS_NEWER: return 1\n g()": ("def f(): g()", "def f(): return 1"),
    "def f():\n if IS_NEWER: g()\n h()": ("def f(): h()", "def f():\n g()\n h()"),
    "for x in y:\n if not IS_NEWER: g(x)": ("for x in y: g(x)", "for x in y: pass"),
    "if IS_LATER: f()": ("if IS_LATER: f()", "if IS_LATER: f()"),
    "x = (P(a), P(b, OLDER), P(c, family=u.NEWER))": (
        "x = (P(a), P(b, OLDER))",
        "x = (P(a), P(c, family=u.NEWER))",
    ),
    "if not IS_NEWER: pytest.skip('no')\nimport a": ("pytest.skip('no')", "import a"),
    "if y: return\nf()": ("if y: return\nf()", "if y: return\nf()"),
}


def broken(sglang: dict[str, str], file: str, old: str | None, new: str) -> dict[str, str]:
    """SGLang with a break; the older release has its arguments elsewhere."""
    name = file if file in sglang else "srt/server_args.py"
    if old is None:
        return {other: text for other, text in sglang.items() if other != name}
    assert sglang[name].count(old) == 1
    return {**sglang, name: sglang[name].replace(old, new)}
