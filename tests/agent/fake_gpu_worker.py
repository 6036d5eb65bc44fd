"""Loaded by a Dask worker of the tests: the GPU that its nvidia-smi names is the scripted one."""

import os
from pathlib import Path

import torch.version

from coda_agent.agent.execution import device, local

torch.version.cuda = "13.0"
device.LOCKS = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
local.Device = lambda gpu: device.Device(gpu, "scripted_device")
