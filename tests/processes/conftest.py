"""A real coordinator for each test that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .house import FLEET, Coordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    started = Coordinator(tmp_path, FLEET)
    try:
        yield started.start()
    finally:
        started.kill()
