"""What tests of the language share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile for real: objects of earlier runs are neither found nor left behind."""
    import quack.cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUACK_ARCH", "90")
        patch.setenv("CUTE_DSL_ARCH", "sm_90a")
        patch.setattr(quack.cache, "CACHE_DIR", str(tmp_path_factory.mktemp("objects")))
        yield
