#!/usr/bin/env bash
# The GPU benchmark on a machine that has Python and torch: installs what cannot be imported into a folder of its own,
# from carried wheels (wheels.sh downloads them), else from the package index; then measures. torch is left as it is.
# Arguments go to `python -m benchmarks.gpu.run`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
"$python" -c "import tomllib, torch" || { echo "$python: Python 3.11 or newer with torch is needed; PYTHON names it"; exit 2; }
export PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
shopt -s nullglob
mapfile -t missing < <("$python" - benchmarks/gpu/wheels/*.whl <<'END'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
for wheel in sys.argv[1:]:
    try:
        version(Path(wheel).name.partition("-")[0])
    except PackageNotFoundError:
        print(wheel)
END
)
[ ${#missing[@]} -eq 0 ] || "$python" -m pip install --quiet --no-index --no-deps --target "$site" "${missing[@]}" ||
  echo "some wheels could not be installed: what needs them is not run"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
# timm and torchvision would bring a torch of their own.
mapfile -t wanted < <("$python" -c "
import tomllib
names = tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']
print(*(name for name in names if not name.startswith(('torch', 'timm'))), sep='\n')")
"$python" -m pip install --quiet --retries 0 --timeout 10 --prefix "$site" "${wanted[@]}" ||
  echo "packages are missing, and no package index was reached: what needs them is not run"
for folder in "$site"/lib/python*/site-packages "$site"/local/lib/python*/dist-packages; do
  PYTHONPATH="$folder:$PYTHONPATH"
done
"$python" -m benchmarks.gpu.run "$@"
