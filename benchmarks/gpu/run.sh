#!/usr/bin/env bash
# The GPU benchmark on a machine that has Python and torch: installs what cannot be imported into a folder of its own,
# from carried wheels (wheels.sh downloads them), else from the package index; then measures. torch is left as it is.
# Arguments go to `python -m benchmarks.gpu.run`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python=${PYTHON:-python3}
export PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
shopt -s nullglob
for wheel in benchmarks/gpu/wheels/*.whl; do
  name=$(basename "${wheel%%-*}")
  "$python" -c "from importlib.metadata import version; version('$name')" 2>/dev/null ||
    "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$site" "$wheel" ||
    echo "$wheel could not be installed: what needs it is not run"
done
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
