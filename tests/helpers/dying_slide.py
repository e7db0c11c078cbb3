"""A slide whose library takes the process along when it is opened."""

from __future__ import annotations

import os
import signal

from pipelines.catalog.catalog import SlideSpec
from pipelines.slides.slide import Slide


class DyingSpec(SlideSpec):
    def open(self) -> Slide:
        os.kill(os.getpid(), signal.SIGABRT)
        raise AssertionError("unreachable")
