#!/bin/sh
# Make the environment of the cross-checks, .venv-crosscheck beside the project's own: 2 GB, about three minutes.
# PYTHON names the interpreter (3.11), VENV another folder.
set -eu
cd "$(dirname "$0")/../.."
venv=${VENV:-.venv-crosscheck}
here=tests/crosscheck
"${PYTHON:-python3.11}" -m venv "$venv"
install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
install "$(grep '^torch==' $here/requirements.txt)"  # with what it needs, which differs between its CPU and GPU builds
install --no-deps -r $here/requirements.txt
install --no-deps --no-build-isolation -r $here/requirements-source.txt
install --no-deps --editable .
