#!/usr/bin/env bash
# setup.sh PYTHON VENV cpu|gpu ''|dev|docs [venv arguments]: makes the environment and installs coda-agent into it, editable.
# Safe to repeat: an environment that works is kept, and pip installs only what is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$1 venv=$2 device=$3 extras=$4
shift 4

say() { printf '[setup %4ds] %s\n' "$SECONDS" "$*"; }
fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 3
}

command -v "$python" >/dev/null || fail "no '$python' here; install Python 3.11 or newer, or pass PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old; install Python 3.11 or newer, or pass PYTHON=/path/to/python"
cache=${QUACK_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/coda-agent/quack}
mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ] ||
    fail "the cache $cache cannot be written; name another folder in XDG_CACHE_HOME, or in QUACK_CACHE_DIR for this one"

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    [ ! -e "$venv" ] || [ -e "$venv/pyvenv.cfg" ] || fail "$venv exists and is no Python environment; pass another VENV="
    say "making $venv with $("$python" --version)"
    if "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        "$python" -m venv --clear "$@" "$venv"
    elif "$python" -c 'import virtualenv' 2>/dev/null; then
        "$python" -m virtualenv --quiet --clear "$@" "$venv"
    else
        fail "this Python has neither venv with ensurepip nor virtualenv; install one ('apt-get install python3-venv', or your system's package of that kind)"
    fi
fi

[ -z "$extras" ] || tools=", with the tools for $extras"
wanted=()
if [ "$device" = gpu ]; then
    say "a GPU is here: installing coda-agent for CUDA 13${tools-}"
    extras=cu13${extras:+,$extras}
else
    # By its exact version: where pip is offered a CPU build (2.13.0+cpu), this takes it, while a plain `torch` would
    # take the newest one with its gigabytes of CUDA libraries.
    say "no GPU here: installing coda-agent with torch for the CPU${tools-}"
    wanted=(torch==2.13.0)
fi
# Bytecode of what is never imported would take half a minute; Python makes the rest at the first import.
"$venv/bin/python" -m pip --disable-pip-version-check --no-input install -qq --no-compile \
    "${wanted[@]}" -e ".${extras:+[$extras]}"
# Checkers of scripts elsewhere do not run the hook by which an editable install is imported.
ln -sfn "$PWD/.typing/coda_agent" "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/coda_agent-stubs"
say "ready: $venv/bin/coda-agent"
