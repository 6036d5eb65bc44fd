"""Skips tests marked `gpu` where there is no Hopper GPU. Fixtures belong to each room's tests."""

import pytest


def _has_hopper() -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    major, _ = torch.cuda.get_device_capability()
    return major == 9


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_hopper():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))
