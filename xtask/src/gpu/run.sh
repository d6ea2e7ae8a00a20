#!/bin/sh
# Checks and measures the GPUs of this machine. Needs neither a network nor Rust; made by `cargo xtask gpu --bundle`.

usage() {
    cat <<'END'
usage: run.sh [--limit SECONDS] [--only PART,PART] [FOLDER]
  FOLDER            where the reports and logs go [default: $OUT, or ./report]
  --limit SECONDS   for everything together; each part has its own limit too [default: 570]
  --only PART,PART  of doctor, checks, nccl, bench, agreement, processes, training, torch [default: all]
The exit status is 0 when nothing failed; what could not be tried is named, and fails nothing.
DISTRIBUTE_NVRTC_LIBRARY and DISTRIBUTE_NCCL_LIBRARY name those libraries; otherwise the packages of PYTHON (python3) are asked.
END
}

limit=570
all=doctor,checks,nccl,bench,agreement,processes,training,torch
only=$all
folder=${OUT:-report}
while [ $# -gt 0 ]; do
    case $1 in
    --limit) limit=${2:?--limit needs seconds}; shift 2 ;;
    --only) only=${2:?--only needs names of parts}; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
    *) folder=$1; shift ;;
    esac
done
for name in $(printf '%s' "$only" | tr ',' ' '); do
    case ,$all, in *",$name,"*) ;; *) echo "run.sh: $name is none of $all" >&2; exit 2 ;; esac
done
here=$(cd "$(dirname "$0")" && pwd) || exit 2
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) || exit 2
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
began=$(date +%s)
failures=0
: >"$work/parts.json"
: >"$work/parts.txt"
python=${PYTHON:-python3}
PYTHONUNBUFFERED=1 PYTHONIOENCODING=utf-8 NO_COLOR=1
export PYTHONUNBUFFERED PYTHONIOENCODING NO_COLOR
: "${DISTRIBUTE_KERNEL_CACHE:=$work/kernels}"
export DISTRIBUTE_KERNEL_CACHE

# Runs the rest of the arguments for so many seconds at most.
limited() {
    seconds=$1
    shift
    if command -v timeout >/dev/null 2>&1; then timeout -k 5 "$seconds" "$@"; else "$@"; fi
}

# Text as the inside of a JSON string.
escaped() {
    printf '%s' "$1" | tr '\t\n\r' '   ' | tr -d '\000-\037' | sed 's/\\/\\\\/g; s/"/\\"/g'
}

# Lines of JSON as an array.
array() {
    printf '['
    sed -n '/^{.*}$/p' "$1" 2>/dev/null | sed '$!s/$/,/'
    printf ']'
}

# The end of a part: name, status, seconds, detail.
end() {
    line=$(printf '%-8s %-10s %4s s  %s' "$2" "$1" "$3" "$4" | cut -c1-400)
    printf '%s\n' "$line" | tee -a "$work/parts.txt"
    [ "$2" = FAILED ] && failures=$((failures + 1))
    [ -s "$work/parts.json" ] && printf ',\n' >>"$work/parts.json"
    printf '{"name": "%s", "status": "%s", "seconds": %s, "detail": "%s"}' \
        "$1" "$2" "$3" "$(escaped "$4")" >>"$work/parts.json"
}

skip() { case ,$only, in *",$1,"*) end "$1" skipped 0 "$2" ;; esac; }

# Runs a part: its name, its limit in seconds, its command. What it prints goes to its log.
part() {
    name=$1
    case ,$only, in *",$name,"*) ;; *) return ;; esac
    own=$2
    shift 2
    log=$folder/$name.log
    start=$(date +%s)
    left=$((limit - (start - began)))
    [ "$left" -lt "$own" ] && own=$left
    if [ "$own" -le 0 ]; then
        skip "$name" "the $limit s for everything are over"
        return
    fi
    limited "$own" "$@" >"$log" 2>&1 </dev/null
    code=$?
    took=$(($(date +%s) - start))
    last=$(sed '/^[[:space:]]*$/d' "$log" | tail -n 1)
    case $code in
    0)
        reason=$(sed -n 's/^skipped: //p' "$log" | head -n 1)
        if [ -n "$reason" ]; then end "$name" skipped "$took" "$reason"; else end "$name" passed "$took" "$last"; fi
        ;;
    124 | 137) end "$name" FAILED "$took" "stopped at its limit of $own s, behind: $last" ;;
    *)
        missing=$(sed -n 's/.*error while loading shared libraries: //p' "$log" | head -n 1)
        wrong=$(sed -n 's/^worker-[0-9]* │ //; /^FAILED\|^PROBLEM\|^error/p' "$log" | head -n 1)
        if [ "$code" = 127 ] && [ -n "$missing" ]; then
            end "$name" skipped "$took" "this machine lacks a library: $missing"
        else
            end "$name" FAILED "$took" "exit status $code: ${wrong:-$last}"
        fi
        ;;
    esac
}

# The folders of libraries in Python's packages of CUDA, one a line.
libraries=$(limited 30 "$python" - 2>/dev/null <<'END'
import importlib.util
import os

for name in ("cu13", "cuda_nvrtc", "nccl", "cublas", "curand", "cuda_runtime"):
    try:
        spec = importlib.util.find_spec("nvidia." + name)
    except ModuleNotFoundError:
        continue
    for folder in spec and spec.submodule_search_locations or []:
        if os.path.isdir(os.path.join(folder, "lib")):
            print(os.path.join(folder, "lib"))
END
)

# The first file of that pattern in those folders.
library() {
    printf '%s\n' "$libraries" | while IFS= read -r candidate; do
        for file in "$candidate"/$1; do
            [ -f "$file" ] && printf '%s\n' "$file" && return
        done
    done | head -n 1
}

if [ -z "${DISTRIBUTE_NVRTC_LIBRARY:-}" ]; then
    found=$(library 'libnvrtc.so.[0-9]*')
    [ -n "$found" ] && DISTRIBUTE_NVRTC_LIBRARY=$found && export DISTRIBUTE_NVRTC_LIBRARY
fi
if [ -z "${DISTRIBUTE_NCCL_LIBRARY:-}" ]; then
    found=$(library 'libnccl.so.[0-9]*')
    [ -n "$found" ] && DISTRIBUTE_NCCL_LIBRARY=$found && export DISTRIBUTE_NCCL_LIBRARY
fi
{
    uname -a
    ldd --version 2>/dev/null | head -n 1
    echo "NVRTC: ${DISTRIBUTE_NVRTC_LIBRARY:-neither named nor among the packages of $python; programs look for it themselves}"
    echo "NCCL: ${DISTRIBUTE_NCCL_LIBRARY:-neither named nor among the packages of $python; programs look for it themselves}"
    command -v timeout >/dev/null 2>&1 || echo "timeout is not installed: no part has a time limit"
    if command -v nvidia-smi >/dev/null 2>&1; then limited 30 nvidia-smi; else echo "nvidia-smi is not installed"; fi
} >"$folder/machine.log" 2>&1

part doctor 60 "$here/bin/distribute" doctor --verbose
part checks 240 "$here/bin/distribute-gpu-checks" --no-bench --report "$work/checks"
# Lets several ranks use one GPU, with few blocks each, since all of them must run at once.
shared="NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4 CUDA_DEVICE_MAX_CONNECTIONS=32"
nothing=$(sed -n 's/^skipped: //p' "$folder/checks.log" 2>/dev/null | head -n 1)
if [ -n "$nothing" ]; then
    for name in nccl bench agreement processes training torch; do skip "$name" "no GPU: see checks"; done
else
    # shellcheck disable=SC2086
    part nccl 90 env $shared "$here/bin/distribute-gpu-checks" --only nccl
    part bench 180 "$here/bin/distribute-gpu-checks" --bench-only --report "$work/bench"
    if [ -x "$here/bin/distribute-gpu-training" ]; then
        more=$(printf '%s' "$libraries" | tr '\n' ':')
        path=LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}${LD_LIBRARY_PATH:+:}$more
        part agreement 120 env "$path" "$here/bin/distribute-gpu-training" --check
        # shellcheck disable=SC2086
        part processes 120 env "$path" $shared "$here/bin/distribute" run --workers 2 -- \
            "$here/bin/distribute-gpu-training" --check --nccl
        part training 180 env "$path" "$here/bin/distribute-gpu-training"
    else
        for name in agreement processes training; do
            skip "$name" "not in this bundle, which was made without --candle"
        done
    fi
    if ! command -v "$python" >/dev/null 2>&1; then
        skip torch "$python is not installed"
    elif ! limited 60 "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' \
        >/dev/null 2>&1; then
        skip torch "$python has no torch"
    else
        part torch 240 "$python" "$here/torch_cuda.py"
    fi
fi

# Figures of a log as a table.
training() {
    sed -n 's/.*"framework": *"\([^"]*\)", *"model": *"\([^"]*\)", *"dtype": *"\([^"]*\)", *"batch": *\([0-9]*\), *"samples_per_second": *\([0-9]*\)[^,]*, *"step_ms": *\([0-9]*\.\{0,1\}[0-9]\{0,3\}\).*/\1|\2|\3|\4|\5|\6/p' \
        "$folder/training.log" "$folder/torch.log" 2>/dev/null | sort -t '|' -k 2,3 |
        while IFS='|' read -r framework model dtype batch rate step; do
            printf '%-12s %-14s %-12s %6s %12s %10s\n' "$model" "$dtype" "$framework" "$batch" "$rate" "$step"
        done
}
kernels() {
    sed -n 's/.*"what": *"\([^"]*\)".*"microseconds": *\([0-9]*\.\{0,1\}[0-9]\{0,1\}\).*"gigabytes_per_second": *\([0-9]*\.\{0,1\}[0-9]\{0,1\}\).*/\1|\2|\3/p' \
        "$folder/torch.log" 2>/dev/null |
        while IFS='|' read -r what time rate; do printf '%-58s %10s %10s\n' "$what" "$time" "$rate"; done
}
whole() { if [ -s "$1" ]; then cat "$1"; else printf null; fi; }

{
    printf '{"seconds": %s, "failures": %s,\n"parts": [\n' "$(($(date +%s) - began))" "$failures"
    cat "$work/parts.json"
    printf '\n],\n"checks": '
    whole "$work/checks/report.json"
    printf ',\n"bench": '
    whole "$work/bench/report.json"
    printf ',\n"training": '
    array "$folder/training.log"
    printf ',\n"torch": '
    array "$folder/torch.log"
    printf '}\n'
} >"$folder/report.json"

{
    head -n 4 "$folder/machine.log"
    sed -n '/ SMs, driver for CUDA /p' "$folder/checks.log" 2>/dev/null
    echo
    cat "$work/parts.txt"
    for name in checks nccl bench agreement processes; do
        sed -n 's/^worker-[0-9]* │ //; /^FAILED\|^PROBLEM/p' "$folder/$name.log" 2>/dev/null
    done | sort -u | head -n 20 | cut -c1-400
    sed -n '/ time µs/,/^$/p' "$folder/bench.log" 2>/dev/null
    kernels
    rows=$(training)
    if [ -n "$rows" ]; then
        printf '\n%-12s %-14s %-12s %6s %12s %10s\n%s\n' model dtype framework batch samples/s 'step ms' "$rows"
    fi
    sed -n '/^not measured/p' "$folder/training.log" 2>/dev/null | cut -c1-300
    echo
    if [ "$failures" = 0 ]; then echo "nothing failed"; else echo "$failures of the parts failed"; fi
} >"$folder/report.txt"

echo
# What is left of it for one that sees the end of the output only.
if [ "$(wc -c <"$folder/report.txt")" -gt 11000 ]; then
    head -c 9000 "$folder/report.txt"
    printf '\n…\n'
    tail -c 1500 "$folder/report.txt"
else
    cat "$folder/report.txt"
fi
echo "reports and logs: $folder"
[ "$failures" = 0 ]
