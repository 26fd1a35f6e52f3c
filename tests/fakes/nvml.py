"""A stand-in for NVML, the library of NVIDIA's driver that tells how the GPUs are. What it says is in a file that
``$NVML_SAYS`` names, a line each, and may change while it is asked::

    xid 0 79         an Xid error of GPU 0, told once
    lost 1 1         GPU 1 has fallen off the bus
    ecc 0 3          uncorrected memory errors
    rows 0 2         remapped rows: 1 one is pending, 2 a remapping has failed
    clocks 0 64      reasons for its clocks
    recovery 0 1     the action that it needs; without this line the driver does not know the field
    hang 0 1         no call about it returns
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.fakes.shared_objects import build

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
enum { OK = 0, NOT_SUPPORTED = 3, NO_DRIVER = 9, TIMEOUT = 10, LOST = 15 };
typedef struct { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } Event;
typedef struct { unsigned id, scope; long long at, latency; int kind, status; unsigned long long value; } Field;

static long says(const char *what, unsigned long gpu) {
    char word[32];
    unsigned long number;
    long value, found = -1;
    FILE *file = fopen(getenv("NVML_SAYS"), "r");
    while (file && fscanf(file, "%31s %lu %ld", word, &number, &value) == 3)
        if (!strcmp(word, what) && number == gpu) found = value;
    if (file) fclose(file);
    return found;
}
static unsigned long of(void *device) { return (unsigned long)device - 1; }
static int ask(void *device) {
    while (says("hang", of(device)) > 0) pause();
    return says("lost", of(device)) > 0 ? LOST : OK;
}
int nvmlInitWithFlags(unsigned flags) { return access(getenv("NVML_SAYS"), R_OK) ? NO_DRIVER : OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned gpu, void **device) { *device = (void *)(gpu + 1ul); return ask(*device); }
int nvmlEventSetCreate(void **set) { *set = set; return OK; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) { return OK; }
int nvmlEventSetWait_v2(void *set, Event *event, unsigned ms) {
    static long told[16];
    for (unsigned long gpu = 0; gpu < 16; gpu++) {
        long xid = says("xid", gpu);
        if (xid > 0 && xid != told[gpu]) {
            *event = (Event){(void *)(gpu + 1), 8, told[gpu] = xid};
            return OK;
        }
    }
    usleep(20000);
    return TIMEOUT;
}
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int since, unsigned long long *count) {
    long found = says("ecc", of(device));
    *count = found;
    return ask(device) ? LOST : found < 0 ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *right, unsigned *wrong, unsigned *pending, unsigned *failed) {
    long found = says("rows", of(device));
    *pending = found == 1;
    *failed = found == 2;
    return ask(device);
}
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) {
    long found = says("clocks", of(device));
    *reasons = found < 0 ? 0 : found;
    return ask(device);
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) { *celsius = 91; return ask(device); }
int nvmlDeviceGetFieldValues(void *device, int count, Field *fields) {
    long found = says("recovery", of(device));
    fields->status = fields->id != 230 || found < 0 ? NOT_SUPPORTED : OK;
    fields->value = found;
    return ask(device);
}
"""


class Driver:
    """The library in a folder, with what it says of GPUs that are all well so far."""

    def __init__(self, folder: Path) -> None:
        self._says = folder / "nvml-says"
        self.library = build(folder / "nvml" / "libnvidia-ml.so.1", _SOURCE, "-Wl,-soname,libnvidia-ml.so.1")
        self.say()

    def say(self, *lines: str) -> None:
        """From now on this, and nothing else."""
        new = self._says.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self._says)

    def env(self, env: Mapping[str, str]) -> dict[str, str]:
        """``env`` of a program that finds it."""
        path = os.pathsep.join(filter(None, [str(self.library.parent), env.get("LD_LIBRARY_PATH")]))
        return {**env, "LD_LIBRARY_PATH": path, "NVML_SAYS": str(self._says)}
