#!/usr/bin/env bash
# What `benchmarks.gpu` imports besides torch, torchvision and numpy, as wheels for Python 3.12 on Linux: for a machine
# that reaches no package index. Only what is missing there is installed (run.sh). Without OpenCV, which is too large to
# carry, slides are not read: made pictures take their place, and the smoke part runs no commands.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
rm -rf wheels
"$python" -m pip download --quiet --no-deps --only-binary=:all: --dest wheels --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux2014_x86_64 --platform any \
  psutil pillow openslide-python openslide-bin simplejpeg tifffile imagecodecs tyro docstring-parser typeguard pyyaml
du -sh wheels
