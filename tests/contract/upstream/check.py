"""Everything that this project asks of SGLang, compared with the source of one release of it."""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from contract.upstream import ours
from contract.upstream.relied import Symbol
from contract.upstream.sglang import (
    Function,
    Parameter,
    Parameters,
    Tree,
    is_dataclass,
    node_of,
    signature,
)

KEEPS_TABLE = re.compile(r"self\.[\w.]+(?: *:[^=\n]+)? = [\w.()]*\breq_to_token$", re.M)
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"


class Finding(NamedTuple):
    """One thing that differs."""

    group: str
    what: str
    ours: str = ""  # file and line of who asks
    upstream: str = ""  # file and line of what is asked


class Judged(NamedTuple):
    """A class of SGLang's of whose every field or method somebody has said what it means to SMC."""

    path: str
    names: frozenset[str]
    of: str  # "field" or "method"


class Asked(NamedTuple):
    symbols: tuple[Symbol, ...]
    sources: list[ours.Source]
    judged: tuple[Judged, ...]
    may_keep_table: tuple[str, ...]  # beginnings of modules that may


def findings(tree: Tree, asked: Asked, known: Tree | None = None) -> list[Finding]:
    """What is broken, and what nobody has judged, in the order in which it is shown.

    ``known`` is the newest supported release, of one that is not supported: what went since then
    and whose body changed, somebody has to read.
    """
    own = [source for source in asked.sources if source.is_product]
    others = [source for source in asked.sources if source.path not in _PLANTED]
    heirs = ours.heirs(own)
    hooks = [hook for source in own for hook in ours.hooks(source)]
    found = [
        *(f for symbol in asked.symbols for f in _of_symbol(tree, symbol)),
        *(f for hook in hooks for f in _of_hook(tree, hook)),
        *_of_names(tree, (use for source in others for use in ours.names(source))),
        *(f for s in asked.sources for use in ours.calls(s) for f in _of_call(tree, use)),
        *(f for use in ours.super_calls(heirs) for f in _of_super_call(tree, use)),
        *(f for heir in heirs for f in _of_overrides(tree, heir)),
        *_of_reads(tree, (read for source in own for read in ours.attribute_reads(source))),
        *(f for judged in asked.judged for f in _unjudged(tree, judged)),
        *_table_keepers(tree, asked.may_keep_table),
    ]
    if known is not None:
        found += _gone(tree, known, asked.judged, own)
        found += [f for hook in hooks for f in _changed(tree, known, hook)]
    return list(dict.fromkeys(found))


# What these name is nowhere, or on some release.
_PLANTED = {f"tests/contract/{name}.py" for name in ("planted", "test_upstream", "upstream/judged")}


def _of_symbol(tree: Tree, symbol: Symbol) -> Iterator[Finding]:
    found = tree.find(symbol.path)
    parameters = None if found is None or found.is_alias else tree.parameters(found)
    if found is None and symbol.path.endswith(".__init__"):  # generated, or another package's
        found = tree.find(symbol.path.removesuffix(".__init__"))
        taken = None if found is None or not found.is_class else tree.parameters(found)
        parameters = None if taken is None else (Parameter("self", "either"), *taken)
    if found is None:
        line = f"{symbol.path} is missing"
        yield Finding("relied on", line, upstream=tree.nearest(symbol.path))
    elif not found.is_alias:
        for line in _breaches(tree, symbol, found, parameters):
            yield Finding("relied on", f"{symbol.path} {line}", upstream=tree.place(found))


def _breaches(tree: Tree, symbol: Symbol, found: Any, actual: Parameters | None) -> Iterator[str]:
    if symbol.parameters is not None:
        before, _, behind = symbol.parameters.partition("*")
        expected = before.split()
        if actual is None:
            yield "is no function"
        elif _positional(actual)[: len(expected)] != expected:
            yield f"takes ({text_of(actual)}), not first ({' '.join(expected)})"
        for name in behind.split():
            if actual is not None and not takes_keyword(actual, name):
                yield f"takes no keyword {name}"
    stores = tree.attributes(found) if symbol.attributes else {}
    for word in symbol.attributes.split():
        name = word.rstrip("?")
        if name not in stores:
            yield f"has no {name}"
        elif word != name and not stores[name]:
            yield f"never sets {name} to None"
    node = node_of(found)
    if isinstance(node, Function):
        kind = _kind(node)
        if symbol.kind and kind != symbol.kind:
            yield f"is now {kind or 'plain'}, not {symbol.kind}"
        yield from _of_body(symbol, node)


def _kind(node: Function) -> str:
    if not isinstance(node, ast.AsyncFunctionDef):
        return ""
    is_generator = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node))
    return "async generator" if is_generator else "coroutine"


def _of_body(symbol: Symbol, body: ast.AST) -> Iterator[str]:
    calls = [node for node in ast.walk(body) if isinstance(node, ast.Call)]
    dicts = [node for node in ast.walk(body) if isinstance(node, ast.Dict)]
    given = (value for c in calls for value in (*c.args, *(k.value for k in c.keywords)))
    for verb, ends, there in (
        ("call", symbol.calls, {ast.unparse(call.func) for call in calls}),
        ("hand on", symbol.hands_on, {ast.unparse(value) for value in given}),
    ):
        for end in ends.split():
            if not any(name == end or name.endswith(f".{end}") for name in there):
                yield f"does not {verb} {end}"
    passed = [{keyword.arg for keyword in call.keywords if keyword.arg} for call in calls]
    passed += [{k.value for k in d.keys if isinstance(k, ast.Constant)} for d in dicts]
    if symbol.passes and set(symbol.passes.split()) not in passed:
        yield f"passes not just these keywords to anything: {symbol.passes}"


def _positional(parameters: Parameters) -> list[str]:
    return [p.name for p in parameters if p.kind in ("position", "either")]


def takes_keyword(parameters: Parameters, name: str) -> bool:
    named = ("either", "keyword")
    return any(p.kind == "**" or (p.name == name and p.kind in named) for p in parameters)


def _takes_any(parameters: Parameters) -> bool:
    return any(p.kind == "*" for p in parameters)


def text_of(parameters: Parameters) -> str:
    return " ".join((p.kind if "*" in p.kind else "") + p.name for p in parameters)


def _of_hook(tree: Tree, hook: ours.Hook) -> Iterator[Finding]:
    found = tree.find(hook.target)
    if found is None:
        cls = tree.own(hook.target.removesuffix(".__init__"))
        # A dataclass's constructor is generated, and can be hooked. A struct's is C's own.
        if cls is None or not cls.is_class or not is_dataclass(cls):
            near = tree.nearest(hook.target)
            yield Finding("hooks", f"{hook.target} is gone", hook.place, near)
    elif not found.is_alias and found.is_function and hook.takes is not None:
        theirs = signature(node_of(found))
        if not accepts_all(hook.takes, theirs) or _swaps(hook.takes, theirs):
            line = f"{hook.target} takes ({text_of(theirs)}), its hook only ({text_of(hook.takes)})"
            yield Finding("hooks", line, hook.place, tree.place(found))
        if hook.is_async and not isinstance(node_of(found), ast.AsyncFunctionDef):
            line = f"{hook.target} is no coroutine, as its hook is"
            yield Finding("hooks", line, hook.place, tree.place(found))


def accepts_all(mine: Parameters, theirs: Parameters) -> bool:
    """Whether a function of ours, called as SGLang's is, would take all that may be given."""
    if not _takes_any(mine):
        enough = len(_positional(mine)) >= len(_positional(theirs))
        if not enough or _takes_any(theirs):
            return False
    named = [p.name for p in theirs if p.kind == "keyword"]
    return all(takes_keyword(mine, name) for name in named)


def _swaps(mine: Parameters, theirs: Parameters) -> bool:
    """Whether a parameter of both stands at another place with us."""
    at = {name: place for place, name in enumerate(_positional(theirs))}
    return any(at.get(name, place) != place for place, name in enumerate(_positional(mine)))


def _of_names(tree: Tree, uses: Iterable[ours.Use]) -> Iterator[Finding]:
    known: dict[str, bool] = {}
    for use in uses:
        path = use.path.removesuffix(".*")
        if path not in known:
            known[path] = _is_there(tree, path)
        if not known[path]:
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
    if around.is_alias or not around.is_class:
        return around.is_alias or not around.is_module
    return name in tree.attributes(around) or not tree.is_closed(around)


def _of_call(tree: Tree, use: ours.Use) -> Iterator[Finding]:
    found = tree.own(use.path)
    if found is not None:
        is_method = found.is_function and found.parent.is_class
        if not is_method or found.labels & {"classmethod", "staticmethod"}:
            yield from _misfit(tree, use, found, tree.parameters(found))


def _of_super_call(tree: Tree, use: ours.Use) -> Iterator[Finding]:
    base, _, name = use.path.rpartition(".")
    owner, found = tree.own(base), tree.own(use.path)
    if owner is None or not owner.is_class:
        return
    if name == "__init__":
        yield from _misfit(tree, use, owner, tree.parameters(owner))
    elif found is not None and found.is_function:
        yield from _misfit(tree, use, found, signature(node_of(found))[1:])
    elif tree.find(use.path) is None:
        yield Finding("calls", f"{use.path} is gone", use.place, tree.place(owner))


def _misfit(
    tree: Tree, use: ours.Use, found: Any, parameters: Parameters | None
) -> Iterator[Finding]:
    assert isinstance(use.node, ast.Call)
    if parameters is not None:
        for line in _misfits(use.node, parameters):
            yield Finding("calls", f"{use.path} {line}", use.place, tree.place(found))


def _misfits(call: ast.Call, parameters: Parameters) -> Iterator[str]:
    """What a call gives that is not taken, and what it leaves out."""
    given = {keyword.arg for keyword in call.keywords if keyword.arg}
    for name in sorted(given):
        if not (takes_keyword(parameters, name) or _is_ours(name)):
            yield f"takes no keyword {name}"
    places = _positional(parameters)
    is_spread = any(isinstance(a, ast.Starred) for a in call.args)
    if not is_spread and len(call.args) > len(places) and not _takes_any(parameters):
        yield f"takes {len(places)} by position, is given {len(call.args)}"
    if is_spread or any(k.arg is None for k in call.keywords):
        return
    filled = {*places[: len(call.args)], *given}
    missing = [
        p.name for p in parameters if not p.optional and "*" not in p.kind and p.name not in filled
    ]
    if missing:
        yield f"wants {' '.join(missing)}"


def _of_overrides(tree: Tree, heir: ours.Heir) -> Iterator[Finding]:
    """Methods of ours that take the place of SGLang's."""
    for name, method in heir.methods.items():
        path = next((f"{base}.{name}" for base in heir.bases if tree.find(f"{base}.{name}")), "")
        found = tree.own(path) if path and name != "__init__" else None
        if found is not None and found.is_function:
            mine, theirs = signature(method), signature(node_of(found))
            by_name = (p.name for p in theirs[1:] if p.kind in ("either", "keyword"))
            renames = not all(takes_keyword(mine, each) for each in by_name)
            if not accepts_all(mine, theirs) or renames:
                line = f"{path} takes ({text_of(theirs)}), our method ({text_of(mine)})"
                yield Finding("overrides", line, heir.source.place(method), tree.place(found))


def _of_reads(tree: Tree, reads: Iterable[tuple[str, ours.Use]]) -> Iterator[Finding]:
    for path, use in reads:
        found = tree.own(path)
        if found is not None and found.is_class and tree.is_closed(found):
            is_known = use.path in tree.attributes(found) or use.path.endswith("__")
            if not is_known and not _is_ours(use.path):
                line = f"{path} has no {use.path}"
                yield Finding("attributes", line, use.place, tree.place(found))


def _is_ours(name: str) -> bool:
    """Whether it is something that this package adds: a flag, or its state of a request."""
    return name.startswith(("speculative_smc_", "smc_", "_smc_"))


def _present(tree: Tree, judged: Judged) -> dict[str, str] | None:
    """What a class has, and where; None where it is gone."""
    found = tree.find(judged.path)
    if found is None:
        return None
    if judged.of == "field":
        return {name: field.place for name, field in tree.fields(found).items()}
    members = ((name, m) for name, m in found.members.items() if isinstance(node_of(m), Function))
    return {name: tree.place(member) for name, member in members if not name.startswith("__")}


def _unjudged(tree: Tree, judged: Judged) -> Iterator[Finding]:
    now = _present(tree, judged)
    if now is None:
        yield Finding("to judge", f"{judged.path} is gone", upstream=tree.nearest(judged.path))
        return
    owner = judged.path.rpartition(".")[2]
    for name, place in now.items():
        if name not in judged.names:
            yield Finding("to judge", f"new {judged.of} {owner}.{name}", "", place)


def _gone(
    tree: Tree, known: Tree, judged: Iterable[Judged], own: list[ours.Source]
) -> Iterator[Finding]:
    """Fields, and methods that ours override, that the newest supported release has alone."""
    refused = {use.path: use.place for s in own for use in ours.requirement_fields(s)}
    heirs = ours.heirs(own)
    for each in judged:
        overriding = {
            name: heir.source.place(method)
            for heir in heirs
            for name, method in heir.methods.items()
            if each.path in heir.bases
        }
        mine = refused if each.of == "field" else overriding
        before, now = _present(known, each) or {}, _present(tree, each) or {}
        for name in sorted((before.keys() & each.names) - now.keys()):
            if each.of == "field" or name in mine:
                line = f"no {each.of} {each.path.rpartition('.')[2]}.{name} any more"
                yield Finding("to judge", line, mine.get(name, ""), before[name])


def nowhere(trees: Iterable[Tree], judged: Iterable[Judged]) -> Iterator[Finding]:
    """Names that somebody has judged and that are in no supported release."""
    trees = list(trees)
    for each in judged:
        there = {name for tree in trees for name in _present(tree, each) or {}}
        for name in sorted(each.names - there):
            line = f"{each.path.rpartition('.')[2]}.{name} is in no supported release"
            yield Finding("to judge", line)


def _changed(tree: Tree, known: Tree, hook: ours.Hook) -> Iterator[Finding]:
    """Functions that a hook was written against, and that read otherwise by now."""
    for path in {hook.target, *(known.around(line) for line in hook.relies_on)} - {""}:
        before, now = known.find(path), tree.find(path)
        if now is not None and before is not None and _code(before) != _code(now):
            yield Finding("changed", f"{path} is not as it was", hook.place, tree.place(now))


def _code(found: Any) -> str:
    node = node_of(found)
    return ast.unparse(node) if isinstance(node, Function) else ""


def _table_keepers(tree: Tree, may: tuple[str, ...]) -> Iterator[Finding]:
    """Classes that keep `req_to_token`, the tensor: the worker puts another into the pool."""
    for path in sorted((tree.root / "sglang" / "srt").rglob("*.py")):
        name = ".".join(path.relative_to(tree.root).with_suffix("").parts)
        if name.startswith(may) or "req_to_token\n" not in (text := path.read_text("utf-8")):
            continue
        for keeps in KEEPS_TABLE.finditer(text):
            line = f"{name} keeps the tensor req_to_token: from before the worker's exchange?"
            number = text.count("\n", 0, keeps.start()) + 1
            place = f"{path.relative_to(tree.root)}:{number}"
            yield Finding("req_to_token", line, upstream=place)
