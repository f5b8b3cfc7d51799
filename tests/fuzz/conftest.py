"""One coordinator process with a formed fleet for all of the fuzzing: what junk does to it would be seen later, too."""

from collections.abc import Iterator

import pytest

from .fleet import FuzzedFleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedFleet]:
    with FuzzedFleet(tmp_path_factory.mktemp("fuzz")) as started:
        yield started
        started.assert_unharmed()
