#!/usr/bin/env bash
# One command for a GPU machine without a network; CONTRIBUTING.md, "On a GPU", says what it needs.
#
#     bash bench/gpu/run.sh [STAGE...] [--minutes 9] [--dry-run]     # --help lists all
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
if [[ " $* " =~ \ (--dry-run|--help|-h|--list|report)\  ]]; then
    exec "$python" bench/gpu "$@" # nothing runs on a GPU
fi
site=${SG_SITE:-${TMPDIR:-/tmp}/sglang-smc-site}
mkdir -p "$site"
# What `.sg` holds is unpacked once: a payload by its own program, and wheels.
shopt -s nullglob
state=$({ find .sg -type f ! -name '*.txt' ! -name '*.md' -exec cksum {} + 2>/dev/null || true; } | sort)
wheels=(.sg/*.whl)
if [[ ! -e $site/.state || $(<"$site/.state") != "$state" ]]; then
    if [[ -e .sg/jit.tar.xz ]]; then # kernels that an earlier machine compiled
        mkdir -p "$site/.jit"
        tar -C "$site/.jit" -xJf .sg/jit.tar.xz
    fi
    if [[ -e .sg/assemble.py ]]; then
        "$python" .sg/assemble.py .sg --site "$site"
    fi
    if [[ -n ${OUT:-} && -d $site/.jit && ! -e .sg/jit.tar.xz ]]; then
        tar -C "$site/.jit" -cJf "$OUT/jit.tar.xz" .
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
export PYTHONPATH="$PWD:$PWD/tools:$site${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" bench/gpu --state "$site/state" --spent "$SECONDS" "$@"
