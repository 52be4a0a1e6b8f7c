"""Telemetry by NVML: against a library with its functions, compiled here, and where there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc") or ""

NVML = """
#include <string.h>
typedef void *device;
static int known;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, device *found) { *found = &known; return strcmp(uuid, "GPU-1") ? 6 : 0; }
int nvmlDeviceGetClockInfo(device one, int type, unsigned *mhz) { *mhz = type == 1 ? 1335 : 3201; return one == &known ? 0 : 2; }
int nvmlDeviceGetMaxClockInfo(device one, int type, unsigned *mhz) { *mhz = 1980; return type == 1 ? 0 : 2; }
int nvmlDeviceGetPowerUsage(device one, unsigned *mw) { *mw = 612500; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(device one, unsigned *mw) { *mw = 700000; return 0; }
int nvmlDeviceGetTemperature(device one, int sensor, unsigned *celsius) { *celsius = 61; return sensor == 0 ? 0 : 2; }
int nvmlDeviceGetCurrentClocksThrottleReasons(device one, unsigned long long *reasons) { *reasons = 0x64; return 0; }
"""
"""Of an older driver, which counts no memory traffic and has the old name of the reasons."""

READ = """
import json, msgspec, time
from lamina.gpu.device_telemetry import DeviceTelemetry
import lamina.gpu.device_telemetry as module
module.EVERY_S = 0.001
known, unknown = DeviceTelemetry("GPU-1"), DeviceTelemetry("GPU-2")
unknown._sample()  # ends at once: there is nothing to sample
known.begin()
while known.clocks is None:
    time.sleep(0.001)
known.end()
print(json.dumps([msgspec.structs.asdict(known.clocks), known.bandwidth, unknown.clocks]))
"""


@pytest.mark.live
@pytest.mark.skipif(not COMPILER, reason="no C compiler")
def test_clocks_power_and_temperature_are_read_also_where_traffic_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "nvml.c").write_text(NVML)
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(tmp_path / "nvml.c")], check=True
    )
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", READ], env=environment, check=True, capture_output=True, timeout=60).stdout
    clocks, bandwidth, unknown = json.loads(said)
    assert clocks == {
        "sm_mhz": 1335,
        "max_sm_mhz": 1980,
        "memory_mhz": 3201,
        "power_w": 612.5,
        "max_power_w": 700.0,
        "temperature_c": 61,
        "slowed_by": ["power cap", "temperature"],
    }
    assert bandwidth == -1.0 and unknown is None


def test_a_machine_without_the_library_has_no_clocks() -> None:
    from lamina.gpu.device_telemetry import DeviceTelemetry

    telemetry = DeviceTelemetry("GPU-none")
    telemetry._sample()
    assert telemetry.clocks is None and telemetry.bandwidth == -1.0
