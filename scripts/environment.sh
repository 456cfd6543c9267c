# Sourced by the Makefile: provides libtorch unless the caller's environment already names one.
#
#   LIBTORCH=...            an unpacked libtorch (or LIBTORCH_INCLUDE and LIBTORCH_LIB): used as it is
#   LIBTORCH_USE_PYTORCH=1  the PyTorch of the Python that comes first on PATH: used as it is
#   neither                 a virtual environment with the matching wheel, made once in
#                           ${XDG_CACHE_HOME:-~/.cache}/sft-sync and used again by later clones
#
# Exports SFT_SYNC_PYTHON, a Python that can import torch: the conformance tests compare with it.

torch_version=${SFT_SYNC_TORCH_VERSION:-2.13.0}

provide_torch() {
    local home=${XDG_CACHE_HOME:-$HOME/.cache}/sft-sync
    local venv=$home/torch-$torch_version
    mkdir -p "$home" || return 1
    (
        # Two clones may ask for it at the same time.
        if command -v flock >/dev/null; then flock 9; fi
        [ -e "$venv/.complete" ] && exit 0
        echo "sft-sync: installing torch $torch_version into $venv (once; a few minutes, 5 GB)" >&2
        rm -rf "$venv" &&
            python3 -m venv "$venv" &&
            "$venv/bin/pip" install --quiet --disable-pip-version-check "torch==$torch_version" numpy >&2 &&
            touch "$venv/.complete"
    ) 9>"$home/lock" || {
        echo "sft-sync: could not install torch $torch_version; Python 3 with venv and a package index are needed" >&2
        return 1
    }
    export VIRTUAL_ENV=$venv
    export PATH=$venv/bin:$PATH
    export LIBTORCH_USE_PYTORCH=1
}

if [ -z "${LIBTORCH:-}${LIBTORCH_LIB:-}${LIBTORCH_USE_PYTORCH:-}" ]; then
    provide_torch || exit 1
fi
if [ -z "${SFT_SYNC_PYTHON:-}" ]; then
    if [ -n "${VIRTUAL_ENV:-}" ]; then SFT_SYNC_PYTHON=$VIRTUAL_ENV/bin/python; else SFT_SYNC_PYTHON=python3; fi
fi
export SFT_SYNC_PYTHON
