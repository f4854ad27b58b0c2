#!/usr/bin/env bash
# Runs the tests of the Triton kernels and all benchmarks of a GPU in less than 10 minutes:
#
#   benchmarks/gpu.sh [FOLDER]
#
# JSON and Markdown files, and what each part printed, go to FOLDER (docs/results/gpu if none is given). A part that
# fails stops no other; the last lines say which did, and the exit status is 1 then, 2 where nothing can be measured.
# PYTHON chooses the interpreter, PARTS some of the parts: PARTS="kernels reductions" benchmarks/gpu.sh
# BUDGET gives other seconds: a machine that compiles all kernels for the first time may need more.

set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${1:-$root/docs/results/gpu}
PYTHON=${PYTHON:-python3}
PARTS=${PARTS:-tests kernels kernels-large reductions steps compiled cuda-graphs captured overlap}

mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
cd "$root" || exit 2
export PYTHON out
export PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1
unset TRITON_INTERPRET

BUDGET=${BUDGET:-560} # seconds for all parts; one that needs its whole limit leaves less to those after it
summary=()
failures=0

# part NAME SECONDS COMMAND...: runs a command and remembers how it ended.
part() {
    local name=$1 limit=$2 started=$SECONDS status=0 result=passed
    shift 2
    [[ " $PARTS " == *" $name "* ]] || return 0
    echo "== $name"
    ((limit <= BUDGET - SECONDS)) || limit=$((BUDGET > SECONDS ? BUDGET - SECONDS : 1))
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
    tail -n 40 "$out/$name.log"
    case $status in
    0) ;;
    124 | 137) result="FAILED: not done in $limit s" ;;
    *) result="FAILED: status $status" ;;
    esac
    ((status == 0)) || ((failures += 1))
    summary+=("$name: $result, $((SECONDS - started)) s; $name.log")
}

# benchmark NAME SECONDS MODULE OPTION...: a part that leaves NAME.json and NAME.md.
benchmark() {
    local name=$1 limit=$2 module=$3
    shift 3
    part "$name" "$limit" "$PYTHON" -m "benchmarks.$module" "$@" --json "$out/$name.json" --markdown "$out/$name.md"
}

# Most of their time goes into compiling: several processes, where pytest-xdist is there. Warnings of other versions of
# packages than those that development pins are no failures.
run_tests() {
    shopt -s globstar
    local several=() files=(
        tests/kernels/test_triton_*.py tests/core/**/test_gpu_*.py tests/core/codecs/test_deferred_check.py
    )
    "$PYTHON" -c "import xdist" 2>/dev/null && several=(-n "$(nproc)")
    "$PYTHON" -m pytest -q -p no:cacheprovider -W default "${several[@]}" "${files[@]}"
}
export -f run_tests

"$PYTHON" -m benchmarks.gpu_needs
case $? in
0) ;;
1) summary+=("packages: FAILED: some are missing, see the first lines") failures=1 ;;
*) exit 2 ;;
esac

# 256 M elements are the size at which encoding shall move .8 of what a copy moves.
part tests 170 bash -c run_tests
benchmark kernels 90 kernels --device cuda
benchmark kernels-large 90 kernels --device cuda --dtype bf16 --elements $((1 << 28))
benchmark reductions 70 reductions
benchmark steps 150 gpu_steps
# To compile a model takes 30 s, and 90 with DAF.
benchmark compiled 180 gpu_steps --sizes roberta-base:128x512 --methods daf-4bit --compile default
benchmark cuda-graphs 180 gpu_steps --sizes roberta-base:32x128 --methods daf-4bit --compile reduce-overhead
benchmark captured 60 gpu_steps --sizes roberta-base:32x128 --methods daf-exact daf-4bit --capture
part overlap 60 "$PYTHON" -m benchmarks.overlap --device cuda --batch 32 --workers 4 --json "$out/overlap.json"

printf '# GPU run\n\n' >"$out/summary.md"
printf -- '- %s\n' "${summary[@]}" >>"$out/summary.md"
cat "$out/summary.md"
exit $((failures > 0))
