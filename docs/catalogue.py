"""Print the catalogue of hooks on SGLang: what each changes, why, and when it can go."""

from sglang_smc.server import hooks

_HEAD = """\
# Hooks on SGLang

No SGLang file is changed: SGLang's plugin registry applies these hooks at run time, and each stands
here because no stock seam does the same. A server does not start if one of its hooks is not in
force. Which seams would let them go: patches/README.md.
"""


def catalogue() -> str:
    """Return all hooks as Markdown, by group."""
    parts = [_HEAD]
    for group in hooks.GROUPS:
        parts.append(f"\n## {group.where}\n\n{group.when}\n")
        parts += map(_entry, hooks.recorded(group))
    return "".join(parts)


def _entry(patch: hooks.Patch) -> str:
    source = patch.function.__module__.removeprefix("sglang_smc.").replace(".", "/")
    what = patch.what or " ".join((patch.function.__doc__ or "").split())
    return f"""
### `{patch.target.rpartition("srt.")[2]}`

{patch.hook_type.name}, in `{source}.py`.

- **What:** {what}
- **Why:** {patch.why}
- **Relies on:** {"; ".join(patch.relies_on)}
- **Releases:** {patch.family.name}
- **Retire when:** {patch.retire_when}
"""


if __name__ == "__main__":
    print(catalogue(), end="")
