"""The same settings as in tests/."""

from tests.conftest import (  # noqa: F401
    close_figures,
    eager,
    fixed_seed,
    free_memory,
    large_batches,
    one_thread,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
)
