from ..runtime.conftest import context, drive, loop  # noqa: F401 - the fixtures
