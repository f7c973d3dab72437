"""All scenarios run everywhere: see tests/support/everywhere.py."""

from tests.support.everywhere import (
    deployment as deployment,
    pytest_collection_modifyitems as pytest_collection_modifyitems,
    pytest_generate_tests as pytest_generate_tests,
)
