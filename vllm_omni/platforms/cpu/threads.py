"""Sets the compute threads, before torch is imported.

One OpenMP team serves the engine thread. Its size comes from the deploy configuration, else from the environment, else
from the machine: cgroup quota, affinity mask and physical cores.
"""

import logging
import sys

from vllm_omni import envs
from vllm_omni.edge.hardware_probe import HardwareReport, probe_hardware
from vllm_omni.errors import HardwareError

logger = logging.getLogger("vllm_omni.threads")


def choose_num_threads(requested: int | None, from_environment: int | None, report: HardwareReport) -> tuple[int, str]:
    """The number of compute threads and where it came from.

    Raises:
        HardwareError: More threads are requested than the process may use processors.
    """
    for value, source in ((requested, "num_threads"), (from_environment, "VLLM_OMNI_NUM_THREADS")):
        if value is not None:
            if value > len(report.allowed_cpus):
                raise HardwareError(
                    f"{source}={value} is more than the {len(report.allowed_cpus)} processors this process may use; "
                    "lower it or widen the affinity mask"
                )
            return value, source
    return report.num_threads, "hardware"


def configure_threads(requested: int | None) -> int:
    """Sets the OpenMP team's size for this process and returns it.

    Call before torch is imported. An application that imported torch already gets the same size through torch.
    """
    report = probe_hardware()
    num_threads, source = choose_num_threads(requested, envs.VLLM_OMNI_NUM_THREADS, report)
    envs.export({"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)})
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(num_threads)
    logger.info(
        "event=threads_set num_threads=%d source=%s allowed_cpus=%d physical_cores=%s quota_cpus=%s",
        num_threads,
        source,
        len(report.allowed_cpus),
        report.physical_cores,
        report.quota_cpus,
    )
    return num_threads
