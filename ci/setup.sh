# Sourced by ci/demo and ci/test: makes the virtual environment of this checkout, or reuses it.
#
# Needs Python >= 3.11 with venv, and nothing else. Pip reads its own settings (PIP_* and pip.conf) as
# always. $PYTHON chooses the interpreter. What is installed is pinned in ci/constraints.txt.

fail() { printf '%s\n' "$*" >&2; exit 1; }

usable_python() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python3.14 python; do
        if usable_python "$candidate"; then printf '%s' "$candidate"; return; fi
    done
    return 1
}

# What an installation depends on: the interpreter, the place, the pins, and the packaging part of
# pyproject.toml (a changed lint rule is no reason to install anything).
inputs_digest() {
    "$1" - <<'PY'
import hashlib, json, pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())
inputs = [sys.version, str(pathlib.Path.cwd()), project["build-system"], project["project"]]
inputs += [pathlib.Path("ci", name).read_text() for name in ("constraints.txt", "setup.sh")]
print(hashlib.sha256(json.dumps(inputs).encode()).hexdigest())
PY
}

install() {
    local pip=(.venv/bin/python -m pip --disable-pip-version-check install --constraint ci/constraints.txt)
    printf 'setting up .venv (once; a few minutes, most of them for PyTorch)\n'
    rm -rf .venv
    "$1" -m venv .venv
    # torch by itself and first: the plain requirement of a project may pick another build of it.
    "${pip[@]}" --quiet setuptools torch==2.13.0
    "${pip[@]}" --quiet --no-build-isolation --editable '.[dev]'
}

python=$(find_python) || fail "Python 3.11 or newer with venv must be on PATH; install it, or name one in PYTHON"
digest=$(inputs_digest "$python")
if [ "$(cat .venv/installed 2>/dev/null)" != "$digest" ]; then
    install "$python"
    printf '%s\n' "$digest" > .venv/installed
fi
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
