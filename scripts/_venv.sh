# Sourced by the other scripts: `ensure_venv EXTRA` makes .venv and installs the project in it, editable, with that extra.
# A stamp says what was installed; it is written last, so an interrupted run is done again, and a finished one takes no time.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python

say() { printf '%s\n' "$*" >&2; }

# A name on PATH may be a version manager's shim that leads nowhere, so each candidate is run, not only found.
find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    say "dataserve needs Python 3.11 or newer with venv and pip; python3 here is: $(python3 --version 2>/dev/null || echo missing)."
    say "Install one (on Debian also its python3-venv), or put it first on PATH."
    return 1
}

# What an installation depends on: the project's file, the interpreter, and where the checkout lies.
fingerprint() {
    { cat "$root/pyproject.toml"; "$python" --version; echo "$root"; } | sha256sum | cut -c -64
}

make_venv() {
    if ! "$python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        local base
        base=$(find_python) || return
        say "Making .venv with $("$base" --version)."
        "$base" -m venv --clear "$root/.venv" || return
    fi
}

install_once() {
    local extra=$1 stamp=$2
    [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ] && return
    make_venv || return
    say "Installing dataserve[$extra] and what it needs into .venv; the first time PyTorch takes some minutes."
    "$python" -m pip install --quiet --disable-pip-version-check --editable "$root[$extra]" || return
    fingerprint >"$stamp"
}

# Two scripts at once take turns: the lock is on pyproject.toml, which no step here replaces.
ensure_venv() {
    (
        flock --nonblock 9 || { say "Waiting for another script that is making .venv."; flock 9; }
        install_once "$1" "$root/.venv/.installed-$1"
    ) 9<"$root/pyproject.toml"
}
