"""What tests of verbs share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cli_calls import Ran

from torch_pi2 import cli


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The command line, called in this process; what fails, fails the test unless ``ok=False``."""

    def run(*argv: object, ok: bool = True) -> Ran:
        code = cli.main([str(a) for a in argv])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert not ok or code == 0, err
        return Ran(code, out, err)

    return run
