#!/usr/bin/env bash
# What the product needs besides torch, torchvision, OpenCV, scikit-learn, pyarrow and other large packages, as wheels for
# Python 3.12 on Linux: for a machine that reaches no package index. Only what is missing there is installed (run.sh).
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
rm -rf wheels
"$python" -m pip download --quiet --no-deps --only-binary=:all: --dest wheels --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64 \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any \
  psutil pillow 'openslide-python<1.5' openslide-bin simplejpeg tifffile imagecodecs pyyaml shapely \
  tyro docstring-parser typeguard zarr msgspec donfig numcodecs google-crc32c \
  albumentations==2.0.8 albucore==0.0.24 stringzilla simsimd pydantic pydantic-core annotated-types typing-inspection
du -sh wheels
