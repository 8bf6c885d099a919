#!/usr/bin/env bash
# One command for a GPU machine without a network; CONTRIBUTING.md, "On a GPU", says what it needs.
#
#     bash bench/gpu/run.sh [STAGE...] [--minutes 9] [--dry-run]     # --help lists all
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
if [[ " $* " =~ \ (--dry-run|--help|-h|--list|report|checkout|pack)\  ]]; then
    exec "$python" bench/gpu "$@" # nothing runs on a GPU
fi
site=${SG_SITE:-${TMPDIR:-/tmp}/sglang-smc-site}
mkdir -p "$site"
# Once each: kernels that an earlier machine compiled, before a payload compiles them, too.
for name in jit triton; do
    archive=.sg/$name.tar.xz
    [[ -e $archive ]] || continue
    if [[ ! -e $site/.$name.sum || $(<"$site/.$name.sum") != "$(cksum "$archive")" ]]; then
        mkdir -p "$site/.$name"
        tar -C "$site/.$name" -xJf "$archive"
        cksum "$archive" >"$site/.$name.sum"
    fi
done
# What else `.sg` holds: a payload by its own program, and wheels.
shopt -s nullglob
others=(! -name '*.txt' ! -name '*.md' ! -name jit.tar.xz ! -name triton.tar.xz)
state=$({ find .sg -type f "${others[@]}" -exec cksum {} + 2>/dev/null || true; } | sort)
wheels=(.sg/*.whl)
if [[ ! -e $site/.state || $(<"$site/.state") != "$state" ]]; then
    if [[ -e .sg/assemble.py ]]; then
        "$python" .sg/assemble.py .sg --site "$site"
    fi
    if ((${#wheels[@]})); then
        "$python" -m pip install --quiet --no-deps --no-index --upgrade --target "$site" "${wheels[@]}"
    fi
    echo "$state" >"$site/.state"
fi
# Plugins and commands are found by entry points of installed packages; these run from the tree.
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' sglang_smc/__init__.py)
for folder in . tools; do
    name=$(sed -n 's/^name = "\(.*\)"/\1/p' "$folder/pyproject.toml")
    rm -rf "$site/${name//-/_}"-*.dist-info
    information=$site/${name//-/_}-$version.dist-info
    mkdir "$information"
    printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "$name" "$version" >"$information/METADATA"
    sed -n '/^\[project.entry-points/,/^$/ { s/project.entry-points."\(.*\)"/\1/; s/"//g; p }' \
        "$folder/pyproject.toml" >"$information/entry_points.txt"
done
if [[ -e $site/env.sh ]]; then
    # shellcheck disable=SC1091
    source "$site/env.sh"
fi
# What is compiled here comes back with the results, without what Triton passes through.
export SGLANG_JIT_CACHE_DIR="$site/.jit" TRITON_CACHE_DIR="$site/.triton" TRITON_STORE_BINARY_ONLY=1
export PYTHONPATH="$PWD:$PWD/tools:$site${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" bench/gpu --state "$site/state" --spent "$SECONDS" "$@"
