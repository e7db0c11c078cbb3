#!/usr/bin/env bash
# The GPU benchmark on a bare machine: installs carried wheels (wheels.sh makes them) for what cannot be imported, then
# measures. Arguments go to `python -m benchmarks.gpu.run`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python=${PYTHON:-python3}
site=$(mktemp -d)
declare -A module=([psutil]=psutil [pillow]=PIL [openslide_python]=openslide [openslide_bin]=openslide_bin
  [simplejpeg]=simplejpeg [tifffile]=tifffile [imagecodecs]=imagecodecs)
shopt -s nullglob
for wheel in benchmarks/gpu/wheels/*.whl; do
  name=$(basename "${wheel%%-*}")
  "$python" -c "import ${module[$name]}" 2>/dev/null ||
    "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$site" "$wheel" ||
    echo "$wheel could not be installed: what needs it is skipped"
done
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m benchmarks.gpu.run "$@"
