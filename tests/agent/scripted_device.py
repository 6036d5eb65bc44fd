"""A device child for the tests: it needs no GPU, and fails at the tiles its script names.

The script lies in the first folder of PYTHONPATH, and so does the journal of what was launched.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coda_agent.agent.execution.child import serve

HERE = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])


def journal(line: str) -> None:
    with (HERE / "journal").open("a") as file:
        file.write(line + "\n")


def handle(job: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    script = json.loads((HERE / "script.json").read_text())
    journal(job["kind"])
    if job["kind"] == "end":
        raise SystemExit(0)
    if job["kind"] == "probe":
        return {"ok": {"right": script.get("probe", True)}}
    if job["kind"] == "prepare":
        return {"ok": None}
    admitted = []
    if script.get("once") and not (HERE / "done").exists():
        (HERE / "done").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    for name, element, configs in job["tiles"]:
        for config in configs:
            tile = f"{config['tile_m']}x{config['tile_n']}"
            journal(f"{name} {element} {tile}")
            tell({"done": 0, "total": 1, "note": tile})
            sizes = {"m": 8, "n": 16, "k": 32}
            tell({"launch": {"program": name, "dtype": element, "config": config, **sizes}})
            fault = script.get(tile)
            if fault == "hang":
                time.sleep(1000)
            if fault == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if fault == "error":
                return {"error": ["SpecError", "the baseline disagrees", "mend it"]}
            if fault == "bug":
                return {"bug": "Traceback\nKeyError: 'x'"}
            if fault:
                return {"fault": fault, "detail": f"CUDA error: {fault}"}
        admitted.append([name, element, configs])
    if job["kind"] == "numerics":
        worst = {f"{p} {e}": {"ratio": 0.5, "output": "O"} for p, e, _ in admitted}
        return {"ok": {"findings": [], "worst": worst, "refused_tiles": [], "admitted": admitted}}
    tuned = {element: [{"config": configs[0]}] for _, element, configs in admitted}
    return {"ok": {"findings": [], "refused_tiles": [], "cells": [job["kind"]], "tuned": tuned}}


if __name__ == "__main__":
    serve(handle)
