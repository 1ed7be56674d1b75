"""Scripts set JAX's precision for their process, and make figures: both are put back after each test."""

import pytest
from loading import restored


@pytest.fixture(autouse=True)
def as_before():
    with restored():
        yield
