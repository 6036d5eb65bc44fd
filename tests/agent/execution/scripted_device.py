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


def ok(result: Any) -> dict[str, Any]:
    return {"kind": "ok", "result": result}


def handle(job: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    script = json.loads((HERE / "script.json").read_text())
    journal(job["kind"])
    if job["kind"] == "end":
        raise SystemExit(0)
    if job["kind"] == "probe":
        return ok(script.get("probe", True))
    if job["kind"] == "prepare":
        return ok({})
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
                said = {"message": "the baseline disagrees", "hint": "mend it"}
                return {"kind": "refused", "error": "SpecError", **said}
            if fault == "bug":
                return {"kind": "bug", "trace": "Traceback\nKeyError: 'x'"}
            if fault:
                return {"kind": "fault", "fault": fault, "detail": f"CUDA error: {fault}"}
        admitted.append([name, element, configs])
    if job["kind"] == "numerics":
        worst = {f"{p} {e}": {"seed": 1, "ratio": 0.5, "output": "O"} for p, e, _ in admitted}
        report = {"ran": "compiled kernel", "shapes": [], "worst": worst}
        return ok({"report": report, "admitted": admitted})
    line = {"m": 8, "n": 16, "k": 32, "median_us": 1.0}
    tuned = {element: [{**line, "config": configs[0]}] for _, element, configs in admitted}
    if job["kind"] != "performance":
        return ok({"tuned": tuned})
    cell = {"dtype": job["kind"], "sizes": {}, "error": "not timed"}
    return ok({"report": {"program": "", "cells": [cell]}, "tuned": tuned})


if __name__ == "__main__":
    serve(handle)
