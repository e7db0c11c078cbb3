"""GPUs that are simulated on the CPU, for tests of what a GPU would do to the project: see ``gpus.simulated``."""

from tests.helpers.sim_gpu.gpus import Gpus, simulated
from tests.helpers.sim_gpu.timeline import Hang

__all__ = ["Gpus", "Hang", "simulated"]
