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
"$python" bench/gpu/unpack.py "$site"
# shellcheck disable=SC1091
source "$site/env.sh"
exec "$python" bench/gpu --state "$site/state" --spent "$SECONDS" "$@"
