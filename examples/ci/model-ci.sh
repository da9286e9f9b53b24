#!/usr/bin/env bash
# Whether a model still exports, answers and runs as well as it did: the steps of model.yml, for any CI and for a terminal.
#
#   model-ci.sh keep SOURCE KEPT         once, and whenever the yardstick is to move: make what later runs are held against
#   model-ci.sh check SOURCE KEPT OUT    export, verify, bench and compare; OUT holds the results, whatever the outcome
#
# EXPORT_FLAGS, BENCH_FLAGS and COMPARE_FLAGS go to the commands of those names. The first two must be the same for both.
set -euo pipefail

usage() {
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

read -ra export_flags <<<"${EXPORT_FLAGS:-}"
read -ra bench_flags <<<"${BENCH_FLAGS:-}"
read -ra compare_flags <<<"${COMPARE_FLAGS:-}"

say() { printf '\n== %s\n' "$*" >&2; }

keep() {
    local source=$1 kept=$2
    mkdir -p "$kept"
    say "export"
    llorch export "$source" --output "$kept/model" "${export_flags[@]}"
    say "verify against the source's own logits (needs the extra reference)"
    llorch verify "$kept/model" --against "$source" --write-reference "$kept/reference"
    say "bench"
    llorch bench "$kept/model" --reference "$kept/reference" "${bench_flags[@]}" --json >"$kept/bench.json"
    rm -r "$kept/model"
}

check() {
    local source=$1 kept=$2 out=$3
    mkdir -p "$out"
    say "export"
    llorch export "$source" --output "$out/model" "${export_flags[@]}"
    say "verify"
    llorch verify "$out/model" --reference "$kept/reference" --json | tee "$out/verify.json"
    say "bench"
    llorch bench "$out/model" --reference "$kept/reference" "${bench_flags[@]}" \
        --html "$out/bench.html" --markdown "$out/bench.md" --json >"$out/bench.json"
    say "compare"
    llorch bench compare "$kept/bench.json" "$out/bench.json" "${compare_flags[@]}" | tee "$out/compare.txt"
}

case "${1:-}:$#" in
keep:3) keep "$2" "$3" ;;
check:4) check "$2" "$3" "$4" ;;
*) usage ;;
esac
