"""The map of package `coda_agent` onto top-level folders."""

from setuptools import find_packages, setup

ROOMS = (
    "agent",
    "primitives",
    "demos",
    "specs",
    "runtime",
    "generated",
    "fuse",
    "integrations",
    "evals",
)

setup(
    packages=[
        "coda_agent",
        *(
            f"coda_agent.{package}"
            for room in ROOMS
            for package in (room, *(f"{room}.{sub}" for sub in find_packages(room)))
        ),
    ],
    package_dir={"coda_agent": "root", **{f"coda_agent.{room}": room for room in ROOMS}},
)
