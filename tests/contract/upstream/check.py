"""Everything that this project asks of SGLang, compared with the source of one release of it."""

import ast
import re
from collections.abc import Iterable, Iterator
from inspect import Signature
from typing import Any, NamedTuple

from contract.upstream import ours
from contract.upstream.relied import Symbol
from contract.upstream.sglang import (
    Function,
    Import,
    Thing,
    Tree,
    is_dataclass,
    signature,
    without_first,
)

KEEPS_TABLE = re.compile(r"self\.[\w.]+(?: *:[^=\n]+)? = [\w.()]*\breq_to_token$", re.M)
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
# What these name is nowhere, or on some release.
PLANTED = {f"tests/contract/{name}.py" for name in ("planted", "test_upstream", "upstream/judged")}


class Finding(NamedTuple):
    group: str
    what: str
    ours: str = ""  # file and line of who asks
    upstream: str = ""  # file and line of what is asked


class Asked(NamedTuple):
    symbols: tuple[Symbol, ...]
    sources: list[ours.Source]
    fields: tuple[str, ...]  # classes whose new ones are to be judged
    methods: tuple[str, ...]  # likewise
    may_keep_table: tuple[str, ...]  # beginnings of modules that may


def findings(tree: Tree, asked: Asked, known: Tree | None = None) -> list[Finding]:
    """What is broken, and what nobody has judged, in the order in which it is shown.

    ``known`` is the newest supported release, of one that is not supported: what came and went
    since then and whose body changed, somebody has to read.
    """
    own = [source for source in asked.sources if source.is_product]
    heirs = ours.heirs(own)
    hooks = [hook for source in own for hook in ours.hooks(source)]
    found = [
        *(f for symbol in asked.symbols for f in _of_symbol(tree, symbol)),
        *(f for hook in hooks for f in _of_hook(tree, hook)),
        *(f for s in asked.sources if s.path not in PLANTED for f in _of_names(tree, s)),
        *(f for s in asked.sources for use in ours.calls(s) for f in _of_call(tree, use)),
        *(f for use in ours.super_calls(heirs) for f in _of_call(tree, use, of_super=True)),
        *(f for heir in heirs for f in _of_overrides(tree, heir, known)),
        *(f for s in own for read in ours.attribute_reads(s) for f in _of_read(tree, *read)),
        *(f for path in asked.fields for f in _new(tree, known, path, "field")),
        *(f for path in asked.methods for f in _new(tree, known, path, "method")),
        *_table_keepers(tree, asked.may_keep_table),
    ]
    if known is not None:
        found += [f for hook in hooks for f in _changed(tree, known, hook)]
    return list(dict.fromkeys(found))


def _of_symbol(tree: Tree, symbol: Symbol) -> Iterator[Finding]:
    found = tree.find(symbol.path)
    if found is None:
        line = f"{symbol.path} is missing"
        yield Finding("relied on", line, upstream=tree.nearest(symbol.path))
    elif not found.is_a(Import):
        for line in _breaches(tree, symbol, found):
            yield Finding("relied on", f"{symbol.path} {line}", upstream=found.place)


def _breaches(tree: Tree, symbol: Symbol, found: Thing) -> Iterator[str]:
    taken = tree.signature(found)
    if symbol.parameters is not None and taken is None:
        yield "is no function"
    elif symbol.parameters is not None and taken is not None:
        before, _, behind = symbol.parameters.partition("*")
        expected = before.split()
        if positional(taken)[: len(expected)] != expected:
            yield f"takes {taken}, not first ({' '.join(expected)})"
        for name in behind.split():
            if refused(taken, (), [name], whole=False):
                yield f"takes no keyword {name}"
    stores = tree.attributes(found) if symbol.attributes else {}
    for word in symbol.attributes.split():
        name = word.rstrip("?")
        if name not in stores:
            yield f"has no {name}"
        elif word != name and not stores[name]:
            yield f"never sets {name} to None"
    if found.is_a(Function):
        kind = _kind(found.node)
        if symbol.kind and kind != symbol.kind:
            yield f"is now {kind or 'plain'}, not {symbol.kind}"
        yield from _of_body(symbol, found.node)


def _kind(node: ast.AST) -> str:
    yields = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node))
    is_async = isinstance(node, ast.AsyncFunctionDef)
    return ("async generator" if yields else "coroutine") if is_async else ""


def _of_body(symbol: Symbol, body: ast.AST) -> Iterator[str]:
    calls = [node for node in ast.walk(body) if isinstance(node, ast.Call)]
    dicts = [node for node in ast.walk(body) if isinstance(node, ast.Dict)]
    given = (value for c in calls for value in (*c.args, *(k.value for k in c.keywords)))
    for verb, ends, there in (
        ("call", symbol.calls, {ast.unparse(call.func) for call in calls}),
        ("hand on", symbol.hands_on, {ast.unparse(value) for value in given}),
    ):
        for end in ends.split():
            if not any(f".{name}".endswith(f".{end}") for name in there):
                yield f"does not {verb} {end}"
    passed = [{keyword.arg for keyword in call.keywords if keyword.arg} for call in calls]
    passed += [{k.value for k in d.keys if isinstance(k, ast.Constant)} for d in dicts]
    if symbol.passes and set(symbol.passes.split()) not in passed:
        yield f"passes not just these keywords to anything: {symbol.passes}"


def positional(taken: Signature) -> list[str]:
    return [p.name for p in taken.parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]


def refused(taken: Signature, args: Iterable[Any], names: Iterable[str], whole: bool) -> str:
    """Why a call does not fit, of which all arguments are known or not; "" if it does."""
    try:
        (taken.bind if whole else taken.bind_partial)(*args, **dict.fromkeys(names))
    except TypeError as error:
        return str(error)
    return ""


def takes_all(mine: Signature, theirs: Signature, by_name: bool) -> bool:
    """Whether a function of ours takes the fullest call that SGLang's does, and by name, too."""
    each = theirs.parameters.values()
    plain = positional(theirs)
    named = [p.name for p in each if p.kind == p.KEYWORD_ONLY]
    more = range(99 * any(p.kind == p.VAR_POSITIONAL for p in each))
    whole = not any(p.kind == p.VAR_KEYWORD for p in each)
    first = sum(p.kind == p.POSITIONAL_ONLY for p in each) or 1
    calls = [([*plain, *more], named), *[(plain[:first], [*plain[first:], *named])] * by_name]
    return not any(refused(mine, args, names, whole) for args, names in calls)


def _of_hook(tree: Tree, hook: ours.Hook) -> Iterator[Finding]:
    found = tree.find(hook.target)
    if found is None:
        cls = tree.own(hook.target.removesuffix(".__init__"), ast.ClassDef)
        # A dataclass's constructor is generated, and can be hooked. A struct's is C's own.
        if cls is None or not is_dataclass(cls):
            near = tree.nearest(hook.target)
            yield Finding("hooks", f"{hook.target} is gone", hook.place, near)
    elif found.is_a(Function) and hook.function is not None:
        mine = without_first(signature(hook.function))
        theirs = signature(found.node)
        at = {name: place for place, name in enumerate(positional(theirs))}
        swaps = any(at.get(name, place) != place for place, name in enumerate(positional(mine)))
        if swaps or not takes_all(mine, theirs, by_name=False):
            line = f"{hook.target} takes {theirs}, its hook only {mine}"
            yield Finding("hooks", line, hook.place, found.place)
        if isinstance(hook.function, ast.AsyncFunctionDef) and not found.is_a(ast.AsyncFunctionDef):
            line = f"{hook.target} is no coroutine, as its hook is"
            yield Finding("hooks", line, hook.place, found.place)


def _of_names(tree: Tree, source: ours.Source) -> Iterator[Finding]:
    for use in ours.names(source):
        path = use.path.removesuffix(".*")
        if not _is_there(tree, path):
            yield Finding("names", f"{path} is gone", use.place, tree.nearest(path))


def _is_there(tree: Tree, path: str) -> bool:
    """Whether a name is there, as far as that can be told.

    An attribute of a function or a value cannot; of a class, all that `self` has counts.
    """
    if tree.find(path) is not None or path.endswith("__"):
        return True
    owner, _, name = path.rpartition(".")
    around = tree.find(owner)
    if around is None:
        return bool(owner) and _is_there(tree, owner)
    if around.is_a(ast.ClassDef):
        return name in tree.attributes(around) or not tree.is_closed(around)
    return not around.is_a(ast.Module)


def _of_call(tree: Tree, use: ours.Use, of_super: bool = False) -> Iterator[Finding]:
    """A call of ours that does not fit; by ``super()`` the first argument is given already."""
    path = use.path.removesuffix(".__init__") if of_super else use.path
    found = tree.own(path)
    taken = found and tree.signature(found)
    if of_super and tree.find(path) is None:
        owner = tree.own(path.rpartition(".")[0], ast.ClassDef)
        if owner is not None:
            yield Finding("calls", f"{use.path} is gone", use.place, owner.place)
    if found is None or taken is None:
        return
    taken = without_first(taken) if of_super and found.is_a(Function) else taken
    args = [a for a in use.node.args if not isinstance(a, ast.Starred)]
    keywords = [k.arg for k in use.node.keywords if k.arg]
    whole = len(args) + len(keywords) == len(use.node.args) + len(use.node.keywords)
    names = (name for name in keywords if not _is_ours(name))
    if why := refused(taken, args, names, whole):
        yield Finding("calls", f"{use.path}{taken}: {why}", use.place, found.place)


def _of_overrides(tree: Tree, heir: ours.Heir, known: Tree | None) -> Iterator[Finding]:
    """Methods of ours that take the place of SGLang's, or that nobody calls any more."""
    for name, method in heir.methods.items():
        paths = [f"{base}.{name}" for base in heir.bases if name != "__init__"]
        found = _first(tree, paths)
        place = heir.source.use("", method).place
        before = known and _first(known, paths)
        if found is None and before:
            line = f"{before.path} is gone, and so is our method's caller"
            yield Finding("overrides", line, place, before.place)
        elif found is not None and found.is_a(Function):
            mine = signature(method)
            theirs = signature(found.node)
            if not takes_all(mine, theirs, by_name=True):
                line = f"{found.path} takes {theirs}, our method {mine}"
                yield Finding("overrides", line, place, found.place)


def _first(tree: Tree, paths: list[str]) -> Thing | None:
    return next(filter(None, map(tree.find, paths)), None)


def _of_read(tree: Tree, owner: str, use: ours.Use) -> Iterator[Finding]:
    found = tree.own(owner, ast.ClassDef)
    if found is not None and tree.is_closed(found):
        is_known = use.path in tree.attributes(found) or use.path.endswith("__")
        if not is_known and not _is_ours(use.path):
            yield Finding("attributes", f"{owner} has no {use.path}", use.place, found.place)


def _is_ours(name: str) -> bool:
    """Whether it is something that this package adds: a flag, or its state of a request."""
    return name.startswith(("speculative_smc_", "smc_", "_smc_"))


def _new(tree: Tree, known: Tree | None, path: str, kind: str) -> Iterator[Finding]:
    """Fields or methods of a class that the newest supported release does not have."""
    found = tree.find(path)
    before = known and known.find(path)
    if found is None:
        yield Finding("to judge", f"{path} is gone", "", tree.nearest(path))
    elif known and before:
        there = tree.fields(found) if kind == "field" else tree.methods(found)
        were = known.fields(before) if kind == "field" else known.methods(before)
        for name in there.keys() - were.keys():
            line = f"new {kind} {found.node.name}.{name}"
            yield Finding("to judge", line, "", there[name].place)


def _changed(tree: Tree, known: Tree, hook: ours.Hook) -> Iterator[Finding]:
    """Functions that a hook was written against, and that read otherwise by now."""
    for path in {hook.target, *(known.around(line) for line in hook.relies_on)} - {""}:
        before = known.own(path, Function)
        now = tree.own(path)
        if now and before and ast.unparse(before.node) != ast.unparse(now.node):
            yield Finding("changed", f"{path} is not as it was", hook.place, now.place)


def _table_keepers(tree: Tree, may: tuple[str, ...]) -> Iterator[Finding]:
    """Classes that keep `req_to_token`, the tensor: the worker puts another into the pool."""
    for path in sorted((tree.root / "sglang" / "srt").rglob("*.py")):
        file = path.relative_to(tree.root)
        name = ".".join(file.with_suffix("").parts)
        if name.startswith(may) or "req_to_token\n" not in (text := path.read_text("utf-8")):
            continue
        for keeps in KEEPS_TABLE.finditer(text):
            line = f"{name} keeps the tensor req_to_token: from before the worker's exchange?"
            number = text.count("\n", 0, keeps.start()) + 1
            yield Finding("req_to_token", line, upstream=f"{file}:{number}")
